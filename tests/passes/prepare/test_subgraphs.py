"""The bodies of control flow: which are refused."""

from __future__ import annotations

from onnx import NodeProto, helper

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.passes.prepare.subgraphs import MOST_LOOPS, check_depth
from tests.facts import raises


def loops(depth: int) -> list[Node]:
    """A node in `depth` loops without names."""
    node: NodeProto = helper.make_node("Neg", ["a"], ["b"])
    for _ in range(depth):
        node = helper.make_node("Loop", ["count", "go"], ["y"], body=helper.make_graph([node], "body", [], []))
    return [Node.read(node)]


def test_loops_that_are_nested_too_deeply_are_refused() -> None:
    check_depth(loops(MOST_LOOPS))
    with raises(UnsupportedError, "refused", "y", "6", "6"):
        check_depth(loops(MOST_LOOPS + 1))
