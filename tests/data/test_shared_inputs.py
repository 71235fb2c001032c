"""Inputs that are the same for all samples, such as the initial state of a recurrent network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.cli_harness import Shell, save

RNG = np.random.default_rng(8)

MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[{batch}, 3] x, float[2, {batch}, 3] state) => (float[{batch}, 2] y)
<float[3, 2] w = {{1, 2, 3, 4, 5, 6}}, int64[1] first = {{0}}> {{
  s = ReduceSum<keepdims = 0>(state, first)
  a = Add(x, s)
  y = MatMul(a, w)
}}"""


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def test_one_sample_beside_a_state_is_a_sample(shell: Shell) -> None:
    """Both arrays have the shapes that the model declares, and only the first size of one of them is 1."""
    save(MODEL.format(batch="1"), shell.folder / "model.onnx")
    x, state = (np.float32(RNG.standard_normal(shape)) for shape in ((1, 3), (2, 1, 3)))
    np.savez(shell.folder / "data.npz", x=x, state=state)
    assert shell("predict", "model.onnx", "--data", "data.npz", "-o", "y.npz").code == 0
    w = np.array([[1, 2], [3, 4], [5, 6]])
    np.testing.assert_allclose(np.load("y.npz")["y"], (x + state.sum(0)) @ w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "samples"), [("1", 1), ("1", 3), ("", 4)])
def test_one_state_is_fed_with_each_batch(batch: str, samples: int, shell: Shell) -> None:
    """Of one sample, a step of plain gradient descent is compared with the formula."""
    save(MODEL.format(batch=batch or "?"), shell.folder / "model.onnx")
    x, label = (np.float32(RNG.standard_normal((samples, size))) for size in (3, 2))
    state = np.float32(RNG.standard_normal((2, 1, 3)))
    np.savez(shell.folder / "data.npz", x=x, label=label, state=state)
    step = ("--optimizer", "sgd", "--learning-rate", "0.1", "--epochs", "1", "--batch-size", batch or samples)
    result = shell("train", "model.onnx", "--loss", "mse", "--data", "data.npz", *step, "-o", "trained.onnx")
    assert result.code == 0, result.err
    session = onnxruntime.InferenceSession("trained.onnx")
    y = np.concatenate([session.run(None, {"x": row[None], "state": state})[0] for row in x])
    result = shell("evaluate", "trained.onnx", "--loss", "mse", "--data", "data.npz", "--batch-size", 1, "--json")
    assert result.code == 0, result.err
    np.testing.assert_allclose(result.json["results"]["loss"], np.mean((y - label) ** 2), rtol=1e-4)
    w, a = np.array([[1, 2], [3, 4], [5, 6]], np.float32), x + state.sum(0)
    if batch != "1" or samples == 1:
        stepped = w - 0.1 * a.T @ (2 * (a @ w - label) / label.size)
        np.testing.assert_allclose(y, a @ stepped, rtol=1e-4, atol=1e-5)
