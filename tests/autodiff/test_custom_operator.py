"""Operators of domains of their own, with a rule and a function that runs them: trained on stock onnxruntime."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import CheckFailed, OnnxgradError
from onnxgrad_cli.execution.kernels import newest_loaded
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification.gradients.gradcheck import gradcheck
from onnxgrad_cli.verification.proof import prove
from tests.facts import raises

FUNCTION = """<domain: "my.ops", opset_import: ["": {0}]>
Squareplus <b: float = 4.0> (x) => (y) {{
  c = Constant<value_float: float = @b>()  two = Constant<value = float {{2}}>()
  s = Mul(x, x) t = Add(s, c) r = Sqrt(t) u = Add(x, r) y = Div(u, two) }}"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with registry.scoped():
        yield


def add_rule(factor: float = 0.5, needs_opset: int = 13) -> list[str]:
    """Register the rule of Squareplus; what is returned counts its calls."""
    calls: list[str] = []

    @registry.rule("Squareplus", domain="my.ops", needs_opset=needs_opset)
    def squareplus(op: Any, g: Any, y: Any, x: Any, *, b: float = 4.0) -> Any:
        calls.append(x.name)
        return g * (1 + x / op.Sqrt(x * x + b)) * factor

    return calls


def model_of(nodes: str, opset: int = 18, more: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}, "my.ops": 1]>
        g (float[N, 4] x) => (float[N, 1] y)
        <float[4, 3] w = {{0.3, -0.2, 0.5, 0.1, -0.4, 0.2, 0.7, -0.1, 0.3, 0.2, 0.6, -0.5}},
         float[3, 1] v = {{0.5, -0.3, 0.8}}>
        {{ {nodes} }} {FUNCTION.format(opset)} {more}""")


NET = "h = MatMul(x, w) s = my.ops.Squareplus<b = 1.0>(h) y = MatMul(s, v)"


def test_trained_on_stock_onnxruntime_like_pytorch() -> None:
    calls = add_rule()
    model = build(model_of(NET)).model
    assert calls, "the rule wins over writing the function out"
    assert [n.op_type for n in model.graph.node].count("Squareplus") == 1 and len(model.functions) == 1
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name in "wv"}
    others = {name: torch.tensor(value.copy(), requires_grad=True) for name, value in weights.items()}
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    label = np.sin(x.sum(1, keepdims=True)).astype(np.float32)
    losses = []
    for _ in range(60):
        loss, *gradients = session.run(["loss", "w_grad", "v_grad"], {"x": x, "label": label, **weights})
        h = torch.tensor(x) @ others["w"]
        mirrored = torch.nn.functional.mse_loss((h + torch.sqrt(h * h + 1)) / 2 @ others["v"], torch.tensor(label))
        mirrored.backward()
        np.testing.assert_allclose(loss, mirrored.item(), 1e-4)
        losses.append(float(loss))
        for name, gradient in zip("wv", gradients, strict=True):
            np.testing.assert_allclose(gradient, others[name].grad.numpy(), 1e-3, 1e-5)
            weights[name] = weights[name] - np.float32(0.1) * gradient
            with torch.no_grad():
                others[name] -= 0.1 * others[name].grad
            others[name].grad = None
    assert losses[-1] < 0.5 * losses[0]


def test_without_a_rule_the_function_is_written_out() -> None:
    model = build(model_of(NET)).model
    assert "Squareplus" not in {node.op_type for node in model.graph.node} and not model.functions


def test_a_wrong_rule_does_not_pass() -> None:
    add_rule(factor=0.6)
    model = build(model_of(NET)).model
    assert prove(model, describe(model)).failed
    with pytest.raises(CheckFailed, match="finite differences give"):
        gradcheck(model_of(NET), {"x": np.ones((2, 4))})


@pytest.mark.parametrize(
    "opset, needs, result", [(17, 13, 17), (17, 18, 18), (13, 20, 20), (27, 13, newest_loaded(27))]
)
def test_the_function_follows_the_models_opset(opset: int, needs: int, result: int) -> None:
    add_rule(needs_opset=needs)
    model = build(model_of(NET, opset)).model
    assert [entry.version for entry in model.functions[0].opset_import] == [result]
    onnx.checker.check_model(model, full_check=True)
    assert prove(model, describe(model)).status == "passed"


@pytest.mark.parametrize("attribute", ["", "<b = 2.0>"])
def test_what_changed_its_form_is_rewritten_in_the_function(attribute: str) -> None:
    @registry.rule("Range", domain="my.ops", needs_opset=18)
    def spread(op: Any, g: Any, y: Any, x: Any, *, b: float = 3.0) -> Any:
        at = op.cast(op.Equal(x, op.max(x, [1])), x)
        return g * at * b

    function = """<domain: "my.ops", opset_import: ["": 17]> Range <b: float = 3.0> (x) => (y) {
        c = Constant<value_float: float = @b>() m = ReduceMax<axes = [1]>(x) y = Mul(m, c) }"""
    model = build(model_of(f"h = MatMul(x, w) y = my.ops.Range{attribute}(h)", 17, function)).model
    assert {node.op_type for node in model.functions[0].node} == {"Constant", "ReduceMax", "Mul"}
    onnx.checker.check_model(model, full_check=True)
    assert prove(model, describe(model), original=model_of(
        f"h = MatMul(x, w) y = my.ops.Range{attribute}(h)", 17, function)).status == "passed"  # fmt: skip


def test_a_function_of_a_newer_opset_with_other_operators_is_refused() -> None:
    registry.rule("Peak", domain="my.ops")(lambda op, g, y, x: g)
    peak = """<domain: "my.ops", opset_import: ["": 18]> Peak (x) => (y) {
        a = Constant<value = int64[1] {1}>() y = ReduceMax(x, a) }"""
    with raises(OnnxgradError, "unreadable_file", "ReduceMaxis", "FunctionOp", "18", "17"):
        build(model_of("h = MatMul(x, w) y = my.ops.Peak(h)", 17, peak))


def test_functions_that_a_kept_one_calls_are_kept_and_no_others() -> None:
    add_rule()
    registry.rule("Outer", domain="my.ops")(lambda op, g, y, x: g * (1 + x / op.Sqrt(x * x + 1.0)))
    more = """
        <domain: "my.ops", opset_import: ["": 18, "my.ops": 1]> Outer (x) => (y) {
          s = my.ops.Squareplus<b = 1.0>(x) y = Add(s, s) }
        <domain: "my.ops", opset_import: ["": 18]> Idle (x) => (y) { y = Neg(x) }"""
    model = build(model_of("h = MatMul(x, w) s = my.ops.Outer(h) y = MatMul(s, v)", 18, more)).model
    assert [function.name for function in model.functions] == ["Squareplus", "Outer"]
    assert prove(model, describe(model)).status == "passed"


def test_a_kept_function_in_a_branch() -> None:
    calls = add_rule()
    nodes = """
      h = MatMul(x, w)  z = Constant<value = float {0}>()  m = ReduceSum<keepdims = 0>(h)  c = Greater(m, z)
      s = If(c) <then_branch = t () => (p) { p = my.ops.Squareplus<b = 1.0>(h) },
                 else_branch = e () => (q) { q = Neg(h) }>
      y = MatMul(s, v)"""
    model = build(model_of(nodes)).model
    assert calls and len(model.functions) == 1
    for sign in (1, -1):
        x = sign * np.abs(np.random.default_rng(1).standard_normal((3, 4))).astype(np.float32)
        assert prove(model, describe(model), data={"x": x}, sizes={"N": 3}).status == "passed"


def test_onnxruntimes_own_names_are_written_out() -> None:
    """A rule for com.microsoft is one for onnxruntime's kernel, whatever a function of that name computes."""
    text = """<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { h = Mul(x, w) y = com.microsoft.BiasAdd(h) }
        <domain: "com.microsoft", opset_import: ["": 18]> BiasAdd (x) => (y) { y = Exp(x) }"""
    model = build(onnx.parser.parse_model(text)).model
    assert "Exp" in {node.op_type for node in model.graph.node}
    assert prove(model, describe(model)).status == "passed"
