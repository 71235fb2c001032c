"""The tutorials on uses of derivatives: their blocks run, and their results match sources that don't use onnxgrad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from tests.docs.test_pages import run_blocks

Array = NDArray[np.floating]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a page runs, which stays the current one for the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(file: str) -> dict[str, torch.Tensor]:
    """Return the float initializers of a model as tensors in double precision."""
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(file).graph.initializer}
    return {name: torch.tensor(value).double() for name, value in arrays.items() if value.dtype.kind == "f"}


def run(file: str, **feeds: Array) -> list[Array]:
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)


def test_force_matching(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forces match PyTorch's gradient of the same network, and those of the potential, which differences prove."""
    names = run_blocks("tutorials/force-matching.md", folder, monkeypatch)
    data = np.load("test.npz")
    slope, _ = run("slope.onnx", positions=data["positions"])

    w = weights("trained.onnx")
    x = torch.tensor(data["positions"]).double().requires_grad_()
    first, second = torch.triu_indices(4, 4, 1)
    distance = torch.linalg.vector_norm(x[:, first] - x[:, second], dim=-1, keepdim=True)
    (torch.tanh(distance @ w["w1"] + w["b1"]) @ w["w2"]).sum().backward()
    np.testing.assert_allclose(slope, x.grad, rtol=1e-3, atol=1e-5)

    assert np.sqrt(np.mean((slope + data["forces"]) ** 2)) < 0.02 * np.sqrt(np.mean(data["forces"] ** 2))
    assert abs(names["energy"][:, 0] + names["kinetic"] - names["start"]).max() < 0.01 * names["kinetic"].mean()

    def energy(x: Array) -> Array:
        pairs = np.linalg.norm(x[:, first] - x[:, second], axis=-1)
        return ((1 - np.exp(1 - pairs)) ** 2).sum(1)

    x, towards = data["positions"].astype(np.float64), np.random.default_rng(1).normal(size=(200, 4, 3))
    difference = (energy(x + 1e-5 * towards) - energy(x - 1e-5 * towards)) / 2e-5
    np.testing.assert_allclose(-(data["forces"] * towards).sum((1, 2)), difference, rtol=1e-4, atol=1e-5)
