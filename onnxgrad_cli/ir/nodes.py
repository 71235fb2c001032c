"""What is read off nodes: the values they read, capture and make, and the bodies in their attributes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, TensorShapeProto

from onnxgrad_cli.ir.node import Node

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""The operators of the standard that have bodies."""


def subgraphs(node: Node) -> list[GraphProto]:
    """The graphs in a node's attributes (If, Loop, Scan)."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        kind = attribute.type
        if kind == AttributeProto.GRAPH:
            found.append(attribute.g)
        elif kind == AttributeProto.GRAPHS:
            found.extend(attribute.graphs)
    return found


def attributes_of(node: Node) -> dict[str, Any]:
    """What a node states for its attributes, by their names; strings as bytes."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def with_bodies(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, and those in their bodies."""
    for node in nodes:
        yield node
        for body in subgraphs(node) if node.attribute else ():
            yield from with_bodies(body.node)


def bodies(nodes: Iterable[Node]) -> Iterator[GraphProto]:
    """The bodies of nodes, and those inside them."""
    for node in nodes:
        for body in subgraphs(node) if node.attribute else ():
            yield body
            yield from bodies(body.node)


def captured(node: Node) -> list[str]:
    """What the subgraphs of a node read from outside, each value once."""
    if not node.attribute:
        return []
    return list(dict.fromkeys(itertools.chain.from_iterable(map(captured_by, subgraphs(node)))))


def captured_by(graph: GraphProto) -> Iterator[str]:
    """Every value that a subgraph reads from outside, as often as it does."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        yield from (name for name in reads(node) if name not in own)
        own.update(node.output)
    yield from (value.name for value in graph.output if value.name not in own)


def reads(node: Node) -> Sequence[str]:
    """Every value a node reads: its inputs, and what its subgraphs capture from outside."""
    names: Sequence[str] = node.input if isinstance(node, Node) else node.input[:]  # a message is slow to go through
    if "" in names:
        names = [name for name in names if name]
    return [*names, *captured(node)] if node.attribute else names


def read_by(nodes: Iterable[Node]) -> Iterator[str]:
    """Every value that nodes read, as often as they do."""
    return itertools.chain.from_iterable(map(reads, nodes))


def dims_in(graph: GraphProto) -> Iterator[TensorShapeProto.Dimension]:
    """Every dimension in the declarations of a graph."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from value.type.tensor_type.shape.dim


def node_names(graph: GraphProto) -> Iterator[str]:
    """Every value and node name in a graph and the graphs inside it."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield node.name
        yield from node.output[:]
        for inner in subgraphs(node) if node.attribute else ():
            yield from node_names(inner)


def body_of(node: Node, name: str) -> GraphProto:
    """The body in an attribute of a node; a change of it is a change of the node."""
    return next(a.g for a in node.attribute if a.name == name)
