"""The reference of every optimizer's step, beside torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.verification.checks.reference_optimizers import REFERENCES, clip
from tests.optimizers.test_registry import IDS, SETTINGS


def test_every_optimizer_has_a_reference() -> None:
    assert list(REFERENCES) == [each.name for each in OPTIMIZERS]


@pytest.mark.parametrize(("name", "given", "kind", "same"), SETTINGS, ids=IDS)
@pytest.mark.thinned(8, 2)
def test_reference_beside_torch(
    name: str, given: dict[str, Any], kind: Callable[..., torch.optim.Optimizer], same: dict[str, Any]
) -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((4, 3))
    weight = torch.nn.Parameter(torch.tensor(w))
    theirs = kind([weight], lr=0.02, **same)
    found = OPTIMIZERS.lookup(name)
    own = {option.name: option.default for option in found.options} | given
    slots = {slot: np.full_like(w, own.get("initial_accumulator_value", 0.0)) for slot in found.slots}
    for t in range(1, 30):
        g = rng.standard_normal(w.shape) * 10.0 ** rng.integers(-9, 1, w.shape)
        weight.grad = torch.tensor(g)
        theirs.step()
        w, after = REFERENCES[name](w, g, slots, own, 0.02, t)
        slots |= after
        np.testing.assert_allclose(w, weight.detach().numpy(), rtol=1e-11, atol=1e-13)


def test_clipping_beside_torch() -> None:
    rng = np.random.default_rng(0)
    gradients = {name: rng.standard_normal((3, 2)) for name in "ab"}
    for norm, value in ((0.5, None), (100.0, None), (None, 0.3)):
        theirs = [torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in gradients]
        for each, gradient in zip(theirs, gradients.values(), strict=True):
            each.grad = torch.tensor(gradient)
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, norm)
        else:
            torch.nn.utils.clip_grad_value_(theirs, value or 0.0)
        for each, ours in zip(theirs, clip(gradients, norm, value).values(), strict=True):
            assert each.grad is not None
            np.testing.assert_allclose(ours, each.grad.numpy(), rtol=1e-12)
