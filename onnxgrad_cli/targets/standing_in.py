"""An emitter of nodes that stand for one which a runtime computes wrongly, slowly or not at all."""

from __future__ import annotations

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, metadata_of


def op_for(graph: Graph, node: Node) -> Op:
    """An emitter of nodes in the part of the graph that `node` is in, named after it."""
    op = Op(graph)
    op.role = metadata_of(node, ROLE) or op.role
    op.scope = node.name
    return op
