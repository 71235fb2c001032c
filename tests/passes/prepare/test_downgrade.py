"""Models of opsets that onnxruntime does not load yet: written at the newest that it loads, or refused by name."""

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training

NEWEST = onnx.defs.onnx_opset_version()


def settled(text, opset=NEWEST):
    model = onnx.parser.parse_model(f'<ir_version: 14, opset_import: ["" : {opset}]> {text}')
    graph, training = Graph(model), Training()
    prepare.normalise(graph)
    prepare.settle(graph, training)
    return graph, training


def test_what_has_not_changed_is_lowered():
    graph, training = settled("g (float[N, 3] x) => (float[N, 3] y) { a = Celu(x) y = Softmax(a) }")
    assert graph.opset() == registry.NEWEST_OPSET
    assert [node.op_type for node in graph.nodes] == ["Celu", "Softmax"]
    assert [caution.kind for caution in training.cautions] == ["opset change"]
    onnxruntime.InferenceSession(graph.commit().SerializeToString())


def test_a_body_is_lowered_too():
    graph, _ = settled("""
    g (bool c, float[2] x) => (float[2] y) { y = If(c) <
        then_branch = t () => (float[2] a) { a = Celu(x) },
        else_branch = e () => (float[2] b) { b = Neg(x) }
    > }
    """)
    assert graph.opset() == registry.NEWEST_OPSET


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("g (double[2] x) => (double[2] y) { y = Celu(x) }", r"Celu.*it takes tensor\(double\) since opset 28"),
        ("g (bool c, double[2] x) => (double[2] y) { y = If(c) <"
         "then_branch = t () => (double[2] a) { a = Celu(x) }, else_branch = e () => (double[2] b) { b = Neg(x) }> }",
         "Celu.*since opset 28"),
        ("g (float[2, C, 6] x, float[N, 1, 3] w) => (y, s) { y, s = CausalConvWithState(x, w) }", "how many channels"),
    ],
)  # fmt: skip
def test_what_has_is_refused_by_name(text, why):
    with pytest.raises(UnsupportedError) as error:
        settled(text)
    assert re.search(why, str(error.value) + str(error.value.refusals))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_space_to_depth(mode):
    """CRD is new: it is written out, and undone by the DepthToSpace of that mode."""
    graph, _ = settled(f"""
    g (float[2, 3, 4, 6] x) => (float[2, 3, 4, 6] y)
    {{ a = SpaceToDepth<blocksize = 2, mode = "{mode}">(x) y = DepthToSpace<blocksize = 2, mode = "{mode}">(a) }}
    """)
    x = np.arange(144, dtype=np.float32).reshape(2, 3, 4, 6)
    assert graph.opset() == registry.NEWEST_OPSET
    np.testing.assert_array_equal(Executor(graph.commit(), fallback=False)({"x": x})["y"], x)


def test_the_new_attribute_of_range_goes():
    graph, _ = settled("g (float a) => (float[N] y) { y = Range<stash_type = 1>(a, a, a) }", 27)
    assert not graph.nodes[0].attribute
    onnxruntime.InferenceSession(graph.commit().SerializeToString())


def test_the_list_is_reviewed():
    """Whatever changed after the newest opset is on the list, has a definition or a body, or is neither's business."""
    changed = {
        schema.name
        for schema in onnx.defs.get_all_schemas_with_history()
        if not schema.domain and schema.since_version > registry.NEWEST_OPSET
    }
    other = {name for name in changed - registry.WIDENED if registry.lookup_definition(name, "", NEWEST) is None}
    assert other == {"SpaceToDepth"} and changed >= registry.WIDENED


def test_an_older_file_format_is_written():
    x = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    model = helper.make_model(helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", x[:1], x[1:]))
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.settle(graph, Training())
    onnxruntime.InferenceSession(graph.commit().SerializeToString())
