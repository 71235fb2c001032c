"""Matrices that a model stores as integers, as products read them: dequantized, and perhaps transposed."""

from __future__ import annotations

from onnx import TensorProto

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph, is_generated
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import is_float, nbytes

PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})


def quantized_matrices(graph: Graph) -> dict[str, list[str]]:
    """The initializers of integers that products read -> the floats that are made of each, before any transpose.

    Whatever the nodes between are that dequantize, they read nothing but what is stored.
    """
    stored = stored_behind(graph)
    makers = graph.producers()
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        for name in node.input[:2] if node.op_type in PRODUCTS and is_standard(node.domain) else ():
            value = _before_views(makers, name)
            integers = stored.get(value, "") if value in makers else ""
            if integers and is_float(graph.types.get(value)) and value not in found.setdefault(integers, []):
                found[integers].append(value)
    return found


QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def is_transpose(node: Node) -> bool:
    """Whether a node exchanges the two axes of a matrix."""
    return node.op_type == "Transpose" and [list(a.ints) for a in node.attribute] in ([], [[1, 0]])


def stored_behind(graph: Graph, folded: bool = False) -> dict[str, str]:
    """Values that are made of initializers alone -> the largest of integers among these, "" where there is none.

    Args:
        graph: typed.
        folded: count the integers that this build has computed from stored ones, as their transpose.
    """
    fed = set(graph.input_names)
    sizes = {name: nbytes(tensor) for name, tensor in graph.initializers.items() if is_integer(tensor)}
    given = {name for name in sizes if not graph.added(name) or (folded and not is_generated(name))}
    behind = {name: name if name in given else "" for name in graph.initializers if name not in fed}
    for node in graph.nodes:
        names = reads(node)
        if all(name in behind for name in names):
            names = names[:1] if node.op_type in QUANTIZERS else names  # zero points are not weights
            largest = max((behind[name] for name in names), key=lambda name: sizes.get(name, -1), default="")
            behind.update((name, largest) for name in node.output)
    return behind


def is_integer(tensor: TensorProto) -> bool:
    """Whether a tensor holds integers, of any number of bits."""
    return "INT" in TensorProto.DataType.Name(tensor.data_type)


def _before_views(makers: dict[str, Node], name: str) -> str:
    while name in makers and (is_transpose(makers[name]) or makers[name].op_type == "Identity"):
        name = makers[name].input[0]
    return name
