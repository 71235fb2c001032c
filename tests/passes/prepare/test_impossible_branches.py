"""A branch of an If that contradicts the rest of the model is not differentiated, and a run that chooses it fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli.execution.executor import Executor
from tests.cli_harness import Shell

RNG = np.random.default_rng(5)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


CELL = """<ir_version: 8, opset_import: ["": 17]>
g (float[b, 4, t] x, int64 rate) => (float[b, 3] y)
<float[1, 3, 3] R = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64 fast = {16000}, int64[1] one = {1}, int64 two = {2},
 int64[1] zero = {0}, int64[1] last = {2}> {
  chosen = Equal(rate, fast)
  y = If(chosen) <then_branch = then () => (z) {
    f = Tanh(x)
    a = AveragePool<kernel_shape = [8], strides = [8]>(f)
    size = Shape<start = 2, end = 3>(a)
    single = Equal(size, one)
    h = If(single) <then_branch = s () => (p) { p = Squeeze(a, last) }, else_branch = k () => (q) { q = Identity(a) }>
    sizes = Shape(h)
    rank = Size(sizes)
    batched = Equal(rank, two)
    alone = Not(batched)
    i = If(alone) <then_branch = u () => (v) { v = Unsqueeze(h, zero) }, else_branch = m () => (n) { n = Identity(h) }>
    j = Unsqueeze(i, zero)
    o, l = RNN<hidden_size = 3>(j, W, R)
    z = Squeeze(l, zero)
  }, else_branch = other () => (w) {
    e = ReduceMean<axes = [2], keepdims = 0>(x)
    w = MatMul(e, V)
  }>
}"""
"""As PyTorch exports `squeeze(-1)` before a recurrent cell: two branches, of which the cell takes one."""

SIZES = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, k] x, int64 mode) => (float[n, 2] y) <int64 four = {4}> {
  chosen = Equal(mode, four)
  y = If(chosen) <then_branch = t () => (u) { u = MatMul(x, four_rows) },
    else_branch = e () => (v) { v = MatMul(x, five_rows) }>
}"""


def saved(text: str, path: Path, **weights: tuple[int, ...]) -> Path:
    """Write the model of a text, with drawn weights of these shapes."""
    model = onnx.parser.parse_model(text)
    for name, shape in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.float32(RNG.standard_normal(shape)), name))
    onnx.save(model, path)
    return path


def stored(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_a_branch_that_a_recurrent_cell_can_not_follow(shell: Shell) -> None:
    torch = pytest.importorskip("torch")
    file = saved(CELL, shell.folder / "cell.onnx", W=(1, 3, 4), V=(4, 3))
    result = shell("build", file, "--loss", "mse", "-o", shell.folder / "train.onnx")
    assert result.code == 0 and "Built and proved" in result.out, result.out + result.err
    assert "only one branch fits" in (shell.folder / "train.onnx.report.md").read_text()
    weights = {name: torch.tensor(array, requires_grad=name in "WV") for name, array in stored(file).items()}
    run = Executor(onnx.load(shell.folder / "train.onnx"), fallback=False)
    x, label = np.float32(RNG.standard_normal((5, 4, 8))), np.float32(RNG.standard_normal((5, 3)))
    for rate, name in ((16000, "W"), (8000, "V")):
        audio = torch.tensor(x)
        if rate == 16000:
            y = torch.tanh(torch.tanh(audio).mean(-1) @ weights["W"][0].T)
        else:
            y = audio.mean(-1) @ weights["V"]
        torch.mean((y - torch.tensor(label)) ** 2).backward()
        got = run({"x": x, "label": label, "rate": np.array(rate)})
        np.testing.assert_allclose(got[f"{name}_grad"], weights[name].grad.numpy(), rtol=1e-4, atol=1e-6)
    longer = np.concatenate([x, x], 2)
    with pytest.raises(Exception, match="If"):
        run({"x": longer, "label": label, "rate": np.array(16000)})


def test_a_branch_that_the_given_shapes_rule_out(shell: Shell) -> None:
    file = saved(SIZES, shell.folder / "sizes.onnx", four_rows=(4, 2), five_rows=(5, 2))
    result = shell("build", file, "--loss", "mse", "--shape", "x:3,4", "-o", shell.folder / "train.onnx")
    assert result.code == 0 and "Built and proved" in result.out, result.out + result.err
    run = Executor(onnx.load(shell.folder / "train.onnx"), fallback=False)
    x, label = np.float32(RNG.standard_normal((3, 4))), np.float32(RNG.standard_normal((3, 2)))
    got = run({"x": x, "label": label, "mode": np.array(4)})
    expected = x.T @ (2 * (x @ stored(file)["four_rows"] - label) / 6)
    np.testing.assert_allclose(got["four_rows_grad"], expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(Exception, match="out of data bounds"):
        run({"x": x, "label": label, "mode": np.array(5)})
    assert shell("build", file, "--loss", "mse", "--shape", "x:3,6", "-o", shell.folder / "no.onnx").code == 1
