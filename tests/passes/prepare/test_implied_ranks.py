"""Ranks that follow from the operators that read a value, in a model, in a branch and in a loss; and hints on ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto

from tests.cli_harness import Shell, save

RNG = np.random.default_rng(4)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def floats(*shape: int) -> np.ndarray:
    return np.float32(RNG.standard_normal(shape))


def model_of(text: str, *unknown: str) -> ModelProto:
    """The model of a text, with inputs and outputs of these names whose ranks are not declared."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')
    for value in (*model.graph.input, *model.graph.output):
        if value.name in unknown:
            value.type.tensor_type.ClearField("shape")
    return model


TARGET = {"x": floats(2, 30), "t": np.array([2, 1, 5, 6]), "w": floats(3, 1, 2, 3)}
CASES = {
    "a computed target": (
        """g (float[n, m] x, int64[k] t, float[3, 1, 2, 3] w) => (float y) {
            r = Reshape(x, t) n = Neg(r) y = Conv(n, w)
        }""",
        ("y",),
        TARGET,
    ),
    "an input": (
        "g (float x, float[3, 1, 2, 3] w) => (float y) { n = Neg(x) y = Conv(n, w) }",
        ("x", "y"),
        {"x": floats(2, 1, 5, 6), "w": floats(3, 1, 2, 3)},
    ),
    "pooling": (
        "g (float x) => (float y) { y = AveragePool<kernel_shape = [2, 2]>(x) }",
        ("x", "y"),
        {"x": floats(2, 1, 5, 6)},
    ),
    "a branch": (
        """g (float[n, m] x, int64[k] t, float[3, 1, 2, 3] w, bool c) => (float y) { y = If(c) <
            then_branch = a () => (p) { r = Reshape(x, t) p = Conv(r, w) },
            else_branch = b () => (q) { s = Reshape(x, t) v = Neg(s) q = Conv(v, w) }>
        }""",
        ("y",),
        {**TARGET, "c": np.array(True)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_follows_from_what_reads_the_value(case: str, shell: Shell) -> None:
    """All of these models are linear in x."""
    text, unknown, feeds = CASES[case]
    file, derived = shell.folder / "model.onnx", shell.folder / "derived.onnx"
    onnx.save(model_of(text, *unknown), file)
    result = shell("derive", file, "--wrt", "x", "--no-infer-by-run", "--no-verify", "-o", derived)
    assert result.code == 0, result.err
    forward = onnxruntime.InferenceSession(file)
    y = forward.run(None, feeds)[0]
    g, direction = floats(*y.shape), floats(*feeds["x"].shape)
    read = {value.name for value in onnx.load(derived).graph.input}
    given = {name: array for name, array in feeds.items() if name in read}
    (x_grad,) = onnxruntime.InferenceSession(derived).run(["x_grad"], {**given, "y_grad": g})
    change = forward.run(None, {**feeds, "x": feeds["x"] + direction})[0] - y
    np.testing.assert_allclose(np.sum(x_grad * direction), np.sum(g * change), rtol=1e-3, atol=1e-4)


LINEAR = """<ir_version: 9, opset_import: ["": 17]>
g (float[b, n, 4] x) => (float[b, n, 3] y) <float[4, 3] w = {1, -2, 3, 4, 0.5, -6, 0.7, 8, 9, -1, 2, 0.3}> {
  y = MatMul(x, w)
}"""

LOSS = """<ir_version: 9, opset_import: ["": 17]>
g (float[b, n, 3] prediction, float[b, n, 3] label) => (float loss)
<int64[1] one = {1}, int64[1] last = {-1}> {
  d = Sub(prediction, label)
  s = Shape<start = 1, end = 2>(d)
  e = Equal(s, one)
  h = If(e) <then_branch = t () => (u) { u = Squeeze(d, one) }, else_branch = f () => (v) { v = Identity(d) }>
  m = Mul(h, h)
  r = ReduceSum<keepdims = 0>(m, last)
  loss = ReduceMean<keepdims = 0>(r)
}"""


def test_a_run_tells_ranks_in_a_loss(shell: Shell) -> None:
    file, loss, built = (save(LINEAR, shell.folder / "model.onnx"), save(LOSS, shell.folder / "loss.onnx"), "t.onnx")
    refused = shell("build", file, "--loss", loss, "--no-infer-by-run", "-o", shell.folder / built)
    assert refused.code == 3 and "rank" in refused.err
    result = shell("build", file, "--loss", loss, "-o", shell.folder / built)
    assert result.code == 0 and "Built and proved" in result.out, result.out + result.err
    x, label, w = floats(2, 5, 4), floats(2, 5, 3), onnx.numpy_helper.to_array(onnx.load(file).graph.initializer[0])
    got = onnxruntime.InferenceSession(shell.folder / built).run(["w_grad"], {"x": x, "label": label})[0]
    expected = np.einsum("bni,bno->io", x, 2 * (x @ w - label)) / 10
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


BRANCHES = """g (float[3, 4] x, bool c) => (float y) <int64[1] first = {0}, int64[1] last = {-1}> {
  h = If(c) <then_branch = t () => (u) { u = Unsqueeze(x, first) }, else_branch = e () => (v) { v = Neg(x) }>
  y = ReduceMean<keepdims = 0>(h, last)
}"""


def test_given_data_show_a_rank_that_follows_from_values(shell: Shell) -> None:
    """A run whose values choose the other branch ends with an error. No hint asks again for what was given."""
    file, built = shell.folder / "model.onnx", shell.folder / "train.onnx"
    onnx.save(model_of(BRANCHES, "y"), file)
    x, c, label = floats(3, 4), np.array(True), floats(1, 3)
    np.savez(shell.folder / "data.npz", x=x, c=c)
    command = ("build", file, "--loss", "mse", "--grad-of-input", "x", "-o", built)
    refused = shell(*command, "--no-infer-by-run")
    assert refused.code == 2 and "--infer-by-run" in refused.err and "--shape" not in refused.err.replace(str(file), "")
    refused = shell(*command)
    assert refused.code == 2 and "--test-data" in refused.err
    result = shell(*command, "--test-data", shell.folder / "data.npz")
    assert result.code == 0 and "Built and proved" in result.out, result.out + result.err
    run = onnxruntime.InferenceSession(built).run
    (x_grad,) = run(["x_grad"], {"x": x, "c": c, "label": label})
    expected = np.repeat((2 * (x.mean(-1, keepdims=True) - label[0][:, None]) / 3) / 4, 4, 1)
    np.testing.assert_allclose(x_grad, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(Exception, match="rank"):
        run(["x_grad"], {"x": x, "c": np.array(False), "label": label})


@pytest.mark.parametrize("command", [("derive",), ("build", "--loss", "mse", "--grad-of-input", "x")])
def test_an_input_of_unknown_rank_needs_a_shape(command: tuple[str, ...], shell: Shell) -> None:
    """What the file stores of the output is no evidence of the inputs: they may be broadcast."""
    file, result = shell.folder / "model.onnx", shell.folder / "result.onnx"
    onnx.save(model_of("g (float x, float z) => (float[3, 4] y) { y = Add(x, z) }", "x", "z"), file)
    refused = shell(command[0], file, *command[1:], "-o", result)
    assert refused.code == 3 and "--shape x:" in refused.err, refused.err
    given = shell(command[0], file, *command[1:], "--shape", "x:3,4", "--shape", "z:4", "-o", result)
    assert given.code == 0 and "roved" in given.out, given.err
