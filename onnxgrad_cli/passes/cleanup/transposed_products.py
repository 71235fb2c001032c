"""A transposed product is the product of the transposed factors, in the other order.

Exporters transpose a layer's weight before they multiply with it, so that its gradient is a product that is transposed
in the end: a pass over memory. A transposed factor costs nothing: onnxruntime's product takes it so.
"""

from __future__ import annotations

from onnx import NodeProto, helper

from onnxgrad_cli.emission.emitter import ROLE
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import shape_of, tensor_type

TALL = 2
"""A result of more rows than this times its columns is transposed in the end: products are slow there if their first
factor is transposed. Of the time of PyTorch's product, turned and not, for 512 tokens (one thread): 1.04 and 1.13 into
768 x 768, 1.00 and 1.20 into 768 x 3072, but 1.20 and 1.11 into 3072 x 768, 1.37 and 1.15 into 50257 x 768."""


def turn_products(graph: Graph) -> bool:
    """Write (Aᵀ B)ᵀ as Bᵀ A in the backward part, where nobody else reads the product; whether any was."""
    transposes = {node.output[0]: node for node in graph.nodes if _is_matrix_transpose(graph, node)}
    if not transposes:
        return False
    products = {
        node.output[0]: node
        for node in graph.nodes
        if node.op_type == "MatMul" and _is_backward(node) and not transposes.keys().isdisjoint(node.input)
    }
    found = {
        node.input[0]: node
        for node in transposes.values()
        if node.input[0] in products and _is_wide(graph, node.output[0])
    }
    if not found:
        return False
    uses, outputs = graph.uses(), set(graph.output_names)
    turned = {name: node for name, node in found.items() if len(uses[name]) == 1 and name not in outputs}
    for node in turned.values():
        del transposes[node.output[0]]
    gone = {node.name for node in turned.values()}
    nodes: list[NodeProto] = []
    for node in graph.nodes:
        if node.op_type == "MatMul" and node.output[0] in turned:
            factors = [_transposed(graph, node, name, transposes, nodes) for name in reversed(node.input)]
            del node.input[:]
            node.input.extend(factors)
            node.output[0] = turned[node.output[0]].output[0]
        if node.name not in gone:
            nodes.append(node)
    graph.nodes = nodes
    return bool(turned)


def _transposed(
    graph: Graph, product: NodeProto, name: str, transposes: dict[str, NodeProto], nodes: list[NodeProto]
) -> str:
    """The name of a factor's transpose: what it is the transpose of, or the result of a node of its own."""
    if name in transposes:
        return transposes[name].input[0]
    result = graph.fresh(f"{product.name}/Transpose_out")
    shape = shape_of(graph.types[name])
    graph.types[result] = tensor_type(graph.types[name].tensor_type.elem_type, shape and shape[::-1])
    nodes.append(helper.make_node("Transpose", [name], [result], graph.fresh(f"{product.name}/Transpose"), perm=[1, 0]))
    nodes[-1].metadata_props.extend(product.metadata_props)
    return result


def _is_backward(node: NodeProto) -> bool:
    return any(entry.key == ROLE and entry.value == "backward" for entry in node.metadata_props)


def _is_wide(graph: Graph, name: str) -> bool:
    """Whether a matrix is known to have not many more rows than columns."""
    rows, columns = shape_of(graph.types.get(name)) or ("?", "?")
    return isinstance(rows, int) and isinstance(columns, int) and rows <= TALL * columns


def _is_matrix_transpose(graph: Graph, node: NodeProto) -> bool:
    if node.op_type != "Transpose" or not is_standard(node.domain):
        return False
    return len(shape_of(graph.types.get(node.input[0])) or ()) == 2 and [
        i for attribute in node.attribute for i in attribute.ints
    ] in ([], [1, 0])
