"""A look at many vectors at once passes over none that follows a formula, and over most that were learned."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.passes.parameters import formulas

EVERY = (*formulas.ANYWHERE, *formulas.ELEMENTWISE, *formulas.MULTIPLIED, *formulas.PROGRESSIONS)
TYPES = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}


def regular(length: int) -> np.ndarray:
    """Vectors of one length that follow formulas, with noise of several sizes."""
    rng, n = np.random.default_rng(0), np.arange(length)
    turn, start, factor = rng.uniform(0.05, 3.1, 40), rng.uniform(0, 6, 40), rng.uniform(0.5, 1.5, 40)
    found = [
        *np.sin(np.outer(turn, n) + start[:, None]), *(start[:, None] + np.outer(turn, n)), *factor[:, None] ** n,
        np.hanning(length), np.hamming(length), np.hanning(length + 1)[:-1], 0.4 + np.hanning(length), 2.0 ** -n,
        2.0 ** (n % 3), n % 4, np.where(n % 3, 0.0, -1e9), np.where(n % 3, 1.0, 1e31), np.where(n % 5, np.nan, 1),
        -(n % 3) * 0.3, np.zeros(length), np.ones(length), np.full(length, 8.0), *np.eye(3, length),
        *(x / np.linalg.norm(x) for x in rng.standard_normal((4, length))), *rng.standard_normal((20, length)),
    ]  # fmt: skip
    noise = [size * rng.standard_normal((len(found), length)) for size in (0, 1e-6, 1e-5, 5e-5, 3e-4)]
    return np.concatenate([np.array(found) * (1 + each) for each in noise])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("length", [8, 33])
@pytest.mark.thinned(2)
def test_what_passes_a_test_is_a_suspect(length: int, dtype: int) -> None:
    with np.errstate(over="ignore"):
        vectors = regular(length).astype(TYPES[dtype]).astype(np.float64)
    tol = formulas.tolerance(TensorProto(data_type=dtype))
    seen = formulas.suspects(vectors, tol)
    passed = [any(formulas.first(x, tol, (each,)) for each in EVERY) for x in vectors]
    assert sum(passed) > 100
    assert not [x for x, passes, suspect in zip(vectors, passed, seen, strict=True) if passes and not suspect]


def test_what_was_learned_is_none() -> None:
    learned = np.random.default_rng(1).standard_normal((2000, 8))
    assert formulas.suspects(learned, 2e-5).sum() < 10
    assert not formulas.suspects(np.stack([np.zeros(16), np.ones(16), np.full(16, 0.25)]), 2e-5).any()
