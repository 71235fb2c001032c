"""Products of a matrix and a vector, as products of matrices.

onnxruntime moves a Transpose through elementwise operators to such a product where the backward part has another, and
its fusion of MatMul(Transpose(A), v) computes something else for a vector: at its default level the loss was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import shape_of


def widen_vectors(graph: Graph) -> bool:
    """Write each product of a matrix and a vector as one of two matrices; whether there were any."""
    nodes: list[Node] = []
    changed = False
    for node in graph.nodes:
        axis = _axis(graph, node)
        nodes += [node] if axis is None else _widened(graph, node, axis)
        changed |= axis is not None
    if changed:
        graph.set_nodes(nodes)
    return changed


def _axis(graph: Graph, node: Node) -> int | None:
    """The axis of the product that a vector lacks; None where there is no vector, or nothing else."""
    if node.op_type != "MatMul" or not is_standard(node.domain):
        return None
    ranks = [None if (shape := shape_of(graph.types.get(name))) is None else len(shape) for name in node.input]
    if None in ranks or 1 not in ranks or ranks == [1, 1]:
        return None
    return -1 if ranks[1] == 1 else -2


def _widened(graph: Graph, node: Node, axis: int) -> Sequence[Node]:
    op = Op(graph)
    op.replaces(node)
    a, b = (op.val(name) for name in node.input)
    product = a @ op.unsqueeze(b, [-1]) if axis == -1 else op.unsqueeze(a, [0]) @ b
    op.rename(op.squeeze(product, [axis]), node.output[0])
    return op.nodes
