"""Models of recent opsets: they stay where onnxruntime loads and runs them, and are else written at an older one."""

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.kernels import ASSURED, newest_loaded
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import opset as opsets, prepare
from onnxgrad_cli.record import Training
from tests.autodiff.test_types import type_errors
from tests.facts import raises
from tests.passes.test_pipeline import LINEAR, parse

NEWEST = onnx.defs.onnx_opset_version()


LOADED = newest_loaded(NEWEST)


@pytest.fixture(params=sorted({ASSURED, LOADED}))
def loaded(request, monkeypatch):
    """The newest opset that onnxruntime loads: that of the oldest admitted one, and that of the installed one."""
    monkeypatch.setattr(opsets, "newest_loaded", lambda limit: min(limit, request.param))
    return request.param


def settled(text, opset=NEWEST):
    model = onnx.parser.parse_model(f'<ir_version: 14, opset_import: ["" : {opset}]> {text}')
    graph, training = Graph(model), Training()
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, training)
    return graph, training


def opens(graph):
    """Whether onnxruntime has a kernel for each node; what else is wrong with a model raises."""
    try:
        onnxruntime.InferenceSession(graph.commit().SerializeToString())
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return False
    return True


def test_an_opset_that_is_loaded_stays(loaded):
    graph, training = settled("g (float[N, 3] x) => (float[N, 3] y) { a = Celu(x) y = Softmax(a) }")
    assert graph.opset() == loaded
    assert [node.op_type for node in graph.nodes] == ["Celu", "Softmax"]
    assert [caution.kind for caution in training.cautions] == ["opset change"] * (loaded < NEWEST)
    assert opens(graph)


def test_attributes_of_other_domains_stay(monkeypatch):
    """The standard's Attention, which came at opset 23, has no num_heads."""
    monkeypatch.setattr(opsets, "newest_loaded", lambda limit: 22)
    model = onnx.parser.parse_model(f"""<ir_version: 14, opset_import: ["" : {NEWEST}, "my": 1]>
        g (float[N, 3] x) => (float[N, 3] y) {{ a = Neg(x) y = my.Attention<num_heads = 2>(a) }}""")
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    assert graph.opset() == 22
    (node,) = (node for node in graph.nodes if node.domain)
    assert [attribute.name for attribute in node.attribute] == ["num_heads"]


def test_a_body_is_lowered_too(loaded):
    graph, _ = settled("""
    g (bool c, float[2, 4] x) => (float[2, 4] y) { y = If(c) <
        then_branch = t () => (float[2, 4] a) { a = Celu(x) },
        else_branch = e () => (float[2, 4] b) { k = Constant<value = float {2.5}>() b = Mod(x, k) }
    > }
    """)
    assert graph.opset() == loaded
    x = np.linspace(-4, 4, 8, dtype=np.float32).reshape(2, 4)
    found = Executor(graph.commit(), fallback=False)({"c": np.array(False), "x": x})["y"]
    np.testing.assert_allclose(found, np.mod(x, np.float32(2.5)), rtol=1e-6)


DOUBLES = [
    "g (double[2] x) => (double[2] y) { y = Celu(x) }",
    "g (bool c, double[2] x) => (double[2] y) { y = If(c) <"
    "then_branch = t () => (double[2] a) { a = Celu(x) }, else_branch = e () => (double[2] b) { b = Neg(x) }> }",
]
CONVOLUTION = "g (float[2, C, 6] x, float[N, 1, 3] w) => (y, s) { y, s = CausalConvWithState(x, w) }"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, r"Celu.*it accepts tensor\(double\) only since opset 28") for text in DOUBLES),
        (CONVOLUTION, "number of its channels"),
    ],
)
def test_what_has_no_older_form_is_refused_by_name(text, why, monkeypatch):
    monkeypatch.setattr(opsets, "newest_loaded", lambda limit: ASSURED)
    with pytest.raises(UnsupportedError) as error:
        settled(text)
    assert re.search(why, str(error.value) + str(error.value.refusals))
    assert f"opset {ASSURED}" in error.value.message


@pytest.mark.parametrize("text", DOUBLES)
@pytest.mark.skipif(LOADED < 28, reason="this onnxruntime loads no opset 28")
def test_what_only_a_newer_opset_takes_is_built_where_that_is_loaded(text):
    graph, training = settled(text)
    assert graph.opset() == 28 and not training.cautions
    assert opens(graph)


NEW_IN_BFLOAT16 = {
    "Celu": "h = Celu(z)",
    "Compress": "c = Constant<value = bool[2] {0, 1}>() h = Compress<axis = 1>(z, c)",
    "Einsum": """h = Einsum<equation = "ij,kj->ik">(z, z)""",
    "OneHot": "d = Constant<value = int64 {3}>() m = ReduceMean<keepdims = 0>(z, o) t = Gather(m, a) "
    "h = OneHot(a, d, t)",
    "ReverseSequence": "l = Constant<value = int64[3] {2, 1, 2}>() h = ReverseSequence(z, l)",
    "Unique": "h = Unique(z)",
}
"""Nodes that take bfloat16 at opset 28 and not before; z is [3, 3], a = [0, 1], o = [0]."""


@pytest.mark.parametrize("op_type", NEW_IN_BFLOAT16)
def test_what_only_a_newer_opset_takes_in_bfloat16(op_type, loaded):
    model = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : 28]>
    g (bfloat16[3, 2] x) => (bfloat16 y)
    <bfloat16[2, 3] w = {{16256, 49152, 16448, 16128, 16384, 48896}}, int64[2] a = {{0, 1}}, int64[1] o = {{0}}>
    {{ z = MatMul(x, w) {NEW_IN_BFLOAT16[op_type]} s = ReduceSum<keepdims = 0>(h) y = Identity(s) }}
    """)
    if loaded < 28:
        with pytest.raises(UnsupportedError, match="opset 26") as error:
            build(model)
        assert "bfloat16" in str(error.value.refusals)
        return
    built = build(model)
    assert built.graph.opset() == 28 and not type_errors(built.model)
    onnx.checker.check_model(
        built.model, full_check=True
    )  # onnxruntime has no MatMul in bfloat16; values: test_types.py


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_space_to_depth(mode, loaded):
    """CRD is new: it is written out, and undone by the DepthToSpace of that mode."""
    graph, _ = settled(f"""
    g (float[2, 3, 4, 6] x) => (float[2, 3, 4, 6] y)
    {{ a = SpaceToDepth<blocksize = 2, mode = "{mode}">(x) y = DepthToSpace<blocksize = 2, mode = "{mode}">(a) }}
    """)
    x = np.arange(144, dtype=np.float32).reshape(2, 3, 4, 6)
    assert graph.opset() == loaded
    np.testing.assert_array_equal(Executor(graph.commit(), fallback=False)({"x": x})["y"], x)


@pytest.mark.parametrize("shape", ["3, 4, 6", "3, H, W", "C, 4, 6", "C, H, W"])
def test_space_to_depth_is_written_out_as_it_is(shape, monkeypatch):
    text = f"""
    g (float[N, {shape}] x) => (float[N, K, 2, 3] y) {{ y = SpaceToDepth<blocksize = 2, mode = "CRD">(x) }}
    """
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 6)).astype(np.float32)
    wanted = x.reshape(2, 3, 2, 2, 3, 2).transpose(0, 1, 3, 5, 2, 4).reshape(2, 12, 2, 3)
    monkeypatch.setattr(opsets, "newest_loaded", lambda limit: ASSURED)
    graph, _ = settled(text)
    np.testing.assert_array_equal(Executor(graph.commit(), fallback=False)({"x": x})["y"], wanted)


def test_the_new_attribute_of_range_goes_where_opset_27_does(loaded):
    graph, _ = settled("g (float a) => (float[N] y) { y = Range<stash_type = 1>(a, a, a) }", 27)
    assert [attribute.name for attribute in graph.nodes[0].attribute] == ["stash_type"] * (loaded >= 27)
    assert opens(graph)


def test_an_older_file_format_is_written():
    x = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    model = helper.make_model(helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", x[:1], x[1:]))
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    onnxruntime.InferenceSession(graph.commit().SerializeToString())


def test_the_opset_is_raised_only_where_needed() -> None:
    old = '<ir_version: 7, opset_import: ["" : 13]>'
    assert build(parse(LINEAR, old)).graph.opset() == 13
    gather = """
    g (int64[N] i) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = Gather(w, i) }
    """
    built = build(parse(gather, old))
    assert built.graph.opset() == 16
    assert [caution.kind for caution in built.training.cautions if caution.subject == "opset"] == ["opset change"]


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
    with raises(UnsupportedError, "refused", "29", "28"):
        build(model)
