"""Derivatives of and by values in between, against torch.func: a value moves by what is added to it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, parser
from torch import Tensor, nn

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.derivatives.kinds import KINDS, derive
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.derivative_proof import prove_derived
from tests.derivatives.test_kinds import Arrays, Convolutional, _export, compare, run
from tests.facts import raises

NET = """<ir_version: 10, opset_import: ["" : 18]>
net (double[N, 3] x) => (double[N, 2] y, int64[N] best)
<double[3, 2] w = {0.5, -0.2, 0.3, 0.1, 0.4, -0.6}, double[2] c = {1, -2}> {
  h0 = MatMul(x, w)
  [bend] h = Tanh(h0)
  k = Mul(h, h)
  d = Add(c, c)
  m = Mul(k, d)
  y = Exp(m)
  best = ArgMax<axis = 1, keepdims = 0>(y)
}"""
X = np.array([[0.3, -1.0, 2.0], [1.0, 0.5, -0.7]])
W = torch.tensor([[0.5, -0.2], [0.3, 0.1], [0.4, -0.6]], dtype=torch.float64)
C = torch.tensor([1.0, -2.0], dtype=torch.float64)


def net(x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The values k and y, where something is added to h."""
    h = torch.tanh(x @ W) + added
    return h * h, torch.exp(h * h * 2 * C)


def wanted(kind: str, given: Arrays) -> Arrays:
    """The derivatives of k and y by x and h."""
    at = torch.from_numpy(X), torch.zeros(2, 2, dtype=torch.float64)
    vectors = tuple(map(torch.from_numpy, given.values()))

    def total(*values: Tensor) -> Tensor:
        return sum((y.sum() for y in net(*values)), torch.zeros((), dtype=torch.float64))

    gradient = torch.func.grad(total, (0, 1))
    if kind == "vjp":
        found = dict(zip(("x_grad", "h_grad"), torch.func.vjp(net, *at)[1](vectors), strict=True))
    elif kind == "jvp":
        found = dict(zip(("k_tangent", "y_tangent"), torch.func.jvp(net, at, vectors)[1], strict=True))
    elif kind == "hvp":
        found = dict(zip(("x_hvp", "h_hvp"), torch.func.jvp(gradient, at, vectors)[1], strict=True))
    elif kind == "jacobian":
        rows = torch.func.jacrev(net, (0, 1))(*at)
        found = {f"{y}_jacobian_{x}": rows[i][j] for i, y in enumerate("ky") for j, x in enumerate("xh")}
    elif kind == "gnvp":
        products = torch.func.vjp(net, *at)[1](torch.func.jvp(net, at, vectors)[1])
        found = dict(zip(("x_gnvp", "h_gnvp"), products, strict=True))
    else:
        rows = torch.func.jacrev(gradient, (0, 1))(*at)
        found = {f"{x}_hessian_{z}": rows[i][j] for i, x in enumerate("xh") for j, z in enumerate("xh")}
    if kind in ("hessian-diagonal", "laplacian"):
        diagonals = {x: torch.einsum("abab->ab", found[f"{x}_hessian_{x}"]) for x in "xh"}
        found = {f"{x}_hessian_diagonal": diagonals[x] for x in "xh"}
        if kind == "laplacian":
            found = {f"{x}_laplacian": diagonals[x].sum() for x in "xh"}
    return {name: value.detach().numpy() for name, value in found.items()}


def vectors(kind: str) -> Arrays:
    rng = np.random.default_rng(0)
    vectors = {"x_vector": (2, 3), "h_vector": (2, 2)}
    shapes = {
        "vjp": {"k_grad_external": (2, 2), "y_grad": (2, 2)},
        "jvp": {"x_tangent": (2, 3), "h_tangent": (2, 2)},
        "hvp": vectors,
        "gnvp": vectors,
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.get(kind, {}).items()}


def verdict(model: ModelProto, original: ModelProto | None, **data: np.ndarray) -> str:
    said = read_derived(model)
    assert said is not None
    return prove_derived(model, said, original=original, data=data).verdict


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(8, 3)
def test_every_kind_agrees_with_torch_and_is_proved(kind: Derivative) -> None:
    """By an input too, on whose way the value lies: of the two the rule of Tanh reads its own result."""
    original = parser.parse_model(NET)
    model = derive(original, kind, of=["k", "y"], wrt=["x", "h"])
    given = vectors(kind)
    compare(run(model, {"x": X, **given}), wanted(kind, given), 1e-10)
    assert verdict(model, original) == "proved"


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_rule_behind_an_inner_value_fails(kind: Derivative) -> None:
    original = parser.parse_model(NET)
    with registry.scoped():
        registry.rule("Exp", override=True)(lambda op, g, y, x: g * y * 1.01)
        model = derive(original, kind, of="y", wrt="h")
    assert verdict(model, original) == "failed"


def test_a_node_stands_for_its_result_and_its_value_is_kept() -> None:
    original = parser.parse_model(NET)
    model = derive(original, of="y", wrt="bend", cotangents="ones", keep_outputs=True)
    assert [value.name for value in model.graph.output] == ["h_grad", "y", "best", "h"]
    found = run(model, {"x": X})
    np.testing.assert_allclose(found["h"], np.tanh(X @ W.numpy()))
    np.testing.assert_allclose(found["h_grad"], found["y"] * 4 * C.numpy() * found["h"])
    assert verdict(model, None) == "proved"  # it computes what it differentiates
    assert verdict(derive(original, of="k", wrt="h0"), None) == "not_proved"  # of the first rule its result is all


def test_what_follows_from_constants_can_be_asked_for() -> None:
    """Which is computed once: the value stands, and nothing before it."""
    original = parser.parse_model(NET)
    model = derive(original, of="y", wrt=["d", "c"], cotangents="ones")
    k = np.tanh(X @ W.numpy()) ** 2
    y = np.exp(k * 2 * C.numpy())
    compare(run(model, {"x": X}), {"c_grad": (2 * y * k).sum(0), "d_grad": (y * k).sum(0)}, 1e-12)
    assert verdict(model, original) == "proved"
    assert verdict(derive(original, "jacobian", of="y", wrt=["d"]), original) == "proved"


BODY = """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
net (double[2] x, bool b) => (double[2] y) {
  h = own.twice(x)
  [choice] z = If (b) <
    then_branch = yes () => (double[2] t) { t1 = Exp(h) t = Neg(t1) },
    else_branch = no () => (double[2] e) { e = Sin(h) } >
  p, q = Split<num_outputs = 2>(z)
  y = Concat<axis = 0>(q, p)
}
<domain: "own", opset_import: ["" : 18]> twice (a) => (r) { s = Add(a, a) r = Identity(s) }
"""


@pytest.mark.parametrize("flag", [True, False])
def test_around_bodies_and_functions(flag: bool) -> None:
    original = parser.parse_model(BODY)
    model = derive(original, "jacobian", wrt=["h", "z"])
    x = np.array([0.3, -0.4])
    slope = -np.exp(2 * x) if flag else np.cos(2 * x)
    swap = np.eye(2)[::-1]
    found = run(model, {"x": x, "b": np.array(flag)})
    compare(found, {"y_jacobian_h": swap * slope, "y_jacobian_z": swap}, 1e-12)
    assert verdict(model, original, b=np.array(flag)) == "proved"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (NET, {"wrt": ["hh"]}, ("unknown_name", "wrt", "hh")),
        (NET, {"of": ["best"]}, ("wrong_type", "of", "best", "best", "int64")),
        (NET, {"wrt": ["best"]}, ("wrong_type", "wrt", "best", "best", "int64")),
        (BODY, {"wrt": ["t1"]}, ("wrong_value", "wrt", "t1", "choice")),
        (BODY, {"of": ["s"]}, ("wrong_value", "of", "s", "twice")),
    ],
)
def test_what_can_not_be_meant_is_refused(text: str, arguments: dict[str, list[str]], message: tuple[str, ...]) -> None:
    with raises(UsageError, *message) as raised:
        derive(parser.parse_model(text), **arguments)  # type: ignore[arg-type]
    assert raised.value.hint


def test_in_training_mode_too() -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]> g (float[4, 3] x) => (float[4, 3] y)
    <float[3] s = {1, 2, 3}, float[3] b = {0, 1, 2}, float[3] m = {0.1, 0.2, 0.3}, float[3] v = {1, 2, 1}>
    { h = Sin(x) n = BatchNormalization(h, s, b, m, v) y = Tanh(n) }"""
    original = parser.parse_model(text)
    model = derive(original, wrt=["h", "n"], options=Options(mode="train"))
    assert verdict(model, original) == "proved"


POOLED = """<ir_version: 10, opset_import: ["" : 18]>
net (float[N, 2, 4, 4] x) => (float[N, 2, 2, 2] y) {
  s = Neg(x) h = Relu(s)
  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(h)
  y = Exp(p)
}"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_where_zeros_of_relu_are_pooled_what_is_added_proves_it(kind: Derivative) -> None:
    """Any way from them is one along a kink: no difference agrees."""
    original = parser.parse_model(POOLED)
    model = derive(original, kind, wrt=["h"], keep_outputs=True)
    x = np.ones((2, 2, 4, 4), np.float32)
    assert verdict(model, original, x=x) == "proved"
    if kind in ("vjp", "jvp", "jacobian"):
        assert verdict(model, None, x=x) == "proved"
    doubled = onnx.ModelProto()
    doubled.CopyFrom(model)
    (name, *_) = said.outputs if (said := read_derived(model)) else ()
    for node in doubled.graph.node:
        node.output[:] = ["right" if output == name else output for output in node.output]
    doubled.graph.node.append(onnx.helper.make_node("Sum", ["right", "right"], [name]))
    assert verdict(doubled, original, x=x) == "failed"


@pytest.mark.parametrize("batch", [2, 3])
def test_the_gradient_of_grad_cam_is_what_a_hook_of_pytorch_sees(batch: int) -> None:
    """By the feature maps of a convolution, of an exported net of any batch size."""
    torch.manual_seed(0)
    module = Convolutional().eval()
    x = torch.randn(batch, 2, 4, 4)
    model = _export(module, {"x": x}, ["y"], True)
    node = next(node for node in model.graph.node if node.op_type == "Conv" and "/b/" in node.name)
    found = run(derive(model, of="y", wrt=node.output[0], keep_outputs=True), {"x": x.numpy(), "y_grad": one(batch)})
    seen: dict[str, Tensor] = {}

    def watch(_: nn.Module, given: object, features: Tensor) -> None:
        seen["features"] = features
        features.register_hook(lambda g: seen.update(gradient=g))

    module.b.register_forward_hook(watch)
    (module(x) * torch.from_numpy(one(batch))).sum().backward()
    for name, value in ((node.output[0], seen["features"]), (f"{node.output[0]}_grad", seen["gradient"])):
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=1e-5, atol=1e-6)
    onnx.checker.check_model(model, full_check=True)


def one(batch: int) -> np.ndarray:
    """The cotangent of the score of class 1."""
    return np.tile(np.array([0, 1, 0], np.float32), (batch, 1))
