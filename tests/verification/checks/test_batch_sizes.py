"""Batches of one sample and of the size of a training, beside the one at which gradients are proved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgrad_cli.verification.checks.batch_sizes import ONLY_ONE_SAMPLE
from tests.cli_harness import Shell

HEAD = '<ir_version: 8, opset_import: ["": 17]>'
STEP, SLOPES = "batches of other sizes", "gradients against differences of the loss"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def save(text: str, name: str = "m.onnx", **weights: tuple[int, ...]) -> None:
    """Write the model of a text, with random weights of these shapes."""
    model, rng = parser.parse_model(f"{HEAD} {text}"), np.random.default_rng(0)
    for weight, shape in weights.items():
        values = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, weight))
    onnx.save(model, name)


def steps(shell: Shell, *arguments: str) -> dict[str, tuple[str, str]]:
    """Run the command, and return what its proof found by step."""
    result = shell(*arguments, "--json")
    found = result.json.get("proof", result.json)
    return {step["name"]: (step["status"], step["detail"]) for step in found["steps"]}


def build(shell: Shell, *options: str) -> dict[str, tuple[str, str]]:
    return steps(shell, "build", "m.onnx", "--loss", "mse", "-o", "out.onnx", "--force", *options)


SQUEEZED = "g (float[batch, 4] x) => (float[n] y) { a = MatMul(x, w) t = Tanh(a) y = Squeeze(t) }"
WITH_AXES = """g (float[batch, 4] x) => (float[batch] y) <int64[1] one = {1}>
{ a = MatMul(x, w) t = Tanh(a) y = Squeeze(t, one) }"""
LATE = """g (float[batch, 4] x) => (float[n] y) <int64[1] one = {1}, int64[1] all = {-1}, float zero = {0}> {
  a = MatMul(x, w) k = ReduceSum<keepdims = 0>(a) z = Mul(k, zero) i = Cast<to = 7>(z) j = Add(i, all)
  s = Concat<axis = 0>(j, one) r = Reshape(a, s) q = Squeeze(r) y = Tanh(q)
}"""
"""A size that is known in a run alone, on the axis that a Squeeze keeps."""


@pytest.mark.parametrize("text", [SQUEEZED, LATE], ids=["named size", "size of a run"])
@pytest.mark.thinned(2)
def test_a_last_batch_of_one_is_trained_where_the_file_squeezes_it_away(shell: Shell, text: str) -> None:
    rng = np.random.default_rng(1)
    data = {"x": rng.standard_normal((9, 4)), "label": rng.uniform(-1, 1, 9)}
    np.savez("data.npz", **{name: x.astype(np.float32) for name, x in data.items()})
    trained = []
    for run, each in enumerate((text, WITH_AXES)):
        save(each, w=(4, 1))
        assert build(shell)[STEP][0] == "passed"
        options = [
            "--data",
            "data.npz",
            "--val",
            "data.npz",
            "--batch-size",
            "4",
            "--epochs",
            "2",
            "--force",
            "--run",
            f"run{run}",
        ]
        result = shell("train", "m.onnx", "--loss", "mse", "-o", "t.onnx", *options)
        assert result.code == 0, result.err
        tensors = {tensor.name: tensor for tensor in onnx.load("t.onnx").graph.initializer}
        trained.append(numpy_helper.to_array(tensors["w"]))
        result = shell("predict", "t.onnx", "--data", "data.npz", "--batch-size", "4", "-o", "p.npz", "--force")
        assert result.code == 0 and np.load("p.npz")["y"].shape == (9,), result.err
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_right_gradients_agree_at_1_and_at_32(shell: Shell, reduction: str) -> None:
    save("g (float[batch, 4] x) => (float[batch, 3] y) { a = MatMul(x, w) y = Tanh(a) }", w=(4, 3))
    status, detail = build(shell, "--reduction", reduction, "--l2", "0.1")[STEP]
    assert status == "passed" and "1 and 32:" in detail, detail


def test_without_the_original_outputs_of_the_training_model_show_whether_samples_mix(shell: Shell) -> None:
    save("g (float[batch, 4] x) => (float[batch, 3] y) { a = MatMul(x, w) y = Tanh(a) }", w=(4, 3))
    build(shell)
    status, detail = steps(shell, "check", "out.onnx")[STEP]
    assert status == "passed" and "1 and 32:" in detail, detail


def test_where_the_original_takes_no_copies_samples_are_not_known_to_be_independent(shell: Shell) -> None:
    nodes = "{ a = MatMul(x, w) y = Tanh(a) }"
    save(f"g (float[batch, 4] x) => (float[batch, 3] y) {nodes}", w=(4, 3))
    build(shell)
    save(f"g (float[2, 4] x) => (float[2, 3] y) {nodes}", "fixed.onnx", w=(4, 3))
    status, detail = steps(shell, "check", "out.onnx", "--original", "fixed.onnx")[STEP]
    assert status == "passed" and detail.startswith(ONLY_ONE_SAMPLE) and detail.endswith("independent"), detail


def test_samples_that_mix_are_not_compared(shell: Shell) -> None:
    text = "g (float[batch, 4] x) => (float[batch, 3] y) <int64[1] first = {0}>"
    text += " { a = MatMul(x, w) m = ReduceSum(a, first) y = Sub(a, m) }"
    save(text, w=(4, 3))
    status, detail = build(shell)[STEP]
    assert status == "passed" and detail.startswith(ONLY_ONE_SAMPLE) and detail.endswith("independent"), detail


def test_a_fixed_batch_has_no_other_size(shell: Shell) -> None:
    save("g (float[3, 4] x) => (float[3, 3] y) { a = MatMul(x, w) y = Tanh(a) }", w=(4, 3))
    assert STEP not in build(shell)


def changed(nodes: str) -> None:
    """Multiply the gradient in out.onnx by `f`, which nodes compute of `batch`, a vector of one float."""
    model = onnx.load("out.onnx")
    for node in model.graph.node:
        node.output[:] = ["right" if name == "w_grad" else name for name in node.output]
    head = f"{HEAD} g (float[b, 4] x, float[4, 3] right) => (float[4, 3] w_grad)"
    size = "n = Shape<start = 0, end = 1>(x) batch = Cast<to = 1>(n) two = Constant<value_floats = [2.0]>()"
    text = f"{head} {{ {size} {nodes} w_grad = Mul(right, f) }}"
    model.graph.node.extend(parser.parse_model(text).graph.node)
    onnx.save(model, "out.onnx")


@pytest.mark.parametrize(
    ("nodes", "verdict"),
    [
        ("f = Div(two, batch)", "failed"),
        ("m = Max(batch, two) f = Div(two, m)", "failed"),
        ("m = Min(batch, two) f = Div(m, two)", "failed"),
    ],
    ids=["at any other size", "at larger sizes", "at one sample"],
)
def test_a_gradient_that_is_right_at_2_alone_fails(shell: Shell, nodes: str, verdict: str) -> None:
    save("g (float[batch, 4] x) => (float[batch, 3] y) { a = MatMul(x, w) y = Tanh(a) }", w=(4, 3))
    build(shell)
    changed(nodes)
    found = steps(shell, "check", "out.onnx", "--original", "m.onnx")
    assert found[SLOPES][0] == "passed"
    status, detail = found[STEP]
    assert status == verdict and "1 and 32" in detail and "float64" in detail


def test_a_training_model_that_takes_no_batch_of_one_is_not_proved(shell: Shell) -> None:
    save("g (float[batch, 4] x) => (float[batch, 3] y) { a = MatMul(x, w) y = Tanh(a) }", w=(4, 3))
    build(shell)
    row = "at = Constant<value_int = 1>() row = Gather(x, at)"
    changed(f"{row} z = Sub(row, row) s = ReduceSum(z) o = Exp(s) f = ReduceSum(o)")
    status, detail = steps(shell, "check", "out.onnx", "--original", "m.onnx")[STEP]
    assert status == "skipped" and "Gather" in detail and "--dim batch=1" in detail
