"""Keep cubic Resize in the layout that it was written in.

onnxruntime's optimizer takes a Transpose past a Resize where that meets another one, and then has no kernel for a cubic
one that shrinks an axis (1.32: "'Cubic' mode only supports ..."). In an inference model what is resized so is a weight
most often, a position embedding, and all of it is a constant; in a training model the weight is fed. A Reshape to the
same shape behind the Resize, which is a view, keeps the transposes apart.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.types import shape_of


def keep_cubic_layout(graph: Graph) -> bool:
    """Put a view behind each cubic Resize of what was transposed before; whether there was one."""
    cubic = [node for node in graph.nodes if _is_cubic(node) and _may_move(graph, node)]
    if not cubic:
        return False
    views: dict[str, Node] = {}
    for node in cubic:
        name = node.output[0]
        rank = len(shape_of(graph.types.get(name)) or ())
        sizes = graph.add_constant(np.zeros(rank, np.int64))
        node.output[0] = graph.fresh(f"{name}_resized")
        graph.types[node.output[0]] = graph.types[name]
        views[node.output[0]] = make_node("Reshape", [node.output[0], sizes], [name], graph.fresh(f"{name}/view"))
        views[node.output[0]].metadata = node.metadata
    placed = (
        [node, views[node.output[0]]] if node.output[:1] and node.output[0] in views else [node] for node in graph.nodes
    )
    graph.nodes = [node for pair in placed for node in pair]
    return True


def _is_cubic(node: Node) -> bool:
    return node.op_type == "Resize" and any(a.name == "mode" and a.s == b"cubic" for a in node.attribute)


def _may_move(graph: Graph, node: Node) -> bool:
    """Whether a Transpose stands before a Resize, and no view behind it."""
    if not shape_of(graph.types.get(node.output[0])):
        return False
    before = graph.ancestors(node.input[:1])
    if not any(made.op_type == "Transpose" and made.output[0] in before for made in graph.nodes):
        return False
    readers = [reader for reader in graph.nodes if node.output[0] in reader.input[:1]]
    return not (len(readers) == 1 and _is_view(graph, readers[0]))


def _is_view(graph: Graph, node: Node) -> bool:
    sizes = graph.constant(node.input[1]) if node.op_type == "Reshape" else None
    return sizes is not None and not np.any(sizes)
