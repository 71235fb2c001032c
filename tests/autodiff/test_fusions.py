"""A Gelu that is written out has the gradient of the one operator, in whatever order its factors stand."""

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as F

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.fusions import find_fusions
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from tests.harness import with_gradient

ERF = {
    "x / sqrt 2, halved last": "z = Div(x, root) e = Erf(z) s = Add(e, one) m = Mul(x, s) y = Mul(m, half)",
    "x sqrt 1/2, halved first": "z = Mul(inverse, x) e = Erf(z) s = Add(one, e) h = Mul(half, x) y = Mul(h, s)",
    "the sum halved": "z = Div(x, root) e = Erf(z) s = Add(e, one) h = Mul(s, half) y = Mul(x, h)",
    "divided by two": "z = Mul(x, inverse) e = Erf(z) s = Add(e, one) m = Mul(s, x) y = Div(m, two)",
}
TANH = {
    "a power": "c = Pow(x, three) w = Mul(small, c) v = Add(x, w) u = Mul(v, slope) t = Tanh(u) s = Add(t, one) "
               "h = Mul(x, half) y = Mul(h, s)",
    "products": "q = Mul(x, x) c = Mul(q, x) w = Mul(c, small) v = Add(w, x) u = Mul(slope, v) t = Tanh(u) "
                "s = Add(one, t) m = Mul(x, s) y = Mul(m, half)",
}  # fmt: skip
WEIGHTS = """double root = {1.4142135623730951}, double inverse = {0.7071067811865476}, double one = {1.0},
double[1] half = {0.5}, double two = {2.0}, double three = {3.0}, double small = {0.044715},
double slope = {0.7978845608028654}"""


def written(body: str, outputs: str = "double[N, 3] y", weights: str = WEIGHTS) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (double[N, 3] x) => ({outputs}) <{weights}> {{ {body} }}'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


def found(model: onnx.ModelProto, *kept: str) -> list[str]:
    graph = Graph(model)
    infer_types(graph)
    return [adjoint.operator for adjoint in find_fusions(graph, kept).values()]


@pytest.mark.parametrize("body", [*ERF.values(), *TANH.values()], ids=[*ERF, *TANH])
def test_a_written_out_gelu_has_the_gradient_of_the_operator(body):
    model, x = written(body), np.random.default_rng(0).standard_normal((50, 3)) * 3
    assert found(model) == ["ai.onnx::Gelu"]
    leaf = torch.tensor(x, requires_grad=True)
    F.gelu(leaf, approximate="tanh" if "Tanh" in body else "none").square().sum().backward()
    y = Executor(model)({"x": x})["y"]
    gradient = Executor(with_gradient(model, ["x"], ["y"], "g_"))({"x": x, "g_y": 2 * y})["g_grad_x"]
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (ERF["the sum halved"], {"0.5": "0.6"}),
        (ERF["the sum halved"], {"1.4142135623730951": "1.414"}),
        (ERF["the sum halved"], {"one = {1.0}": "one = {1.1}"}),
        (ERF["divided by two"].replace("Mul(s, x)", "Mul(s, z)"), {}),
        (ERF["divided by two"].replace("Div(m, two)", "Div(two, m)"), {}),
        (TANH["a power"], {"0.044715": "0.0447"}),
        (TANH["a power"].replace("Pow(x, three)", "Pow(x, two)"), {}),
        (TANH["a power"].replace("Pow(x, three)", "Pow(three, x)"), {}),
        (TANH["products"].replace("Mul(c, small)", "Div(c, small)"), {}),
    ],
)
def test_another_formula_is_no_gelu_and_keeps_the_gradients_of_its_nodes(body, changes):
    weights = WEIGHTS
    for old, new in changes.items():
        weights = weights.replace(old, new)
    model, x = written(body, weights=weights), np.random.default_rng(1).uniform(0.5, 1.5, (4, 3))
    assert found(model) == []
    run, step = Executor(model), 1e-6
    g = np.random.default_rng(2).standard_normal((4, 3))
    gradient = Executor(with_gradient(model, ["x"], ["y"], "g_"))({"x": x, "g_y": g})["g_grad_x"]
    ends = [run({"x": x + sign * step})["y"] for sign in (1, -1)]
    np.testing.assert_allclose(gradient, g * (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_what_is_read_elsewhere_or_asked_for_is_not_passed_over():
    body = ERF["the sum halved"]
    assert found(written(body), "e") == []
    assert found(written(body, "double[N, 3] y, double[N, 3] s")) == []
    assert found(written(body + " other = Neg(h)", "double[N, 3] y, double[N, 3] other")) == []
    assert found(written(body), "x") == ["ai.onnx::Gelu"]


def test_a_constant_that_is_trained_is_none():
    graph = Graph(written(ERF["the sum halved"]))
    infer_types(graph)
    graph.vary(["half"])
    assert find_fusions(graph, ["half"]) == {}


def test_a_rule_of_somebody_elses_own_is_not_passed_over():
    with registry.scoped():
        registry.rule("Erf", override=True)(lambda op, g, y, x: g)
        assert found(written(ERF["the sum halved"])) == []
    assert found(written(ERF["the sum halved"])) == ["ai.onnx::Gelu"]
