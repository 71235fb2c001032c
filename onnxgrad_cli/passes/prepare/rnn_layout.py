"""Recurrent layers with the batch first (layout = 1), which stock onnxruntime refuses, as layers with time first."""

from __future__ import annotations

from collections.abc import Iterator

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied, make_node

LAYERS = frozenset({"RNN", "GRU", "LSTM"})
INPUTS = {0: (1, 0, 2), 5: (1, 0, 2), 6: (1, 0, 2)}
OUTPUTS = {0: (2, 0, 1, 3), 1: (1, 0, 2), 2: (1, 0, 2)}
"""Position of a value -> the axes that a Transpose takes it by, into the layer or out of it; weights stay."""


def to_time_major(graph: Graph) -> None:
    """Put every recurrent layer with layout = 1 between transposes and take the attribute out."""
    if any(_is_batch_major(node) for node in graph.nodes):
        graph.set_nodes([each for node in graph.nodes for each in _to_time_major(graph, node)])


def _is_batch_major(node: Node) -> bool:
    known = node.op_type in LAYERS and is_standard(node.domain)
    return known and any(attribute.name == "layout" and attribute.i for attribute in node.attribute)


def _to_time_major(graph: Graph, node: Node) -> Iterator[Node]:
    """The node, or its time-major form between transposes where it is batch-major."""
    if not _is_batch_major(node):
        yield node
        return
    layer, after = copied(node), []
    layer.attribute.remove(next(attribute for attribute in layer.attribute if attribute.name == "layout"))
    for position, name in enumerate(node.input):
        if name and position in INPUTS:
            layer.input[position] = graph.fresh(f"{name}/time_first")
            yield _transpose(graph, name, layer.input[position], INPUTS[position])
    for position, name in enumerate(node.output):
        if name:
            layer.output[position] = graph.fresh(f"{name}/time_first")
            after.append(_transpose(graph, layer.output[position], name, OUTPUTS[position]))
    yield layer
    yield from after


def _transpose(graph: Graph, name: str, result: str, axes: tuple[int, ...]) -> Node:
    node_name = graph.fresh(f"{result}/Transpose")
    return make_node("Transpose", [name], [result], name=node_name, perm=axes)
