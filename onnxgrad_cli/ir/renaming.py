"""Rename values in nodes and in the bodies inside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy

from onnx import AttributeProto, GraphProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.types import without_shape


def rename(nodes: Iterable[Node], names: Mapping[str, str]) -> None:
    """Rename values in all nodes that compute, read or capture them. `names` maps old names to new ones."""
    for node in nodes:
        for field in (node.input, node.output):
            old = field[:]
            if not names.keys().isdisjoint(old):
                field[:] = [names.get(name, name) for name in old]
        for body in subgraphs(node) if node.attribute else ():
            own = {value.name for value in (*body.input, *body.initializer)}
            own.update(name for inner in body.node for name in inner.output)
            outer = {old: new for old, new in names.items() if old not in own}
            rename(body.node, outer)
            for value in body.output:
                value.name = outer.get(value.name, value.name)


def renamed(graph: Graph, body: GraphProto, outer: Mapping[str, str] | None = None) -> GraphProto:
    """Return a copy of a body in which all names are unused in the model.

    Args:
        graph: the graph that provides the names.
        body: the body; not changed.
        outer: old name -> new name, for values that get a given name, such as captured values.
    """
    copy = deepcopy(body)
    names = dict(outer or {})

    def own(name: str) -> str:
        if name and name not in names:
            names[name] = graph.fresh(name)
        return names.get(name, name)

    for given in (*copy.input, *copy.initializer):
        given.name = own(given.name)
    for sparse in copy.sparse_initializer:
        sparse.values.name = own(sparse.values.name)
    for node in copy.node:
        node.name = graph.fresh(node.name or node.op_type)
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                attribute.g.CopyFrom(renamed(graph, attribute.g, names))
        node.output[:] = [own(name) for name in node.output]
    for value in copy.output:
        value.name = names.get(value.name, value.name)
        # exporters may declare the shape of one branch's output for the other branch
        value.type.CopyFrom(without_shape(value.type))
    del copy.value_info[:]
    return copy
