"""Functions that list the values that nodes read and compute, and the subgraphs (bodies) in their attributes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorShapeProto, TypeProto, helper

from onnxgrad_cli.ir.domains import PREVIEW, is_standard, plain_domain
from onnxgrad_cli.ir.node import Node

AnyNode = TypeVar("AnyNode", Node, NodeProto)

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""The standard operators that have subgraphs in their attributes."""


def subgraphs(node: Node) -> list[GraphProto]:
    """Return the graphs in a node's attributes, such as the branches of an If."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        kind = attribute.type
        if kind == AttributeProto.GRAPH:
            found.append(attribute.g)
        elif kind == AttributeProto.GRAPHS:
            found.extend(attribute.graphs)
    return found


def attributes_of(node: Node) -> dict[str, Any]:
    """Return attribute name -> value, for the attributes that the node sets. Strings are bytes."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def with_bodies(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes, each followed by the nodes in its bodies at all depths."""
    for node in nodes:
        yield node
        for body in subgraphs(node) if node.attribute else ():
            yield from with_bodies(body.node)


def all_nodes(model: ModelProto) -> Iterator[Node]:
    """Yield the nodes of a model, including those in bodies and functions."""
    for owner in (model.graph, *model.functions):
        yield from with_bodies(owner.node)


def bodies(nodes: Iterable[Node]) -> Iterator[GraphProto]:
    """Yield the bodies of nodes at all depths."""
    for node in nodes:
        for body in subgraphs(node) if node.attribute else ():
            yield body
            yield from bodies(body.node)


def source_of(name: str, producers: Mapping[str, AnyNode], past: Collection[str] = ("Identity",)) -> AnyNode | None:
    """Return the node that computes a value, searched back through nodes of the operators in `past`.

    By default, Identity nodes are skipped, which PaddlePaddle writes to name outputs.

    Args:
        name: the value.
        producers: value -> the node that computes it.
        past: the operators to skip.

    Returns:
        None if the value is computed from an input or an initializer by operators in `past` alone.
    """
    node = producers.get(name)
    while node is not None and node.op_type in past and is_standard(node.domain):
        node = producers.get(node.input[0])
    return node


def captured(node: Node) -> list[str]:
    """Return the outer values that the subgraphs of a node read, each once."""
    if not node.attribute:
        return []
    return list(dict.fromkeys(itertools.chain.from_iterable(map(captured_by, subgraphs(node)))))


def captured_by(graph: GraphProto) -> Iterator[str]:
    """Yield every outer value that a subgraph reads, once per use."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        yield from (name for name in reads(node) if name not in own)
        own.update(node.output)
    yield from (value.name for value in graph.output if value.name not in own)


def reads(node: Node) -> Sequence[str]:
    """Return every value that a node reads: its inputs and the values that its subgraphs capture."""
    names: Sequence[str] = node.input if isinstance(node, Node) else node.input[:]  # iterating over a message is slow
    if "" in names:
        names = [name for name in names if name]
    return [*names, *captured(node)] if node.attribute else names


def read_by(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield every value that nodes read, once per use."""
    return itertools.chain.from_iterable(map(reads, nodes))


def depending_on(nodes: Iterable[Node], names: Iterable[str]) -> set[str]:
    """Return `names` and all values that depend on them. The nodes are in topological order."""
    found = set(names)
    for node in nodes:
        if not found.isdisjoint(reads(node)):
            found.update(filter(None, node.output))
    return found


def behind(nodes: Sequence[Node], results: Iterable[str]) -> list[Node]:
    """Return the nodes on which `results` depend, in their order in `nodes`, which is topological."""
    needed, found = set(results), []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            found.append(node)
            needed.update(reads(node))
    return found[::-1]


def schema_of(op_type: str, version: int, domain: str = "") -> onnx.defs.OpSchema | None:
    """Return the schema that an operator has at a version of its domain, or None if onnx has none."""
    try:
        return onnx.defs.get_schema(op_type, version, plain_domain(domain))
    except onnx.defs.SchemaError:
        return None


def dims_in(graph: GraphProto) -> Iterator[TensorShapeProto.Dimension]:
    """Yield every dimension in the type declarations of a graph."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from value.type.tensor_type.shape.dim


def node_names(graph: GraphProto) -> Iterator[str]:
    """Yield every value name and node name in a graph and the graphs inside it."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield node.name
        yield from node.output[:]
        for inner in subgraphs(node) if node.attribute else ():
            yield from node_names(inner)


def body_of(node: Node, name: str) -> GraphProto:
    """Return the body in an attribute of a node. The body is not a copy, so changing it changes the node."""
    return next(a.g for a in node.attribute if a.name == name)


def is_gradient(node: Node) -> bool:
    """Return True if a node is the Gradient operator of the standard."""
    return node.op_type == "Gradient" and node.domain == PREVIEW


def has_gradients(model: ModelProto) -> bool:
    """Return True if a model has a Gradient node, including those in bodies of nodes and in functions."""
    return any(map(is_gradient, all_nodes(model)))


def types_in(graph: GraphProto) -> dict[str, TypeProto]:
    """Return the types of all values that a graph and its bodies declare."""
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    types |= {t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in graph.initializer}
    for node in graph.node:
        for inner in subgraphs(node):
            types |= types_in(inner)
    return types
