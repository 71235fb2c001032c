"""A loss that is not finite: batches in which no label counts go on, and errors name the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from tests.cli_harness import Shell, save

LINEAR = """
<ir_version: 8, opset_import: ["": 17]>
linear (float[batch, 4] x) => (float[batch, 3] y)
<float[4, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float[3] b = {1, 2, 3}>
{ h = MatMul(x, w)  y = Add(h, b) }
"""

LOGARITHM = """
<ir_version: 8, opset_import: ["": 17]>
logarithm (float[batch, 4] x) => (float[batch, 3] y)
<float[4, 3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.1, 0.2, 0.3}>
{ h = MatMul(x, w)  l = Log(h)  y = Neg(l) }
"""

X = np.abs(np.random.default_rng(0).standard_normal((24, 4))).astype(np.float32)
ORDER = np.random.Generator(np.random.PCG64((0, 0))).permutation(24)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


TRAIN = ("train", "m.onnx", "--data", "m.npz", "--batch-size", "8", "--threads", "1", "-o", "t.onnx")


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_a_batch_in_which_no_label_counts_has_gradient_0_as_in_pytorch(shell: Shell, optimizer: str) -> None:
    """The second of three batches; the first one has a label that does not count, too."""
    save(LINEAR, Path("m.onnx"))
    labels = np.random.default_rng(1).integers(0, 3, 24)
    labels[[*ORDER[8:16], ORDER[0]]] = -100
    np.savez("m.npz", x=X, label=labels)
    arguments = ("--loss", "cross-entropy", "--optimizer", optimizer, "--lr", "0.01", "--clip-norm", "1")
    decay = ("--optimizer-option", "weight-decay=0.1")
    result = shell(*TRAIN, *arguments, *decay, "--epochs", "1")
    assert result.code == 0, result.err
    assert "caution: 1 of 3 batches have only ignored labels" in result.err, result.err
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("m.onnx").graph.initializer}
    weights = {name: torch.tensor(array.copy(), requires_grad=True) for name, array in stored.items()}
    steps = (
        torch.optim.AdamW(weights.values(), lr=0.01, weight_decay=0.1)
        if optimizer == "adamw"
        else torch.optim.SGD(weights.values(), lr=0.01, momentum=0.9, weight_decay=0.1)
    )
    losses = []
    for start in range(0, 24, 8):
        batch = ORDER[start : start + 8]
        steps.zero_grad()
        scores = torch.tensor(X[batch]) @ weights["w"] + weights["b"]
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels[batch]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        steps.step()
        losses.append(loss.item())
    assert np.isnan(losses[1])
    for tensor in onnx.load("t.onnx").graph.initializer:
        wanted = weights[tensor.name].detach().numpy()
        np.testing.assert_allclose(numpy_helper.to_array(tensor), wanted, rtol=1e-6, atol=1e-6)
    lines = [json.loads(line) for line in Path("t.onnx.run/train.jsonl").read_text().splitlines()]
    assert lines[1]["loss"] is None
    np.testing.assert_allclose(lines[-1]["loss"], (losses[0] + losses[2]) / 2, rtol=1e-6)
    again = shell(*TRAIN, *arguments, *decay, "--epochs", "2", "--resume")
    assert again.code == 0 and "2 of 6 batches have only ignored labels" not in again.err, again.err


@pytest.mark.parametrize(
    ("model", "x", "more", "words", "advice"),
    [
        (LOGARITHM, -X, (), "step 1: the loss is nan", "keep the input of Log in its domain"),
        (LOGARITHM, X, ("--lr", "10"), "step 2: the loss is nan", "or try a smaller learning rate"),
        (LINEAR, X, ("--lr", "1e30"), "step 2: the loss is inf", "try a smaller learning rate, or look at"),
        (LINEAR, X * 1e30, (), "step 1: the loss is inf", "hint: look at these samples"),
    ],
)
def test_the_error_names_the_first_value_that_is_not_finite(
    shell: Shell, model: str, x: np.ndarray, more: tuple[str, ...], words: str, advice: str
) -> None:
    save(model, Path("m.onnx"))
    np.savez("m.npz", x=x, label=np.ones((24, 3), np.float32))
    result = shell(*TRAIN, "--optimizer", "sgd", *more)
    assert result.code == 1 and words in result.err and advice in result.err, result.err
    first = "'l' (output of Log)" if model == LOGARITHM else "(output of Mul)"
    assert "the first value that is not finite is" in result.err and first in result.err, result.err


def test_weights_that_such_a_batch_would_destroy_end_the_run(shell: Shell) -> None:
    """The other loss is nan too: then its gradient is not 0."""
    save(LOGARITHM.replace("(float[batch, 3] y)", "(float[batch, 3] y, float[batch, 3] h)"), Path("m.onnx"))
    labels = np.zeros(24, np.int64)
    labels[ORDER[8:16]] = -100
    x = X.copy()
    x[ORDER[8:16]] *= -1
    np.savez("m.npz", x=x, classes=labels, label=np.ones((24, 3), np.float32))
    losses = ("--loss", "cross-entropy:h:classes", "--loss", "mse:y")
    result = shell(*TRAIN, *losses, "--epochs", "1")
    assert result.code == 1 and "'w' is no longer finite" in result.err, result.err
    assert not Path("t.onnx").exists()
