"""The passes on small models: their order, what is refused, and the names of what they write."""

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
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.options import LoraSpec, Options, RecomputeSpec
from onnxgrad_cli.passes.pipeline import pipeline_for
from tests.facts import raises

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


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(as_gradient_op=True),
        Options(lora=LoraSpec(2), loss_scale=8.0, recompute=RecomputeSpec("elementwise"), optimizer="sgd"),
        Options(target="ort-cpu", identifiers=True),
    ],
)
def test_each_pass_follows_the_pass_that_it_needs(options: Options) -> None:
    passes = pipeline_for(options)
    names = [step.name for step in passes]
    assert all(step.needs in ["", *names[:at]] for at, step in enumerate(passes))


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
        with raises(UnsupportedError, "refused", "LeakyRelu_y", "LeakyRelu", "0.5"):
            build(model)


def test_a_flag_that_is_neither_0_nor_1_is_refused() -> None:
    text = "g (float[2, 2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Mul(x, w) y = ReduceL2<keepdims = 3>(a) }"
    with raises(UnsupportedError, "refused", "y", "ReduceL2", "3", "0", "1"):
        build(parse(text))


def test_a_gradient_through_an_output_the_rule_ignores_is_refused() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 1] y) <float[2] w = {1, 2}>
    { a = Mul(x, w) b, c = Split<axis = 1, num_outputs = 2>(a) y = Add(b, c) }
    """
    with registry.scoped():
        registry.rule("Split", override=True)(lambda op, g, y, x, split, *, axis, num_outputs: g)
        with raises(UnsupportedError, "refused", "Split_b", "Split"):
            build(parse(text))


def test_two_rules_for_one_operator_are_refused() -> None:
    with registry.scoped(), pytest.raises(OnnxgradError, match="two rules for"):
        registry.rule("Relu")(lambda op, g, y, x: g)


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


def test_fresh_names() -> None:
    graph = Graph(parse(LINEAR))
    assert [graph.fresh(stem) for stem in ("w", "w", "new", "new")] == ["w_1", "w_2", "new", "new_1"]


def test_a_graph_infers_types_before_anything_else_is_imported() -> None:
    words = (
        "import onnx; from onnxgrad_cli.ir.type_inference import infer_types; from onnxgrad_cli.ir.graph import Graph\n"
        "infer_types(Graph(onnx.ModelProto()))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
