"""Nodes as records: what goes out is what was read, and what has been changed since."""

import onnx
from onnx import GraphProto, NodeProto, helper

from onnxgrad_cli.ir.node import Node, as_message, copied, make_node, metadata, metadata_of, set_metadata, write


def message() -> NodeProto:
    node = helper.make_node("Split", ["x", ""], ["a", "b"], name="both", domain="", axis=1, doc_string="said")
    node.overload = "wide"
    node.metadata_props.add(key="layer", value="3")
    node.device_configurations.add(configuration_id="kept")
    return node


def test_what_was_read_goes_out_as_it_came_in() -> None:
    before = message().SerializeToString()
    node = Node.read(message())
    assert (node.input, node.output, node.overload, node.metadata) == (["x", ""], ["a", "b"], "wide", {"layer": "3"})
    assert as_message(node).SerializeToString() == before
    graph = GraphProto()
    write([node, message()], graph.node)
    assert [each.SerializeToString() for each in graph.node] == [before, before]


def test_a_field_holds_what_is_written_and_nothing_else() -> None:
    graph = GraphProto(node=[message(), helper.make_node("Relu", ["a"], ["y"])])
    first, last = nodes = list(map(Node.read, graph.node))
    last.input = ["b"]
    write(nodes, graph.node)
    assert [list(each.input) for each in graph.node] == [["x", ""], ["b"]]
    write([last, first], graph.node)
    assert [each.op_type for each in graph.node] == ["Relu", "Split"]
    write([last, Node("Abs", ["y"], ["z"], "new")], graph.node)
    assert [each.op_type for each in graph.node] == ["Relu", "Abs"]
    write([], graph.node)
    assert not graph.node


def test_every_change_of_what_was_read_goes_out() -> None:
    node = Node.read(message())
    as_message(node)  # what was written once is not remembered
    node.op_type, node.domain, node.name = "Halve", "mine", "other"
    node.input[1], node.output = "n", ["c"]
    node.attribute[0].i = 2
    node.attribute.append(helper.make_attribute("num_outputs", 1))
    node.metadata = {"role": "seed"}
    wanted = helper.make_node("Halve", ["x", "n"], ["c"], name="other", domain="mine")
    wanted.attribute.extend([helper.make_attribute("axis", 2), helper.make_attribute("num_outputs", 1)])
    wanted.doc_string, wanted.overload = "said", "wide"
    wanted.metadata_props.add(key="role", value="seed")
    wanted.device_configurations.add(configuration_id="kept")
    assert as_message(node) == wanted


def test_a_new_node_is_written_anew_each_time() -> None:
    axis = helper.make_attribute("axis", 1)
    one, other = (Node("Softmax", ["x"], [name], name, attribute=[axis], metadata={"role": "loss"}) for name in "ab")
    one.attribute[0].i = 2  # theirs alone
    assert [node.attribute[0].i for node in (one, other)] == [2, 1] and axis.i == 1
    one.input.append("y")
    graph = GraphProto()
    write([one, other], graph.node)
    assert [list(node.input) for node in graph.node] == [["x", "y"], ["x"]]
    assert [node.attribute[0].i for node in graph.node] == [2, 1]
    assert list(graph.node) == [as_message(one), as_message(other)]
    assert {metadata_of(node, "role") for node in graph.node} == {"loss"} and metadata_of(one, "layer") == ""


def test_a_domain_that_is_taken_away_is_not_there() -> None:
    node = make_node("Conv", ["x", "w"], ["y"], domain="onnxgrad.target.blocked")
    node.domain = ""
    assert as_message(node) == helper.make_node("Conv", ["x", "w"], ["y"])


def test_a_copy_shares_nothing() -> None:
    for node in (Node.read(message()), Node("Split", ["x"], ["a"], "both", attribute=message().attribute), message()):
        before = as_message(node).SerializeToString()
        copy = copied(node)
        copy.name, copy.input[0], copy.attribute[0].i = "copy", "z", 7
        assert as_message(node).SerializeToString() == before
        assert as_message(copy).attribute[0].i == 7


def test_metadata_of_messages_and_records() -> None:
    for node in (message(), Node.read(message())):
        assert metadata(node) == {"layer": "3"}
        set_metadata(node, {"layer": "4", "role": ""})
        assert metadata(node) == {"layer": "4", "role": ""} and metadata_of(node, "layer") == "4"
        assert len(as_message(node).metadata_props) == 2
    assert metadata(onnx.NodeProto()) == {}
