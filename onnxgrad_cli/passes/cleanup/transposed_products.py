"""A transposed product is the product of the transposed factors, in the other order.

Exporters transpose a layer's weight before they multiply with it, so that its gradient is a product that is transposed
in the end: a pass over memory. A transposed factor costs nothing: onnxruntime's product takes it so.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, make_node, metadata_of
from onnxgrad_cli.ir.types import shape_of, tensor_type

TALL = 2
"""A result of more rows than this times its columns is transposed in the end: products are slow there if their first
factor is transposed. Of the time of PyTorch's product, turned and not, for 512 tokens (one thread): 1.04 and 1.13 into
768 x 768, 1.00 and 1.20 into 768 x 3072, but 1.20 and 1.11 into 3072 x 768, 1.37 and 1.15 into 50257 x 768."""


def turn_products(graph: Graph) -> bool:
    """Write (Aᵀ B)ᵀ as Bᵀ A in the backward part, where nobody else reads the product; whether any was."""
    transposes = {node.output[0]: node for node in graph.nodes if _is_matrix_transpose(graph, node)}
    last = _last_transposes(graph, transposes)
    if not last:
        return False
    turned = {node.output[0] for node in last.values()}
    factors = {name: node for name, node in transposes.items() if name not in turned}
    dropped = {node.name for node in last.values()}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op_type == "MatMul" and node.output[0] in last:
            nodes += _turn(graph, node, last[node.output[0]].output[0], factors)
        if node.name not in dropped:
            nodes.append(node)
    graph.nodes = nodes
    return True


def _last_transposes(graph: Graph, transposes: Mapping[str, Node]) -> dict[str, Node]:
    """Product with a transposed factor -> the node that transposes the product, where nobody else reads it."""
    products = {
        node.output[0]
        for node in graph.nodes
        if node.op_type == "MatMul" and _is_backward(node) and not transposes.keys().isdisjoint(node.input)
    }
    wide = [node for node in transposes.values() if node.input[0] in products and _is_wide(graph, node.output[0])]
    if not wide:
        return {}
    uses, outputs = graph.uses(), set(graph.output_names)
    return {node.input[0]: node for node in wide if len(uses[node.input[0]]) == 1 and node.input[0] not in outputs}


def _turn(graph: Graph, product: Node, result: str, transposes: Mapping[str, Node]) -> list[Node]:
    """Let `product` compute its transpose `result`, of its factors' transposes in the other order.

    Returns:
        The nodes that transpose those factors that are not transposes already; they stand before the product.
    """
    added: list[Node] = []
    factors: list[str] = []
    for name in reversed(product.input):
        if name in transposes:
            factors.append(transposes[name].input[0])
        else:
            added.append(_transpose(graph, product, name))
            factors.append(added[-1].output[0])
    product.input[:] = factors
    product.output[0] = result
    return added


def _transpose(graph: Graph, product: Node, name: str) -> Node:
    """A node that transposes the factor `name` of `product`."""
    result = graph.fresh(f"{product.name}/Transpose_out")
    shape = shape_of(graph.types[name])
    graph.types[result] = tensor_type(graph.types[name].tensor_type.elem_type, shape and shape[::-1])
    node = make_node("Transpose", [name], [result], graph.fresh(f"{product.name}/Transpose"), perm=[1, 0])
    node.metadata = product.metadata
    return node


def _is_backward(node: Node) -> bool:
    return metadata_of(node, ROLE) == "backward"


def _is_wide(graph: Graph, name: str) -> bool:
    """Whether a matrix is known to have not many more rows than columns."""
    rows, columns = shape_of(graph.types.get(name)) or ("?", "?")
    return isinstance(rows, int) and isinstance(columns, int) and rows <= TALL * columns


def _is_matrix_transpose(graph: Graph, node: Node) -> bool:
    if node.op_type != "Transpose" or not is_standard(node.domain):
        return False
    return len(shape_of(graph.types.get(node.input[0])) or ()) == 2 and [
        i for attribute in node.attribute for i in attribute.ints
    ] in ([], [1, 0])
