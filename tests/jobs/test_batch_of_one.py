"""A last batch of one sample has no variance: BatchNormalization in training mode can't learn from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from tests.cli_harness import Shell, save

NORMALIZED = """
<ir_version: 8, opset_import: ["": 17]>
normalized (float[batch, 4] x) => (float[batch, 2] y)
<float[4, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float[3] s = {1, 2, 3}, float[3] o = {1, 0, -1},
 float[3] mean = {0, 0, 0}, float[3] var = {1, 1, 1}, float[3, 2] v = {1, 2, 3, 4, 5, 6}>
{
  h = MatMul(x, w)
  n = BatchNormalization<epsilon = 0.00001, momentum = 0.9>(h, s, o, mean, var)
  y = MatMul(n, v)
}
"""

SPATIAL = """
<ir_version: 8, opset_import: ["": 17]>
spatial (float[batch, 3, 2, 2] x) => (float[batch, 3, 2, 2] y)
<float[3] s = {1, 2, 3}, float[3] o = {1, 0, -1}, float[3] mean = {0, 0, 0}, float[3] var = {1, 1, 1}>
{ y = BatchNormalization(x, s, o, mean, var) }
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(NORMALIZED, Path("m.onnx"))
    save(SPATIAL, Path("s.onnx"))
    rng = np.random.default_rng(0)
    np.savez(
        "m.npz", **{name: rng.standard_normal((41, n)).astype(np.float32) for name, n in {"x": 4, "label": 2}.items()}
    )
    np.savez("s.npz", **{name: rng.standard_normal((41, 3, 2, 2)).astype(np.float32) for name in ("x", "label")})
    return Shell(tmp_path, capsys)


TRAIN = ("train", "--mode", "train", "--epochs", "1", "--optimizer", "sgd", "--lr", "0.001", "--threads", "1", "-o",
         "t.onnx", "--force")  # fmt: skip
CAUTION = "BatchNormalization of 'h' in training mode can't compute the variance of a batch of one sample"


@pytest.mark.slow
def test_the_last_batch_of_one_sample_is_left_out_as_in_pytorch_with_drop_last(shell: Shell) -> None:
    result = shell(*TRAIN, "m.onnx", "--data", "m.npz", "--batch-size", "8")
    assert result.code == 0 and f"caution: {CAUTION}: the last sample of each epoch is left out" in result.err
    stored = {
        tensor.name: torch.tensor(numpy_helper.to_array(tensor).copy())
        for tensor in onnx.load("m.onnx").graph.initializer
    }
    weights = [stored[name].requires_grad_() for name in ("w", "s", "o", "v")]
    steps = torch.optim.SGD(weights, lr=0.001)
    data = np.load("m.npz")
    order = np.random.Generator(np.random.PCG64((0, 0))).permutation(41)
    for start in range(0, 40, 8):
        x, y = (torch.tensor(data[name][order[start : start + 8]]) for name in ("x", "label"))
        steps.zero_grad()
        n = torch.nn.functional.batch_norm(x @ weights[0], None, None, weights[1], weights[2], training=True)
        torch.mean((n @ weights[3] - y) ** 2).backward()
        steps.step()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        torch.nn.functional.batch_norm(torch.ones(1, 3), None, None, training=True)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("t.onnx").graph.initializer}
    for name, weight in zip(("w", "s", "o", "v"), weights, strict=True):
        np.testing.assert_allclose(found[name], weight.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        ("m.onnx", "--data", "m.npz", "--batch-size", "7"),
        ("m.onnx", "--data", "m.npz", "--batch-size", "13"),
        ("m.onnx", "--data", "m.npz", "--batch-size", "8", "--mode", "eval", "--lr", "1e-9"),
        ("s.onnx", "--data", "s.npz", "--batch-size", "8"),
    ],
)
def test_no_sample_is_left_out_otherwise(shell: Shell, arguments: tuple[str, ...]) -> None:
    result = shell(*TRAIN, *arguments)
    assert result.code == 0 and not any(words in result.err for words in ("left out", "of one step")), result.err


def test_batches_of_one_sample_are_refused(shell: Shell) -> None:
    arguments = (*TRAIN, "m.onnx", "--data", "m.npz", "--batch-size")
    result = shell(*arguments, "1")
    assert result.code == 2 and CAUTION in result.err, result.err
    assert result.facts == ("conflict", "BatchNormalization", "h") and "`mode='eval'`" in result.hint
    assert shell(*arguments, "2").code == 0 and shell(*arguments, "1", "--mode", "eval", "--lr", "1e-9").code == 0
