"""Values that follow a formula are told from learned ones, in each type, that are smooth, sparse, round or alike."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.passes.parameters import formulas

RANDOM = np.random.default_rng(0)
EVERY = (*formulas.ANYWHERE, *formulas.ELEMENTWISE, *formulas.MULTIPLIED)


def words(x: np.ndarray) -> str:
    tensor = numpy_helper.from_array(x)
    values = formulas.sample(tensor, None)
    assert values is not None
    found = formulas.first(values, formulas.tolerance(tensor), EVERY)
    return found.words if found else ""


def angles(length: int = 64, count: int = 8, base: float = 1e4) -> np.ndarray:
    return np.arange(length)[:, None] * base ** (-np.arange(count) / count)


def interleaved(length: int, count: int) -> np.ndarray:
    turn = angles(length, count)
    return np.stack([np.sin(turn), np.cos(turn)], -1).reshape(length, -1)


def padded() -> np.ndarray:
    table = interleaved(20, 8)
    table[1] = 0
    return table


def triangles() -> np.ndarray:
    places, tops = np.arange(65)[:, None], np.linspace(0, 64, 12) ** 2 / 64
    rise, fall = (places - tops[:-2]) / np.diff(tops)[:-1], (tops[2:] - places) / np.diff(tops)[1:]
    return np.maximum(np.minimum(rise, fall), 0)


def path_graph() -> np.ndarray:
    near = (np.abs(np.subtract.outer(np.arange(8), np.arange(8))) <= 1).astype(float)
    degree = near.sum(1) ** -0.5
    return near * degree * degree[:, None]


SINES, STEPS = "a table of sines and cosines", "a table of sines or of evenly spaced values"
MASK = "a mask with the values 0 and a large negative number"
CONSTANTS = {
    "positions": (interleaved(64, 8), SINES),
    "positions and padding": (padded(), SINES),
    "cosines": (np.cos(angles()), STEPS),
    "sines, twice, under two axes": (np.sin(np.tile(angles(), 2))[None, None], STEPS),
    "a basis of Fourier": (np.vstack([np.cos(turn := np.outer(np.arange(33), np.arange(64)) * np.pi / 32),
                                      -np.sin(turn)]), STEPS),
    "a basis of Fourier in a window": ((np.cos(turn) * np.hanning(64))[:, None], STEPS),
    "cosine transform": (np.cos(np.pi / 16 * np.outer(np.arange(16) + 0.5, np.arange(16))), STEPS),
    "ALiBi": (-(0.5 ** np.arange(1, 9))[:, None, None] * np.arange(12), STEPS),
    "centers": (np.linspace(0, 5, 16), STEPS),
    "a grid, in a row": (np.stack(np.meshgrid(np.arange(4) + 0.5, np.arange(4) + 0.5), -1).reshape(-1, 2),
                         "a grid of evenly spaced values"),
    "a mask of lowest floats": (np.triu(np.full((12, 12), np.finfo(np.float16).min), 1), MASK),
    "a mask of infinities": (np.triu(np.full((12, 12), -np.inf), 1), MASK),
    "Swin's mask": (np.kron(np.array([[0.0, -100], [-100, 0]]), np.ones((8, 8))), MASK),
    "a triangle of ones": (np.tril(np.ones((12, 12))), "a mask of zeros and ones"),
    "window of Hann": (np.hanning(33)[:-1], "a window of a Fourier transform"),
    "window of Hamming": (np.hamming(32), "a window of a Fourier transform"),
    "mel": (triangles(), "a bank of filters"),
    "mel, turned": (triangles().T, "a bank of filters"),
    "anchors": (np.array([[10, 13], [16, 30], [33, 23.0]]), "a table of whole numbers"),
    "slopes": (2.0 ** (-np.arange(1, 9) * 1.0)[:, None, None], "a geometric progression"),
    "a graph": (path_graph(), "the adjacency matrix of a graph"),
    "neighbours' mean": (np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None], "the adjacency matrix of a graph"),
    "shares of neighbours": (np.triu(np.ones((6, 6))) / np.arange(1, 7), "the adjacency matrix of a graph"),
    "positions of a batch": (interleaved(20, 8)[None], "a table of sines and cosines"),
    "a blur of sound": (np.tile(np.array([1, 3, 1]) / 5, (4, 1, 1)), "the same kernel for all channels"),
    "a blur": (np.tile(np.outer([1, 3, 1], [1, 3, 1]) / 25, (4, 1, 1, 1)), "the same kernel for all channels"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_formulas_are_seen(name: str, dtype: type) -> None:
    values, expected = CONSTANTS[name]
    assert words(values.astype(dtype)) == expected


def smooth(rows: int, width: int) -> np.ndarray:
    """A learned table of positions whose neighbours are alike: random waves, of several paces in each column."""
    places, waves = np.linspace(0, 1, rows)[:, None, None], np.arange(1, 6)
    return (RANDOM.standard_normal((width, 5)) * np.sin(places * waves + RANDOM.uniform(0, 6, (width, 5)))).sum(-1)


def tables_that_were_learned() -> dict[str, np.ndarray]:
    normal = RANDOM.standard_normal
    x = normal((16, 8))
    nearly = interleaved(64, 8) + 0.003 * normal((64, 16))
    return {
        "random": normal((16, 8)),
        "random vector": normal(32),
        "smooth positions": smooth(64, 8),
        "positions that began as sines": nearly,
        "cosines that were tuned": np.cos(angles()) + 0.003 * normal((64, 8)),
        "frequencies that were tuned": 1e4 ** (-np.arange(8) / 8) * (1 + 0.01 * normal(8)),
        "centers that were tuned": np.linspace(0, 5, 16) + 0.01 * normal(16),
        "zeros": np.zeros((16, 8)),
        "ones": np.ones(16),
        "a quarter": np.full(16, 0.25),
        "identity": np.eye(8),
        "a spatial transformer's bias": np.array([1.0, 0, 0, 0, 1, 0]),
        "pruned": normal((16, 16)) * (RANDOM.random((16, 16)) > 0.7),
        "pruned and rectified": np.maximum(normal((16, 16)), 0),
        "rows of length one": x / np.linalg.norm(x, axis=1, keepdims=True),
        "rows of attention": np.exp(x) / np.exp(x).sum(1, keepdims=True),
        "the same row": np.tile(normal(8), (16, 1)),
        "a symmetric matrix": x.T @ x,
        "a relative bias of a window": smooth(25, 4),
        "depthwise kernels": normal((8, 1, 3, 3)),
        "two": np.array([0.5, 2.0]),
    }


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", tables_that_were_learned())
def test_what_was_learned_follows_none(name: str, dtype: type) -> None:
    assert words(tables_that_were_learned()[name].astype(dtype)) == ""


def test_a_rotation_needs_both_its_parts() -> None:
    turn = RANDOM.uniform(0, 6, (5, 7))
    assert formulas.is_rotation(np.cos(turn), np.sin(turn), 1e-6)
    assert not formulas.is_rotation(np.cos(turn), np.sin(turn) + 1e-3, 1e-6)
    assert not formulas.is_rotation(np.ones((5, 7)), np.zeros((5, 7)), 1e-6)


def test_values_beside_the_model_are_read(tmp_path: Path) -> None:
    table = np.cos(angles()).astype(np.float32)
    tensor = numpy_helper.from_array(table, "cos")
    onnx.external_data_helper.set_external_data(tensor, "weights.bin", offset=16, length=table.nbytes)
    tensor.ClearField("raw_data")
    assert formulas.sample(tensor, tmp_path) is None
    assert formulas.sample(tensor, None) is None
    (tmp_path / "weights.bin").write_bytes(bytes(16) + table.tobytes())
    found = formulas.sample(tensor, tmp_path)
    assert found is not None and np.array_equal(found, table)
    (tmp_path / "weights.bin").write_bytes(bytes(8) + table.tobytes())
    assert formulas.sample(tensor, tmp_path) is None


def test_of_a_large_table_the_first_entries_are_read() -> None:
    tensor = numpy_helper.from_array(np.zeros((3, 200, 150), np.float32))
    found = formulas.sample(tensor, None)
    assert found is not None and found.shape == (3, 128, 128)


WITH_PROGRESSIONS = (*formulas.ANYWHERE, *formulas.ELEMENTWISE, *formulas.MULTIPLIED, *formulas.PROGRESSIONS)


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
    passed = [any(formulas.first(x, tol, (each,)) for each in WITH_PROGRESSIONS) for x in vectors]
    assert sum(passed) > 100
    assert not [x for x, passes, suspect in zip(vectors, passed, seen, strict=True) if passes and not suspect]


def test_what_was_learned_is_none() -> None:
    learned = np.random.default_rng(1).standard_normal((2000, 8))
    assert formulas.suspects(learned, 2e-5).sum() < 10
    assert not formulas.suspects(np.stack([np.zeros(16), np.ones(16), np.full(16, 0.25)]), 2e-5).any()


@pytest.mark.parametrize("rows", [1, 2])
def test_most_rows_of_a_table_of_sines_are_sines(rows: int) -> None:
    """A row of zeros is that of a padding token."""
    angles = np.arange(1, 3)[:, None] * np.array([0.7, 0.1])
    table = np.concatenate([np.sin(angles), np.cos(angles)], 1)[:rows]
    assert formulas.is_sinusoidal(np.concatenate([table, np.zeros((3 - rows, 4))]), 2e-5) == (rows == 2)
