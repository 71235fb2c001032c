"""Other names for values, in nodes and in the scopes inside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import AttributeProto, GraphProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.types import without_shape


def rename(nodes: Iterable[Node], names: Mapping[str, str]) -> None:
    """Call values by other names wherever the nodes make, read or capture them."""
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
    """A copy of a body with names that nothing in the model bears, or those in `outer`, which also renames captures."""
    copy = GraphProto()
    copy.CopyFrom(body)
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
        value.type.CopyFrom(without_shape(value.type))  # exporters say of a branch that gives none what the other has
    del copy.value_info[:]
    return copy
