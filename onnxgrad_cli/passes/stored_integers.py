"""Find weights that a model stores as integers, for integer matrix products or for Cast, Sub and Mul.

Before DequantizeLinear existed, quantization tools wrote Cast, Sub and Mul instead.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph, is_generated
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import reads
from onnxgrad_cli.ir.types import NARROW, dtype_of, is_external, is_float, nbytes

Uses = Mapping[str, list[tuple[Node, int]]]
"""Map from a value to its readers, as (node, input position)."""

Makers = Mapping[str, Node]
"""Map from a value to the node that computes it."""

PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})


def quantized_matrices(graph: Graph) -> dict[str, list[str]]:
    """Return a map: integer initializer that products read -> the float values computed from it, before any transpose.

    The initializers may be dequantized by any nodes all of whose operands are stored.
    """
    stored = stored_behind(graph)
    makers = graph.producers()
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        for name in node.input[:2] if node.op_type in PRODUCTS and is_standard(node.domain) else ():
            value, _ = before_views(makers, name)
            integers = stored.get(value, "") if value in makers else ""
            if integers and is_float(graph.types.get(value)) and value not in found.setdefault(integers, []):
                found[integers].append(value)
    return found


QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def is_transpose(node: Node) -> bool:
    """Return True if a node exchanges the two axes of a matrix."""
    return node.op_type == "Transpose" and [list(a.ints) for a in node.attribute] in ([], [[1, 0]])


def stored_behind(graph: Graph, folded: bool = False) -> dict[str, str]:
    """Return a map: value computed only from initializers -> the largest integer initializer among these, or "".

    Args:
        graph: the graph, with inferred types.
        folded: True to also count integers that this build computed from stored integers, such as a transpose.
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
    """Return True if a tensor holds integers, of any number of bits."""
    return "INT" in TensorProto.DataType.Name(tensor.data_type)


def before_views(makers: Makers, name: str, known: Container[str] = ()) -> tuple[str, bool]:
    """Return the matrix that a value is a view of, and True if the value is its transpose.

    The search ends at values in `known`.
    """
    turned = False
    while name not in known and (maker := makers.get(name)) and (is_transpose(maker) or maker.op_type == "Identity"):
        turned ^= maker.op_type == "Transpose"
        name = maker.input[0]
    return name, turned


FIRST_OF_HALVES = 19
"""The first opset at which DequantizeLinear can return float16 and bfloat16."""


def scaled_integers(graph: Graph) -> set[str]:
    """Return the integer initializers that Cast, Sub and Mul dequantize as a DequantizeLinear would."""
    uses, makers, kept = graph.uses(), graph.producers(), set(graph.output_names)
    chains = (scaling_chain(graph, cast, uses, kept) for cast in graph.nodes)
    return {chain[0].input[0] for chain in chains if chain and scale_of(graph, chain, makers)}


def scaling_chain(graph: Graph, cast: Node, uses: Uses, kept: Collection[str]) -> list[Node]:
    """Return the nodes Cast, (Sub,) Mul that dequantize stored integers, beginning with `cast`; [] if there are none.

    Args:
        graph: the graph, with inferred types.
        cast: any node.
        uses: the readers of each value.
        kept: the outputs of the model. A value between the nodes must have no other reader, so it may not be an output.
    """
    stored = graph.initializers.get(cast.input[0] if cast.op_type == "Cast" else "")
    if stored is None or stored.data_type not in NARROW or cast.input[0] in graph.input_names:
        return []
    chain = [cast]
    while chain[-1].op_type != "Mul":
        value = chain[-1].output[0]
        readers = uses.get(value, [])
        node, at = readers[0] if len(readers) == 1 and value not in kept else (cast, -1)
        shifted = any(each.op_type == "Sub" for each in chain)
        if node.op_type not in ("Identity", "Mul") and not (node.op_type == "Sub" and at == 0 and not shifted):
            return []
        chain.append(node)
    return chain


Scaling = tuple[list[str], np.ndarray, np.ndarray, int]
"""The names of a scale and a zero point, the scale, the zero point, and the axis along which they vary."""


def scale_of(graph: Graph, chain: list[Node], makers: Makers) -> Scaling | None:
    """Return (names of scale and zero point, scale, zero point, axis) for a chain of `scaling_chain`.

    The axis is -1 if there is a single scale and zero point. If DequantizeLinear can't compute the same, return None.
    """
    cast, *between, mul = chain
    shift = [node for node in between if node.op_type == "Sub"]
    integers = graph.initializers[cast.input[0]]
    sources = [mul.input[1 - list(mul.input).index(chain[-2].output[0])], *(node.input[1] for node in shift)]
    casts = [makers.get(name) for name in sources]
    sources = [c.input[0] if c and c.op_type == "Cast" else name for c, name in zip(casts, sources, strict=True)]
    arrays = [None if name in graph.input_names else stored_array(graph, name) for name in sources]
    scale, zero = [None if x is None else x.astype(np.float32) for x in [*arrays, np.zeros(1)][:2]]
    float_type = dtype_of(graph.types.get(cast.output[0]))
    if scale is None or zero is None or (float_type != TensorProto.FLOAT and (graph.opset() or 0) < FIRST_OF_HALVES):
        return None
    rank = len(integers.dims)
    axes = {axis for x in (scale, zero) for axis, size in enumerate(x.shape, rank - x.ndim) if size > 1}
    axis = min(axes, default=-1)
    dtype = helper.tensor_dtype_to_np_dtype(integers.data_type)
    whole = bool(np.all(zero.astype(dtype).astype(zero.dtype) == zero))
    if len(axes) > 1 or axis < -1 or not whole or not bool(np.all(scale > 0)) or max(scale.ndim, zero.ndim) > rank:
        return None
    return sources, scale, zero, axis


def stored_array(graph: Graph, name: str) -> np.ndarray | None:
    """Return the values of an initializer, or None if they can't be read."""
    tensor = graph.initializers.get(name)
    if tensor is None or (is_external(tensor) and graph.path is None):
        return None
    return numpy_helper.to_array(tensor, str(graph.path.parent) if graph.path else "")


def spread(values: np.ndarray, shape: Sequence[int], axis: int = 1, block_size: int = 0) -> np.ndarray:
    """Reshape or repeat scales or zero points so that they broadcast with the quantized tensor.

    Args:
        values: the scales or zero points.
        shape: the shape of the quantized tensor.
        axis: the axis along which the values vary.
        block_size: the number of consecutive indices that share a value; 0 if each index has its own.
    """
    if values.size == 1:
        return values.reshape(())
    if block_size:
        return np.repeat(values, block_size, axis).take(range(shape[axis]), axis)
    return values.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
