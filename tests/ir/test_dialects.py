"""What onnxruntime loads and the standard does not: read with the meaning that onnxruntime gives it, and told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import check_structure
from onnxgrad_cli.ir.dialects import checker_error, repair, unknown_operators
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import Contradiction, infer_types
from onnxgrad_cli.ir.weightless_copy import copied, skeleton
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.options import Options
from tests.facts import raises


def model_of(body: str, opset: int = 17, imports: str = "") -> ModelProto:
    """A model of x[n, 3, 4] in the textual form, with weights W[4, 3], S[3] and B[3]."""
    head = f'<ir_version: 8, opset_import: ["": {opset}{imports}]>'
    model = onnx.parser.parse_model(f"{head} g (float[n, 3, 4] x) => (float[n, 3, 3] y) {{ {body} }}")
    rng = np.random.default_rng(5)
    for name, shape in {"W": (4, 3), "S": (3,), "B": (3,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


PLAIN = "a = MatMul(x, W) b = Add(a, B) y = Softmax(b)"
ODD: dict[str, tuple[Callable[[], ModelProto], str]] = {}
"""A name -> a model that onnxruntime runs, and what the report must say of it."""


def odd(text: str = "") -> Callable[[Callable[[], ModelProto]], Callable[[], ModelProto]]:
    def register(function: Callable[[], ModelProto]) -> Callable[[], ModelProto]:
        ODD[function.__name__] = function, text
        return function

    return register


@odd()
def layer_normalization_below_17() -> ModelProto:
    return model_of("a = MatMul(x, W) y = LayerNormalization <axis = -1> (a, S, B)", opset=13)


@odd()
def simplified_layer_normalization() -> ModelProto:
    return model_of("a = MatMul(x, W) y, r = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-5> (a, S)")


@odd()
def layer_normalization_before_the_weights() -> ModelProto:
    model = model_of("z = LayerNormalization (x, T) a = MatMul(z, W) y = Add(a, B)", opset=13)
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2, 3, 4]), "T"))
    return model


@odd()
def simplified_layer_normalization_in_a_branch() -> ModelProto:
    model = model_of("a = MatMul(x, W) r = ReduceSum <keepdims = 0> (a)")
    outputs = [helper.make_tensor_value_info(name, 1, ["n", 3, 3]) for name in ("t", "e")]
    then = [helper.make_node("SimplifiedLayerNormalization", ["a", "S"], ["t"], axis=-1)]
    bodies = [
        helper.make_graph(then, "then", [], outputs[:1]),
        helper.make_graph([helper.make_node("Tanh", ["a"], ["e"])], "else", [], outputs[1:]),
    ]
    model.graph.node.append(helper.make_node("Cast", ["r"], ["c"], to=9))
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=bodies[0], else_branch=bodies[1]))
    return model


@odd()
def thresholded_relu_below_10() -> ModelProto:
    return model_of("a = MatMul(x, W) b = ThresholdedRelu <alpha = 0.3> (a) y = Add(b, B)", opset=8)


@odd("without importing a version of it")
def a_domain_is_not_imported() -> ModelProto:
    return model_of("a = MatMul(x, W) y = com.microsoft.FastGelu(a, B)")


@odd("'ai.onnx' at versions 12 and 17; onnxgrad uses the last one, 12")
def imported_twice_the_older_last() -> ModelProto:
    model = model_of(PLAIN)
    model.opset_import.append(helper.make_opsetid("", 12))
    return model


@odd("'ai.onnx' at versions 12 and 17; onnxgrad uses the last one, 17")
def imported_twice_the_newer_last() -> ModelProto:
    model = model_of(PLAIN, opset=12)
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))
    return model


@odd()
def the_long_name_of_the_domain() -> ModelProto:
    model = model_of(PLAIN)
    model.opset_import[0].domain = "ai.onnx"
    for node in model.graph.node:
        node.domain = "ai.onnx"
    return model


@odd("'SOFTMAX' was stored before a node that it reads")
def nodes_in_reverse() -> ModelProto:
    model = model_of(PLAIN)
    model.graph.node[2].name = "SOFTMAX"
    nodes = list(copied(model).graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@odd()
def domains_that_nothing_uses() -> ModelProto:
    model = model_of(PLAIN)
    for domain, version in (("com.microsoft.nchwc", 1), ("com.microsoft.experimental", 1), ("ai.onnx.training", 1),
                            ("com.ms.internal.nhwc", 19), ("org.pytorch.aten", 1), ("my.own", 7)):  # fmt: skip
        model.opset_import.append(helper.make_opsetid(domain, version))
    return model


@odd()
def an_output_without_a_type() -> ModelProto:
    model = model_of(PLAIN)
    model.graph.output[0].ClearField("type")
    return model


@odd()
def an_output_without_a_shape() -> ModelProto:
    model = model_of(PLAIN)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@odd("stores 'W' twice")
def a_weight_stored_twice() -> ModelProto:
    model = model_of(PLAIN)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, 3, dtype=np.float32), "W"))
    return model


@odd()
def a_tensor_without_a_name() -> ModelProto:
    model = model_of(PLAIN)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32)))
    return model


@odd()
def a_graph_without_a_name() -> ModelProto:
    model = model_of(PLAIN)
    model.graph.ClearField("name")
    return model


GIVEN_UP = {
    "Affine": "alpha = 1.5, beta = 0.5",
    "Crop": "border = [1, 0, 2, 1]",
    "ImageScaler": "scale = 0.5, bias = [1.0, 2.0, 3.0]",
    "ParametricSoftplus": "alpha = 1.5, beta = 0.5",
    "Scale": "scale = 2.0",
    "ScaledTanh": "alpha = 1.5, beta = 0.5",
}


def given_up(op_type: str) -> ModelProto:
    """An operator of the time before opset 10 between two others, whose types must be known."""
    attributes = GIVEN_UP[op_type]
    head = '<ir_version: 4, opset_import: ["": 9]> g (float[n, 3, 6, 7] x) => (float[n, 3, h, w] y)'
    body = f"z = {op_type} <{attributes}> (x) c = Conv(z, W) d = Clip <min = -2.0, max = 2.0> (c) "
    model = onnx.parser.parse_model(f"{head} {{ {body} y = {op_type} <{attributes}> (d) }}")
    weight = np.random.default_rng(0).normal(size=(3, 3, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "W"))
    return model


def results(model: ModelProto, **feeds: np.ndarray) -> np.ndarray:
    """What onnxruntime computes for y."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(["y"], feeds)[0]


@pytest.mark.parametrize("name", [*ODD, *GIVEN_UP])
@pytest.mark.thinned(4, 2)
def test_what_onnxruntime_loads_is_read_with_its_meaning(name: str, tmp_path: Path) -> None:
    """The forward part of the training model, and its gradients, are held against the file as it is."""
    model, text = (ODD[name][0](), ODD[name][1]) if name in ODD else (given_up(name), "")
    shape = (2, 3, 4) if name in ODD else (2, 3, 6, 7)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    expected = results(model, x=x)
    report = run_build(model.SerializeToString(), tmp_path / "t.onnx", Options(keep_outputs=True), verify=True)
    assert report.status == "built"
    assert not text or any(text in str(caution) for caution in report.cautions)
    trained = onnx.load(tmp_path / "t.onnx")
    assert not checker_error(trained, full=True)
    np.testing.assert_allclose(results(trained, x=x, label=expected), expected, rtol=1e-5, atol=1e-6)
    assert all(value.type.tensor_type.HasField("shape") for value in trained.graph.output)


@pytest.mark.parametrize("name", ODD)
def test_a_mended_model_is_one_of_the_standard_and_computes_the_same(name: str) -> None:
    model = ODD[name][0]()
    x, mended = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32), copied(model)
    repair(mended)
    np.testing.assert_array_equal(results(mended, x=x), results(model, x=x))
    assert not checker_error(skeleton(mended))
    assert not repair(copied(mended))  # once is enough


def test_operators_that_nobody_has_are_named() -> None:
    model = model_of("a = MatMul(x, W) b = Zork(a) y = Gelu(b)")
    model.graph.node[1].name = "here"
    with raises(OnnxgradError, "unreadable_file", "17", "here", "y", "20"):
        check_structure(model)


def test_without_an_opset_of_the_standard_nothing_is_guessed() -> None:
    model = model_of("a = MatMul(x, W) y = Softmax(a)", imports=', "com.microsoft": 1')
    del model.opset_import[0]
    with pytest.raises(OnnxgradError, match="not import an opset"):
        check_structure(model)


def test_a_circle_stays_an_error() -> None:
    model = model_of("a = MatMul(x, W) b = Add(a, c) c = Tanh(b) y = Softmax(c)")
    with pytest.raises(OnnxgradError, match="topologically sorted"):
        check_structure(model)


def test_what_onnxruntime_refuses_is_refused() -> None:
    model = model_of("a = MatMul(x, W) y = my.Own(a)")
    with raises(OnnxgradError, "unreadable_file", "y", "my", "my"):
        check_structure(model)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("a = MatMul(x, W) y = my.Own(a)", "uses Own ('y') of 'my', but imports no version of 'my'"),
        ("a = MatMul(x, W) y = Zork(a)", "opset 17 has no operator Zork ('y')"),
        ("a = MatMul(x, W) y = Gelu(a)", "opset 17 has no operator Gelu ('y', of opset 20 and newer)"),
        ("a = MatMul(x, W) y = Upsample(a, W)", "opset 17 has no operator Upsample ('y', removed at opset 10)"),
    ],
)
@pytest.mark.parametrize("make", [build, derive])
def test_a_model_in_memory_is_asked_the_same(body: str, text: str, make: Callable[[ModelProto], object]) -> None:
    with pytest.raises(OnnxgradError, match=re.escape(text)):
        make(model_of(body))


def test_an_operator_that_the_standard_has_mended_later_is_known() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[2, 4, 3] x, float[2] scale, float[2] bias) => (float[2, 4, 3] y) {
            y = GroupNormalization<num_groups = 2>(x, scale, bias) }""")
    assert onnx.defs.get_schema("GroupNormalization", 18).deprecated
    assert unknown_operators(model) == ""


def test_what_onnx_cannot_read_is_an_error_of_ours() -> None:
    model = model_of("a = MatMul(x, W) c = Identity(a) y = Softmax(c)")
    graph = Graph(model)
    graph.nodes[1].domain = "my"
    with pytest.raises(Contradiction, match="domain my"):
        infer_types(graph)
