"""The mutable view of a model: what is written back is the model, names are its own, nothing that is needed goes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import shape_of, tensor_type

TEXT = """
<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
g (float[n, 2] x, bool c) => (float[n, 2] y)
<float[2] w = {1, 2}, float[2] idle = {5, 6}>
{
  [first] h = Mul(x, w)
  [dead] d = Neg(h)
  [last] y = If(c) <
    then_branch = t () => (float[n, 2] a) { a = Exp(h) },
    else_branch = e () => (float[n, 2] b) { b = Add(h, w) }
  >
}
"""


@pytest.fixture
def graph() -> Graph:
    return Graph(onnx.parser.parse_model(TEXT))


def test_nothing_done_is_nothing_changed() -> None:
    model = onnx.parser.parse_model(TEXT)
    before = model.SerializeToString()
    assert Graph(model).commit().SerializeToString() == before


def test_what_was_added_runs(graph: Graph) -> None:
    graph.add_initializer("two", np.float32([2.0]))
    graph.add_initializer("unread", np.float32([3.0]))
    graph.nodes.insert(1, helper.make_node("Mul", ["h", "two"], ["twice"], name="doubled"))
    graph.types["twice"] = tensor_type(TensorProto.FLOAT, ["n", 2])
    graph.add_output("twice")
    graph.add_input("z", tensor_type(TensorProto.FLOAT, []))
    model = graph.commit()
    onnx.checker.check_model(model, full_check=True)
    assert [tensor.name for tensor in model.graph.initializer] == ["w", "idle", "two"]  # what nobody reads stays away
    x = np.float32([[1, 2], [3, 4]])
    feeds = {"x": x, "c": np.array(True), "z": np.float32(0)}
    y, twice = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(y, np.exp(x * [1, 2]), rtol=1e-6)
    np.testing.assert_array_equal(twice, 2 * x * [1, 2])


def test_what_nobody_reads_goes_and_captures_are_read(graph: Graph) -> None:
    assert graph.remove_unused(keep=["d"]) == 0
    assert graph.remove_unused() == 1
    assert [node.name for node in graph.nodes] == ["first", "last"]
    graph.drop_unread(["w", "idle", "x"])
    assert list(graph.initializers) == ["w"]
    assert [tensor.name for tensor in graph.commit().graph.initializer] == ["w"]


def test_where_values_come_from_and_go(graph: Graph) -> None:
    assert {name: node.name for name, node in graph.producers().items()} == {"h": "first", "d": "dead", "y": "last"}
    uses = {name: sorted((node.name, position) for node, position in places) for name, places in graph.uses().items()}
    assert uses["h"] == [("dead", 0), ("last", -1)]
    assert uses["w"] == [("first", 1), ("last", -1)]
    assert graph.ancestors(["y"]) == {"y", "c", "h", "w", "x"}
    assert graph.ancestors(["y"], stop=["h"]) == {"y", "c", "h", "w"}
    assert graph.ancestors(["d"]) == {"d", "h", "x", "w"}


def test_fresh_names_are_nobodys(graph: Graph) -> None:
    taken = {"x", "c", "y", "w", "idle", "h", "d", "a", "b", "first", "dead", "last"}
    assert all(graph.taken(name) for name in taken)
    drawn = [graph.fresh(stem) for stem in ("h", "h", "h_1", "a", "first", "new", "new")]
    assert len({*drawn, *taken}) == len(drawn) + len(taken)
    assert drawn[5] == "new"
    other = Graph(onnx.parser.parse_model(TEXT))
    other.share_names(graph)
    assert other.fresh("new") not in drawn
    other.use_domain("my.ops")
    assert graph.opset("my.ops") == 1


def test_fresh_symbols_are_nobodys() -> None:
    graph = Graph(onnx.parser.parse_model(TEXT.replace("float[n, 2] x", "float[_d7, 2] x")))
    assert graph.fresh_symbol() == "_d8"
    named = graph.named(tensor_type(TensorProto.FLOAT, [None, 3, None]))
    first, three, second = shape_of(named) or ()
    assert three == 3 and len({first, second, "_d7", "_d8"}) == 4


def test_opsets(graph: Graph) -> None:
    assert (graph.opset(), graph.opset("ai.onnx"), graph.opset("com.microsoft"), graph.opset("my.ops")) == (
        17,
        17,
        1,
        None,
    )
    del graph.proto.opset_import[:]
    graph.proto.opset_import.add(domain="ai.onnx", version=13)
    assert graph.opset() == 13


def test_what_is_constant(graph: Graph) -> None:
    """Small, in the file, and not to be overridden at run time."""
    np.testing.assert_array_equal(graph.constant("w"), [1, 2])
    assert graph.constant("x") is None and graph.constant("h") is None
    graph.add_input("w", tensor_type(TensorProto.FLOAT, [2]))
    assert graph.constant("w") is None
    graph.vary(["idle"])
    assert graph.constant("idle") is None
    large = numpy_helper.from_array(np.zeros(1 << 20, np.float32), "large")
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer.append(large)
    assert Graph(model).constant("large") is None


def test_initializers_among_the_inputs_become_constants() -> None:
    model = onnx.parser.parse_model(TEXT)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2]))
    graph = Graph(model)
    assert graph.constant("w") is None
    graph.unlist_initializers()
    assert graph.input_names == ["x", "c"]
    np.testing.assert_array_equal(graph.constant("w"), [1, 2])
