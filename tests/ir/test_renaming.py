"""Other names for values: every scope reads what it read before, under the other name."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest
from onnx import GraphProto, TensorProto, helper

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.renaming import rename, renamed
from onnxgrad_cli.ir.types import dtype_of, shape_of

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
g (float[2] x, bool c) => (float[2] y)
{
  [first] h = Clip(x, , x)
  [last] y = If(c) <
    then_branch = t () => (float[2] h) { u = Neg(x) [inner] h = Exp(u) },
    else_branch = e () => (float[2] x)
    { deep = If(c) <then_branch = tt () => (float[2] a) { a = Neg(h) }, else_branch = ee () => (float[2] h) { }> }
  >
}
"""


@pytest.fixture
def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def read(body: GraphProto) -> list[tuple[list[str], list[str]]]:
    """What each node of a body reads and makes, and what the body gives out."""
    made = [(list(node.input), list(node.output)) for node in body.node]
    return [*made, ([value.name for value in body.output], [])]


def test_values_are_renamed_where_they_are_made_read_and_captured(model: onnx.ModelProto) -> None:
    rename(model.graph.node, {"x": "x2", "h": "h2"})
    first, last = model.graph.node
    assert (list(first.input), list(first.output), list(last.input)) == (["x2", "", "x2"], ["h2"], ["c"])
    then, other = subgraphs(last)
    assert read(then) == [(["x2"], ["u"]), (["u"], ["h"]), (["h"], [])]  # the branch makes an h of its own
    assert [value.name for value in other.output] == ["x2"]
    assert [read(body) for body in subgraphs(other.node[0])] == [[(["h2"], ["a"]), (["a"], [])], [(["h2"], [])]]


@pytest.mark.parametrize("own", ["input", "initializer"])
def test_what_a_body_is_given_hides_the_value_around_it(model: onnx.ModelProto, own: str) -> None:
    body = subgraphs(model.graph.node[1])[0]
    if own == "input":
        body.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]))
    else:
        body.initializer.append(helper.make_tensor("x", TensorProto.FLOAT, [2], [1, 2]))
    rename(model.graph.node, {"x": "x2"})
    assert read(body)[0] == (["x"], ["u"])


def test_a_renamed_copy_bears_names_of_its_own(model: onnx.ModelProto) -> None:
    body = model.graph.node[1].attribute[0].g
    body.input.append(helper.make_tensor_value_info("i", TensorProto.FLOAT, [2]))
    body.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [2], [1, 2]))
    sparse = body.sparse_initializer.add()
    sparse.values.name = "s"
    body.node.append(helper.make_node("Sum", ["i", "w", "s", "", "x"], ["", "z"]))
    body.value_info.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, [2]))
    graph = Graph(model)
    before = model.SerializeToString()
    copy = renamed(graph, body)
    assert model.SerializeToString() == before
    given = [copy.input[0].name, copy.initializer[0].name, copy.sparse_initializer[0].values.name]
    assert given == ["i_1", "w_1", "s_1"]
    assert read(copy) == [(["x"], ["u_1"]), (["u_1"], ["h_1"]), ([*given, "", "x"], ["", "z_1"]), (["h_1"], [])]
    assert [node.name for node in copy.node] == ["Neg", "inner_1", "Sum"]
    assert (dtype_of(copy.output[0].type), shape_of(copy.output[0].type)) == (TensorProto.FLOAT, None)
    assert not copy.value_info


def test_a_renamed_copy_gives_out_what_lies_around_it_as_it_is(model: onnx.ModelProto) -> None:
    assert [value.name for value in renamed(Graph(model), model.graph.node[1].attribute[1].g).output] == ["x"]


def test_a_renamed_copy_reads_what_it_is_told_to_capture(model: onnx.ModelProto) -> None:
    outer = {"h": "given", "x": "result"}
    copy = renamed(Graph(model), model.graph.node[1].attribute[1].g, outer)
    assert outer == {"h": "given", "x": "result"}
    assert [value.name for value in copy.output] == ["result"]
    (deep,) = copy.node
    assert list(deep.output) == ["deep_1"]
    assert [read(body) for body in subgraphs(deep)] == [[(["given"], ["a_1"]), (["a_1"], [])], [(["given"], [])]]
