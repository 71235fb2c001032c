"""Weights that a model stores as integers: what they are dequantized to, and how many there are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import NARROW, is_float, nbytes, shape_of
from onnxgrad_cli.passes.parameters.formulas import sample

PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})


def quantized_matrices(graph: Graph) -> dict[str, list[str]]:
    """The initializers of integers that products read -> the floats that are made of each, before any transpose.

    Whatever the nodes between are that dequantize, they read nothing but what is stored.
    """
    stored = _stored_behind(graph)
    makers = graph.producers()
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        for name in node.input[:2] if node.op_type in PRODUCTS and is_standard(node.domain) else ():
            value = _before_views(makers, name)
            integers = stored.get(value, "") if value in makers else ""
            if integers and is_float(graph.types.get(value)) and value not in found.setdefault(integers, []):
                found[integers].append(value)
    return found


class IntegerWeights(NamedTuple):
    """The weights that are stored as integers.

    Attributes:
        counts: the initializer -> how many parameters it holds, which may share bytes.
        dequantized: those in forms that can become floats with a quantizer behind them.
        matrices: those that products read.
    """

    counts: dict[str, int]
    dequantized: list[str]
    matrices: list[str]


def integer_weights(graph: Graph) -> IntegerWeights:
    """Find the initializers of integers that stand for weights, whatever reads them.

    These are integers of 8 bits at most that floats are made of, or that an operator reads as they are, and what
    DequantizeLinear reads. Tensors of two values are masks.
    """
    stored, matrices = _stored_behind(graph), quantized_matrices(graph)
    direct = {node.input[0] for node in graph.nodes if node.op_type == "DequantizeLinear"}
    known = direct | {node.input[0] for node in graph.nodes if node.op_type == "Cast"}
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if all(name in stored for name in node.output if name):
            continue
        for name in node.input:
            integers = stored.get(name, "")
            if integers and integers != name and is_float(graph.types.get(name)):
                sizes = [size for size in shape_of(graph.types[name]) or () if isinstance(size, int)]
                is_weight = integers in direct or graph.initializers[integers].data_type in NARROW
                counts[integers] = max(counts.get(integers, 0), math.prod(sizes) if is_weight else 0)
        read = [name for name in node.input if name == stored.get(name) and _is_narrow_matrix(graph, name)]
        for name in sorted(read, key=lambda name: -math.prod(graph.initializers[name].dims))[:1]:  # not its zero points
            counts[name] = max(counts.get(name, 0), math.prod(graph.initializers[name].dims))
            known |= set() if node.op_type == "Gather" or node.name in graph.unexpanded else {name}
    counts = {name: count for name, count in counts.items() if count and not _has_two_values(graph, name)}
    return IntegerWeights(
        counts, [name for name in counts if name in known], [name for name in counts if name in matrices]
    )


def _is_narrow_matrix(graph: Graph, name: str) -> bool:
    tensor = graph.initializers[name]
    return tensor.data_type in NARROW and len(tensor.dims) > 1


def _has_two_values(graph: Graph, name: str) -> bool:
    values = sample(graph.initializers[name], graph.path.parent if graph.path else None)
    return values is not None and len(np.unique(values)) <= 2


def is_transpose(node: Node) -> bool:
    """Whether a node exchanges the two axes of a matrix."""
    return node.op_type == "Transpose" and [list(a.ints) for a in node.attribute] in ([], [[1, 0]])


def _stored_behind(graph: Graph) -> dict[str, str]:
    """Values that are made of initializers alone -> the largest of integers among these, "" where there is none."""
    fed = set(graph.input_names)
    sizes = {name: nbytes(tensor) for name, tensor in graph.initializers.items() if is_integer(tensor)}
    behind = {
        name: name if name in sizes and not graph.added(name) else "" for name in graph.initializers if name not in fed
    }
    for node in graph.nodes:
        names = reads(node)
        if all(name in behind for name in names):
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
