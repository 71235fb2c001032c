"""Functions that a model defines itself, written out: values and slopes are those of stock onnxruntime."""

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.facts import raises
from tests.harness import with_gradient
from tests.nodes import written_out
from tests.passes.test_pipeline import LINEAR, parse, run

X = {"x": np.array([-1.3, 0.7, 2.0])}
LEAKY = """<domain: "f", opset_import: ["": 18]> leaky <alpha: float = 0.25> (a) => (b) {
    b = LeakyRelu<alpha: float = @alpha>(a) }"""
SQUARE = '<domain: "f", opset_import: ["": 18]> square (a) => (b) { b = Mul(a, a) }'


def model_of(text, version=18):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {version}, "f": 1]> {text}')


CASES = {
    "nested": f"""g (double[3] x) => (double[3] y) {{ y = f.outer(x) }}
        <domain: "f", opset_import: ["": 18, "f": 1]> outer (a) => (b) {{ c = f.square(a) d = Sin(c) b = f.square(d) }}
        {SQUARE}""",
    "attribute given": f"g (double[3] x) => (double[3] y) {{ y = f.leaky<alpha = 0.5>(x) }} {LEAKY}",
    "attribute's default": f"g (double[3] x) => (double[3] y) {{ y = f.leaky(x) }} {LEAKY}",
    "two calls, two attributes": f"""g (double[3] x) => (double[3] y) {{
        a = f.leaky<alpha = 0.5>(x) b = f.leaky(x) y = Mul(a, b) }} {LEAKY}""",
    "attribute without default, absent": """g (double[3] x) => (double[3] y) { y = f.leaky(x) }
        <domain: "f", opset_import: ["": 18]> leaky <alpha> (a) => (b) { b = LeakyRelu<alpha: float = @alpha>(a) }""",
    "attribute handed on": f"""g (double[3] x) => (double[3] y) {{ y = f.outer(x) }}
        <domain: "f", opset_import: ["": 18, "f": 1]> outer <slope: float = 0.125> (a) => (b) {{
            b = f.leaky<alpha: float = @slope>(a) }} {LEAKY}""",
    "inner default": f"""g (double[3] x) => (double[3] y) {{ y = f.outer(x) }}
        <domain: "f", opset_import: ["": 18, "f": 1]> outer <slope: float = 0.125> (a) => (b) {{
            c = f.leaky(a) b = LeakyRelu<alpha: float = @slope>(c) }} {LEAKY}""",
    "absent outside, default inside": f"""g (double[3] x) => (double[3] y) {{ y = f.outer(x) }}
        <domain: "f", opset_import: ["": 18, "f": 1]> outer <slope> (a) => (b) {{
            b = f.leaky<alpha: float = @slope>(a) }} {LEAKY}""",
    "attribute in a branch": """g (double[3] x) => (double[3] y) { k = Constant<value = bool {1}>() y = f.either(k, x) }
        <domain: "f", opset_import: ["": 18]> either <slope: float = 0.5> (k, a) => (b) { b = If(k) <
            then_branch = t () => (p) { p = LeakyRelu<alpha: float = @slope>(a) },
            else_branch = e () => (q) { q = Neg(a) }> }""",
    "overloads": """g (double[3] x) => (double[3] y) { a = f.m:one(x) y = f.m:two(a) }
        <domain: "f", overload: "one", opset_import: ["": 18]> m (a) => (b) { b = Sin(a) }
        <domain: "f", overload: "two", opset_import: ["": 18]> m (a) => (b) { b = Mul(a, a) }""",
    "another opset, the same operators": """g (double[3] x) => (double[3] y) { y = f.m(x) }
        <domain: "f", opset_import: ["": 17]> m (a) => (b) { c = Sigmoid(a) b = Mul(c, a) }""",
    "a domain that the model does not import": """g (double[3] x) => (double[3] y) { y = f.m(x) }
        <domain: "f", opset_import: ["": 18, "com.microsoft": 1]> m (a) => (b) { b = com.microsoft.QuickGelu(a) }""",
    "in both branches": f"""g (double[3] x) => (double[3] y) {{
        s = ReduceSum<keepdims = 0>(x) z = Constant<value = double {{0}}>() k = Greater(s, z) y = If(k) <
        then_branch = t () => (double[3] p) {{ p = f.square(x) }},
        else_branch = e () => (double[3] q) {{ a = f.square(x) q = f.square(a) }}> }} {SQUARE}""",
    "in a loop": f"""g (double[3] x) => (double[3] y) {{
        n = Constant<value_int = 3>() k = Constant<value = bool {{1}}>()
        y = Loop(n, k, x) <body = b (int64 i, bool c, double[3] s) => (bool d, double[3] t) {{
            d = Identity(c) u = f.square(s) t = Sin(u) }}> }} {SQUARE}""",
    "with an If, called twice": """g (double[3] x) => (double[3] y) {
        k = Constant<value = bool {1}>() s = ReduceSum<keepdims = 0>(x)
        z = Constant<value = double {0}>() less = Less(s, z) a = f.m(k, x) y = f.m(less, a) }
        <domain: "f", opset_import: ["": 18]> m (k, a) => (b) { z = Sin(a) b = If(k) <
            then_branch = t () => (p) { w = Neg(z) p = Mul(w, w) },
            else_branch = e () => (q) { w = Exp(z) q = Mul(w, a) }> }""",
    "an input that is absent": """g (double[3] x) => (double[3] y) { y = f.m(x) }
        <domain: "f", opset_import: ["": 18]> m (a, low, high) => (b) { c = Clip(a, low, high) b = Mul(c, c) }""",
    "an output that nobody reads": """g (double[3] x) => (double[3] y) { y, unread = f.m(x) }
        <domain: "f", opset_import: ["": 18]> m (a) => (b, c) { b = Sin(a) c = Exp(a) }""",
    "an input that is an output": """g (double[3] x) => (double[3] y) { a, b = f.m(x) y = Mul(a, b) }
        <domain: "f", opset_import: ["": 18]> m (a) => (a, b) { b = Sin(a) }""",
    "a constant that is an output": """g (double[3] x) => (double[3] y) { a, b = f.m(x) y = Mul(a, b) }
        <domain: "f", opset_import: ["": 18]> m (a) => (b, c) { b = Sin(a) c = Constant<value = double {3}>() }""",
    "names that are taken": """g (double[3] x) => (double[3] y) { c = Sin(x) d = f.m(c) b = f.m(d) y = Mul(b, c) }
        <domain: "f", opset_import: ["": 18]> m (x) => (y) { c = Exp(x) d = Neg(x) y = Mul(c, d) }""",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_functions(name):
    model = model_of(CASES[name])
    forward = Executor(model, fallback=False) if name != "an input that is an output" else None  # it doesn't load that
    written = written_out(model_of(CASES[name]))
    assert not written.functions
    ours = Executor(written, fallback=False)
    expected = forward(X)["y"] if forward else X["x"] * np.sin(X["x"])
    np.testing.assert_allclose(ours(X)["y"], expected, rtol=1e-7)
    seed = np.random.default_rng(0).standard_normal(3)
    found = Executor(with_gradient(written, ["x"], ["y"], "g_"), fallback=False)({**X, "g_y": seed})["g_grad_x"]

    def function(point):
        y = forward(point)["y"] if forward else point["x"] * np.sin(point["x"])
        return float(np.sum(y * seed))

    assert directional(function, X, {"x": found}, np.random.default_rng(1)).error < 1e-7


def test_a_weight_in_a_function_is_one_weight():
    """However often the function is called; it adds up what comes back from each call."""
    text = """g (float[2, 2] x) => (float[2, 2] y) { a = f.layer(x) y = f.layer(a) }
        <domain: "f", opset_import: ["": 18]> layer (a) => (b) {
            w = Constant<value = float[2, 2] {1, 2, 3, 4}>() b = MatMul(a, w) }"""
    graph, training = Graph(model_of(text)), Training()
    prepare.prepare(graph, Options(), training)
    assert training.trained == ["w"]
    assert [node.input[1] for node in graph.nodes] == ["w", "w"]


def test_metadata_of_a_call_and_names():
    model = model_of(CASES["nested"])
    model.graph.node[0].name = "block"
    model.graph.node[0].metadata_props.add(key="layer", value="encoder.0")
    graph = Graph(model)
    prepare.normalise(graph)
    assert all(node.metadata == {"layer": "encoder.0"} for node in graph.nodes)
    assert [node.name for node in graph.nodes] == ["block/square/Mul", "block/Sin", "block/square_1/Mul"]


def test_a_function_with_the_name_of_an_operator_is_refused():
    text = """g (double[3] x) => (double[3] y) { y = Sigmoid(x) }
        <domain: "", opset_import: ["": 18]> Sigmoid (a) => (b) { b = Neg(a) }"""
    with raises(UnsupportedError, "refused", "Sigmoid"):
        prepare.normalise(Graph(model_of(text)))


def test_a_function_that_is_not_called_is_not_judged():
    graph = Graph(model_of(
        'g (double[3] x) => (double[3] y) { y = Sin(x) } '
        '<domain: "f", opset_import: ["": 13]> m (a) => (b) { b = ReduceMean<axes = [0]>(a) }'
    ))  # fmt: skip
    prepare.normalise(graph)
    assert [node.op_type for node in graph.nodes] == ["Sin"]
    assert not graph.proto.functions


def test_a_function_of_the_name_of_a_kernel_is_not_what_runs():
    """onnxruntime runs its own QuickGelu, whatever a model says that it is."""
    model = model_of("""g (float[3] x) => (float[3] y) { y = com.microsoft.QuickGelu(x) }
        <domain: "com.microsoft", opset_import: ["": 18]> QuickGelu (a) => (b) { c = Tanh(a) b = Mul(c, c) }""")
    model.opset_import.add(domain="com.microsoft", version=1)
    x = X["x"].astype(np.float32)
    step = np.float32(1e-2)
    run = Executor(model, fallback=False)
    slope = (run({"x": x + step})["y"] - run({"x": x - step})["y"]) / (2 * step)
    found = Executor(with_gradient(model, ["x"], ["y"], "g_"), fallback=False)({"x": x, "g_y": np.ones_like(x)})
    np.testing.assert_allclose(found["g_grad_x"], slope, rtol=1e-3)


def test_functions_are_inlined() -> None:
    double = helper.make_function(
        "local", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    model = parse(LINEAR)
    model.functions.append(double)
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.node[0].output[0] = "h"
    model.graph.node.append(helper.make_node("Double", ["h"], ["y"], domain="local"))
    built = build(model).model
    assert not built.functions
    x, t = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    assert np.all(run(built, {"x": x, "label": t})["w_grad"] > 0)
