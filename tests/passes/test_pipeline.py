"""The passes on small models: what prepare brings into form, what the walk refuses, what the marker becomes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError, UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.options import Options

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'


def parse(text: str, header: str = HEADER) -> onnx.ModelProto:
    return onnx.parser.parse_model(header + text)


LINEAR = "g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def stages(text: str, **options: object) -> dict[str, onnx.ModelProto]:
    """The model after each pass."""
    seen: dict[str, onnx.ModelProto] = {}
    built = TrainingModel(Graph(parse(text)), Options(**options))  # type: ignore[arg-type]
    for step, _ in built.steps():
        seen[step.name] = copied(built.model)
    return seen


def test_the_four_stages() -> None:
    seen = stages(LINEAR)
    steps = [
        "prepare",
        "loss",
        "yield",
        "backward",
        "outputs",
        "few-bits",
        "in-turn",
        "cleanup",
    ]
    assert list(seen) == steps
    marker = seen["yield"].graph.node[-1]
    assert (marker.domain, marker.op_type) == ("com.microsoft", "YieldOp")
    assert {a.name: list(a.ints) for a in marker.attribute} == {"full_shape_outputs": [0]}
    ops = [node.op_type for node in seen["outputs"].graph.node]
    assert "YieldOp" not in ops
    position = ops.index("ConstantOfShape")
    assert ops[position - 1] == "Shape"
    fill = seen["outputs"].graph.node[position]
    assert numpy_helper.to_array(fill.attribute[0].t).tolist() == [1.0]


@pytest.mark.parametrize("choice", ["keep", "input"])
def test_the_marker_can_stay_or_become_an_input(choice: str) -> None:
    model = build(parse(LINEAR), Options(yield_=choice)).model
    kept = any(node.op_type == "YieldOp" for node in model.graph.node)
    assert kept == (choice == "keep")
    if choice == "input":
        x, t = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
        one = run(model, {"x": x, "label": t, "loss_grad": np.array(1, np.float32)})["w_grad"]
        three = run(model, {"x": x, "label": t, "loss_grad": np.array(3, np.float32)})["w_grad"]
        np.testing.assert_allclose(three, 3 * one)


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


def test_the_opset_is_raised_only_where_needed() -> None:
    old = '<ir_version: 7, opset_import: ["" : 13]>'
    assert build(parse(LINEAR, old)).graph.opset() == 13
    gather = """
    g (int64[N] i) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = Gather(w, i) }
    """
    built = build(parse(gather, old))
    assert built.graph.opset() == 16
    assert any("opset raised from 13 to 16" in str(caution) for caution in built.training.cautions)


def test_an_older_opset_is_converted() -> None:
    text = """
    g (float[N, 3] x) => (float[N, 1, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}>
    { h = MatMul(x, w) y = Unsqueeze<axes = [1]>(h) }
    """
    built = build(parse(text, '<ir_version: 7, opset_import: ["" : 11]>'))
    assert built.graph.opset() == 13


def test_an_opset_that_is_too_new_is_refused() -> None:
    model = parse(LINEAR)
    model.opset_import[0].version = onnx.defs.onnx_opset_version() + 1
    with pytest.raises(UnsupportedError, match="the newest supported opset"):
        build(model)


def test_dims_and_shapes() -> None:
    graph = build(parse(LINEAR), Options(dims={"N": 4})).graph
    assert graph.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4
    graph = build(parse(LINEAR), Options(shapes={"x": (5, 3)})).graph
    assert graph.proto.graph.output[0].name == "loss"
    assert graph.proto.graph.input[1].type.tensor_type.shape.dim[0].dim_value == 5
    with pytest.raises(UsageError, match="no input has a dimension 'batch'"):
        build(parse(LINEAR), Options(dims={"batch": 4}))
    with pytest.raises(UsageError, match="size 3 in the model, but 4 is given"):
        build(parse(LINEAR), Options(shapes={"x": (5, 4)}))


def test_unnamed_and_doubly_named_nodes_get_names() -> None:
    model = parse("""
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w) b = Mul(a, w) y = Relu(b) }
    """)
    model.graph.node[0].name = model.graph.node[1].name = "same"
    names = [node.name for node in build(model).model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


def test_every_unsupported_node_is_listed_at_once() -> None:
    model = parse(
        """
        g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}>
        { a = Mul(x, w) b = custom.First(a) c = Relu(b) y = custom.Second(c) }
        """,
        '<ir_version: 10, opset_import: ["" : 18, "custom" : 1]>',
    )
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("b", "y")
    )
    with pytest.raises(UnsupportedError) as caught:
        build(model)
    assert [refusal.op_type for refusal in caught.value.refusals] == ["custom::Second", "custom::First"]
    assert all("--rules" in refusal.hint for refusal in caught.value.refusals)


def test_an_attribute_no_rule_covers_is_refused() -> None:
    text = "g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w) y = Relu(a) }"
    with registry.scoped():
        registry.rule("Relu", override=True)(lambda op, g, y, x: g)
        model = parse(text)
        model.graph.node[1].op_type = "LeakyRelu"
        model.graph.node[1].attribute.append(helper.make_attribute("alpha", 0.5))
        registry.rule("LeakyRelu", override=True)(lambda op, g, y, x: g)
        with pytest.raises(UnsupportedError, match=r"does not cover its attribute alpha=0\.5"):
            build(model)


def test_a_flag_that_is_neither_0_nor_1_is_refused() -> None:
    text = "g (float[2, 2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Mul(x, w) y = ReduceL2<keepdims = 3>(a) }"
    with pytest.raises(UnsupportedError, match="attribute keepdims=3 is neither 0 nor 1"):
        build(parse(text))


def test_a_gradient_through_an_output_the_rule_ignores_is_refused() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 1] y) <float[2] w = {1, 2}>
    { a = Mul(x, w) b, c = Split<axis = 1, num_outputs = 2>(a) y = Add(b, c) }
    """
    with registry.scoped():
        registry.rule("Split", override=True)(lambda op, g, y, x, split, *, axis, num_outputs: g)
        with pytest.raises(UnsupportedError, match="the gradient through its output"):
            build(parse(text))


def test_two_rules_for_one_operator_are_refused() -> None:
    with registry.scoped(), pytest.raises(OnnxgradError, match="two rules for"):
        registry.rule("Relu")(lambda op, g, y, x: g)


def test_a_zero_gradient_is_filled_and_said() -> None:
    built = build(parse(LINEAR), Options(grad_of_input=("x",)))
    assert built.training.gradients == {"w": "w_grad", "x": "x_grad"}
    text = """
    g (float[N, 2] x, float[N, 2] z) => (float[N, 2] y) <float[2] w = {1, 2}>
    { r = Floor(z) a = Mul(x, w) y = Add(a, r) }
    """
    built = build(parse(text), Options(grad_of_input=("z",)))
    assert any("'z' is zero by mathematics" in str(caution) for caution in built.training.cautions)
    x = np.ones((2, 2), np.float32)
    result = run(built.model, {"x": x, "z": x, "label": x})
    assert result["z_grad"].shape == (2, 2)
    assert not result["z_grad"].any()


def test_a_gradient_shared_by_weights_has_a_name_for_each() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y) <float[2] a = {1, 2}, float[2] b = {3, 4}, float[2] c = {5, 6}>
    { h = Add(x, a) i = Add(h, b) y = Add(i, c) }
    """
    x = np.ones((2, 2), np.float32)
    result = run(build(parse(text)).model, {"x": x, "label": x})
    np.testing.assert_array_equal(result["a_grad"], result["b_grad"])
    np.testing.assert_array_equal(result["a_grad"], result["c_grad"])


def test_a_result_can_be_given_two_names() -> None:
    graph = Graph(parse(LINEAR))
    infer_types(graph)
    op = Op(graph)
    result = op.Neg(op.val("y"))
    op.rename(result, "a")
    op.rename(result, "b")
    assert [(node.op_type, *node.input, *node.output) for node in op.nodes] == [
        ("Neg", "y", "a"),
        ("Identity", "a", "b"),
    ]


def test_broadcasts_that_are_unknown_are_summed_at_run_time() -> None:
    text = """
    g (float[A, B] x, float[C, D] z) => (float[E, F] y) <float[2] w = {1, 2}> { s = Mul(x, z) y = Mul(s, w) }
    """
    built: TrainingModel = build(parse(text), Options(grad_of_input=("x", "z"), label="t"))
    assert any("run time" in str(caution) and "'A'" in str(caution) for caution in built.training.cautions)
    rng = np.random.default_rng(0)
    for left, right in (((3, 2), (1, 2)), ((1, 2), (3, 1)), ((3, 1), (3, 2)), ((3, 2), (3, 2))):
        x, z = (rng.standard_normal(s).astype(np.float32) for s in (left, right))
        w, out = np.array([1, 2], np.float32), np.broadcast_shapes(left, right, (2,))
        result = run(built.model, {"x": x, "z": z, "t": np.zeros(out, np.float32)})
        error = 2 * (x * z * w) / np.prod(out)
        for name, factor in (("x", z), ("z", x)):
            full = np.broadcast_to(error * w * factor, out)
            axes = tuple(i for i, n in enumerate((x if name == "x" else z).shape) if n == 1 and out[i] != 1)
            np.testing.assert_allclose(result[f"{name}_grad"], full.sum(axes, keepdims=True), rtol=1e-5)


def test_reads_include_captures() -> None:
    model = parse("""
    g (bool c, float[N] x) => (float[N] y) {
        y = If(c) <then_branch = t () => (float[N] a) { a = Neg(x) },
                   else_branch = e () => (float[N] b) { k = Abs(x) b = Add(k, x) }>
    }
    """)
    assert set(reads(model.graph.node[0])) == {"c", "x"}
    uses = Graph(model).uses()
    assert [position for _, position in uses["x"]] == [-1]


def test_fresh_names() -> None:
    graph = Graph(parse(LINEAR))
    assert [graph.fresh(stem) for stem in ("w", "w", "new", "new")] == ["w_1", "w_2", "new", "new_1"]


def test_shapes_of_constants_are_computed_and_no_weight_is() -> None:
    """Shape inference follows no Mod: without folding, the rank behind the Reshape is unknown."""
    model = parse("""
    g (float[4, 6] x) => (float[4, 6] y)
    <int64[1] two = {2}, int64[1] three = {3}, int64[1] zero = {0}, int64[1] all = {100}, int64[2] parts = {2, 3},
     float[6] w = {1, 2, 3, 4, 5, 6}, int64[2] whole = {4, 6}, float temperature = {2}>
    {
        one = Mod(three, two) size = Shape(x) head = Slice(size, zero, one) dims = Concat<axis = 0>(head, parts)
        scaled = Mul(x, w) split = Reshape(scaled, dims) swapped = Transpose<perm = [0, 2, 1]>(split)
        joined = Reshape(swapped, whole) factor = Exp(temperature) y = Mul(joined, factor)
    }
    """)
    built = build(model, Options(train=("w", "temperature")))
    forward = [node.op_type for node in built.model.graph.node][:6]
    assert forward == ["Mul", "Reshape", "Transpose", "Reshape", "Exp", "Mul"]
    names = {tensor.name for tensor in built.model.graph.initializer}
    assert "dims" in names
    assert not names & {"one", "two", "three", "zero", "parts", "head"}
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((4, 6)).astype(np.float32), np.zeros((4, 6), np.float32)
    result = run(built.model, {"x": x, "label": t})
    w, factor = np.arange(1, 7, dtype=np.float32), np.exp(np.float32(2))
    y = x * w * factor
    np.testing.assert_allclose(result["w_grad"], (2 * y * x * factor / 24).sum(0), rtol=1e-4)
    np.testing.assert_allclose(result["temperature_grad"], (2 * y * y / 24).sum(), rtol=1e-4)


def test_what_is_computed_from_a_static_size_of_a_shape_is_a_constant() -> None:
    """As exporters compute the size of an attention's heads, in floats; shape inference follows no such Cast."""
    model = parse("""
    g (float[batch, 4, 12] x) => (float[batch, 4] y)
    <float[12] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int64 zero = {0}, int64 last = {-1}, int64 three = {3},
     int64[1] axis = {0}, int64[2] heads = {4, 3}, int64[2] axes = {2, 3}>
    {
        h = Mul(x, w) size = Shape(h) n = Gather(size, zero) width = Gather(size, last) each = Div(width, three)
        real = Cast<to = 1>(each) whole = Cast<to = 7>(real) a = Unsqueeze(n, axis) b = Unsqueeze(whole, axis)
        dims = Concat<axis = 0>(a, heads, b) parted = Reshape(h, dims) y = ReduceSum<keepdims = 0>(parted, axes)
    }
    """)
    built = build(model)
    forward = [node.op_type for node in built.model.graph.node][:6]
    assert forward == ["Mul", "Shape", "Gather", "Unsqueeze", "Concat", "Reshape"]
    assert not any(node.op_type == "Shape" for node in built.model.graph.node if node.name.startswith("grad/parted"))
    x, t = np.ones((2, 4, 12), np.float32), np.zeros((2, 4), np.float32)
    result = run(built.model, {"x": x, "label": t})
    np.testing.assert_allclose(result["w_grad"], np.full(12, 2 * 78.0), rtol=1e-5)


def test_initializers_of_an_old_model_are_constants() -> None:
    """Before IR version 4 every initializer had to be an input; a shape among them is a constant all the same."""
    model = parse(
        """
        g (float[N, 6] x) => (float[N, 2, 3] y) <int64[3] shape = {0, 2, 3}, float[6] w = {1, 2, 3, 4, 5, 6}>
        { h = Mul(x, w) y = Reshape(h, shape) }
        """,
        '<ir_version: 3, opset_import: ["" : 9]>',
    )
    for name, dtype, shape in (("shape", TensorProto.INT64, [3]), ("w", TensorProto.FLOAT, [6])):
        model.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
    built = build(model)
    assert [value.name for value in built.model.graph.input] == ["x", "label", "w"]
    assert built.graph.constant("shape") is not None
    x, t = np.ones((2, 6), np.float32), np.zeros((2, 2, 3), np.float32)
    np.testing.assert_allclose(run(built.model, {"x": x, "label": t})["w_grad"], np.arange(1, 7) / 3, rtol=1e-6)


def test_a_graph_infers_types_before_anything_else_is_imported() -> None:
    words = (
        "import onnx; from onnxgrad_cli.ir.type_inference import infer_types; from onnxgrad_cli.ir.graph import Graph\n"
        "infer_types(Graph(onnx.ModelProto()))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
