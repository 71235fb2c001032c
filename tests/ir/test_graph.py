"""The mutable view of a model: what is written back is the model, names are its own, nothing that is needed goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.types import MAX_SHAPE_BYTES, shape_of, tensor_type

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


def test_a_new_view_knows_its_file_and_no_more() -> None:
    graph = Graph(onnx.parser.parse_model(TEXT), Path("model.onnx"))
    assert (graph.path, graph.unexpanded, graph.declared_shapes) == (Path("model.onnx"), {}, set())


def test_what_was_added_runs(graph: Graph) -> None:
    graph.add_initializer("two", np.float32([2.0]))
    graph.add_initializer("unread", np.float32([3.0]))
    graph.nodes.insert(1, make_node("Mul", ["h", "two"], ["twice"], name="doubled"))
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
    assert list(graph.made()) == ["h", "d", "y"]
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
    assert drawn[5:] == ["new", "new_1"]
    other = Graph(onnx.parser.parse_model(TEXT))
    other.share_names(graph)
    assert other.fresh("new") not in drawn
    other.use_domain("my.ops")
    assert graph.opset("my.ops") == other.opset("my.ops") == 1
    other.use_domain("my.ops")
    assert [entry.domain for entry in other.proto.opset_import].count("my.ops") == 1


def test_names_given_by_others_are_taken(graph: Graph) -> None:
    graph.add_initializer("two", np.float32([2.0]))
    graph.add_input("z", tensor_type(TensorProto.FLOAT, []))
    graph.set_nodes(iter([*graph.nodes, helper.make_node("Neg", ["y"], ["negative"], name="negate")]))
    assert [node.name for node in graph.nodes] == ["first", "dead", "last", "negate"]
    assert all(graph.taken(name) for name in ("two", "z", "negative", "negate"))
    assert not graph.taken("three") and "z" not in graph.original_names


def test_types_of_what_is_added(graph: Graph) -> None:
    graph.add_initializer("table", np.zeros((3, 2), np.int64))
    assert graph.types["table"] == tensor_type(TensorProto.INT64, [3, 2])
    double = tensor_type(TensorProto.DOUBLE, ["n"])
    graph.add_input("z", double)
    assert graph.types["z"] == double
    graph.add_output("z")
    assert graph.proto.graph.output[-1].type == double


def test_added_constants_pass_to_the_graph_around(graph: Graph) -> None:
    inner = Graph(onnx.parser.parse_model(TEXT))
    inner.add_initializer("table", np.float32([[1, 2]]))
    assert inner.added("table") and not inner.added("w")
    inner.hand_constants_to(graph)
    assert not inner.added("table") and graph.added("table")
    np.testing.assert_array_equal(numpy_helper.to_array(graph.initializers["table"]), [[1, 2]])
    assert graph.types["table"] == tensor_type(TensorProto.FLOAT, [1, 2])


def test_an_added_constant_that_was_dropped_stays_away(graph: Graph) -> None:
    graph.add_initializer("two", np.float32([2.0]))
    graph.drop_unread(["two"])
    assert not graph.added("two")
    assert [tensor.name for tensor in graph.commit().graph.initializer] == ["w", "idle"]


def test_work_goes_on_after_a_commit(graph: Graph) -> None:
    graph.commit()
    graph.nodes[0].op_type = "Add"
    graph.commit()
    assert graph.proto.graph.node[0].op_type == "Add"


def test_nodes_are_read_when_they_are_asked_for(graph: Graph) -> None:
    graph.proto.graph.node[0].name = "early"
    assert graph.commit().graph.node[0].name == graph.nodes[0].name == "early"
    graph.nodes[0].input[0] = "other"
    assert graph.commit().graph.node[0].input[0] == "other"
    graph.proto.graph.node[0].name = "late"
    assert graph.nodes[0].name == "early"
    graph.read_again()
    assert graph.nodes[0].name == "late" and graph.uses()["other"] == [(graph.nodes[0], 0)]


def test_a_rewritten_skeleton_is_adopted() -> None:
    """Nodes, opsets and new constants are the skeleton's; weights and what was noted of a node stay."""
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(MAX_SHAPE_BYTES, np.float32), "large"))
    model.graph.node[0].metadata_props.add(key="namespace", value="layer")
    model.graph.node[1].metadata_props.add(key="namespace", value="old")
    graph = Graph(model)
    graph.nodes = graph.nodes[:-1]  # the skeleton has the nodes under work, not those of the file
    graph.add_initializer("two", np.float32([2]))
    skeleton = graph.skeleton()
    assert [node.name for node in skeleton.graph.node] == ["first", "dead"]
    assert [value.name for value in skeleton.graph.input] == ["x", "c", "large"]
    assert [tensor.name for tensor in skeleton.graph.initializer] == ["w", "idle", "two"]
    skeleton.ir_version = 10
    del skeleton.opset_import[:]
    skeleton.opset_import.add(domain="", version=21)
    del skeleton.graph.node[0].metadata_props[:]
    skeleton.graph.node[1].metadata_props[0].value = "new"
    skeleton.graph.node.append(helper.make_node("Identity", ["d"], ["made"], name="copied"))
    skeleton.graph.initializer.append(numpy_helper.from_array(np.float32([3]), "three"))
    skeleton.graph.initializer[0].float_data[:] = [7, 7]
    graph.adopt(skeleton)
    noted = {node.name: dict(node.metadata) for node in graph.nodes}
    assert noted == {"first": {"namespace": "layer"}, "dead": {"namespace": "new"}, "copied": {}}
    assert graph.taken("made")
    assert (graph.opset(), graph.opset("com.microsoft"), graph.proto.ir_version) == (21, None, 10)
    assert [tensor.name for tensor in graph.commit().graph.initializer] == ["w", "idle", "large", "three"]
    np.testing.assert_array_equal(numpy_helper.to_array(graph.initializers["w"]), [1, 2])
    assert graph.initializers["three"] is graph.proto.graph.initializer[-1]
    older = graph.skeleton()
    older.ir_version = 7
    graph.adopt(older)
    assert graph.proto.ir_version == 10


def test_fresh_symbols_are_nobodys() -> None:
    graph = Graph(onnx.parser.parse_model(TEXT.replace("float[n, 2] x", "float[_d7, 2] x")))
    assert graph.fresh_symbol() == "_d8"
    named = graph.named(tensor_type(TensorProto.FLOAT, [None, 3, None]))
    first, three, second = shape_of(named) or ()
    assert three == 3 and len({first, second, "_d7", "_d8"}) == 4
    for text in (TEXT, TEXT.replace("float[n, 2] x", f"float[_d{'9' * 5000}, 2] x")):
        assert Graph(onnx.parser.parse_model(text)).fresh_symbol() == "_d1"


def test_symbols_of_an_inference_become_the_graphs_own(graph: Graph) -> None:
    symbols: dict[str, str] = {}
    named = graph.named(tensor_type(TensorProto.FLOAT, ["unk__0", 3, "unk__1", "unk__0"]), symbols)
    assert shape_of(named) == ("_d1", 3, "_d2", "_d1")
    assert symbols == {"unk__0": "_d1", "unk__1": "_d2"}
    assert shape_of(graph.named(tensor_type(TensorProto.FLOAT, ["n", "unk__1"]))) == ("n", "unk__1")


def test_equal_types_are_one(graph: Graph) -> None:
    first, equal, other = (tensor_type(TensorProto.FLOAT, [size]) for size in (2, 2, 3))
    assert graph.shared(first) is first and graph.shared(equal) is first and graph.shared(other) is other
    graph.types.update(a=first, b=first, c=other)
    assert [shape_of(each) for each in graph.distinct_types()] == [(2,), (3,)]


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
    model = onnx.parser.parse_model(TEXT)
    for name, size in {"small": MAX_SHAPE_BYTES, "large": MAX_SHAPE_BYTES + 1}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(size, np.int8), name))
    assert Graph(model).constant("small") is not None and Graph(model).constant("large") is None


def test_what_becomes_a_constant_later_is_one(graph: Graph) -> None:
    assert graph.constant("h") is None
    graph.add_initializer("h", np.array([3, 4]))
    np.testing.assert_array_equal(graph.constant("h"), [3, 4])


def test_initializers_among_the_inputs_become_constants() -> None:
    model = onnx.parser.parse_model(TEXT)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2]))
    graph = Graph(model)
    assert graph.constant("w") is None
    graph.unlist_initializers()
    assert graph.input_names == ["x", "c"]
    np.testing.assert_array_equal(graph.constant("w"), [1, 2])
