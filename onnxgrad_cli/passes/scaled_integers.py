"""Stored integers that Cast, Sub and Mul make floats of, as quantizers wrote before DequantizeLinear."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import NARROW, dtype_of, is_external

FIRST_OF_HALVES = 19
"""The opset from which DequantizeLinear gives float16 and bfloat16."""


def scaled_integers(graph: Graph) -> set[str]:
    """Return the stored integers that nodes scale as DequantizeLinear does."""
    uses, makers, kept = graph.uses(), graph.producers(), set(graph.output_names)
    chains = (scaling_chain(graph, cast, uses, kept) for cast in graph.nodes)
    return {chain[0].input[0] for chain in chains if chain and scale_of(graph, chain, makers)}


def scaling_chain(
    graph: Graph, cast: Node, uses: Mapping[str, list[tuple[Node, int]]], kept: Collection[str]
) -> list[Node]:
    """The Cast of stored integers, perhaps a Sub, and a Mul, each the only reader of the one before; else []."""
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


def scale_of(
    graph: Graph, chain: list[Node], makers: Mapping[str, Node]
) -> tuple[list[str], np.ndarray, np.ndarray, int] | None:
    """Return where scale and zero point of these nodes are stored, their values, and their axis, -1 for single numbers.

    None if DequantizeLinear does not compute the same.
    """
    cast, *between, mul = chain
    shift = [node for node in between if node.op_type == "Sub"]
    integers = graph.initializers[cast.input[0]]
    sources = [mul.input[1 - list(mul.input).index(chain[-2].output[0])], *(node.input[1] for node in shift)]
    sources = [_before_cast(makers, name) for name in sources]
    arrays = [_stored_array(graph, name) for name in sources]
    scale, zero = [*arrays, np.zeros(1, np.float32)][:2]
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


def _before_cast(makers: Mapping[str, Node], name: str) -> str:
    maker = makers.get(name)
    return maker.input[0] if maker is not None and maker.op_type == "Cast" else name


def _stored_array(graph: Graph, name: str) -> np.ndarray | None:
    """The values of an initializer in float32; None where they are out of reach."""
    tensor = graph.initializers.get(name)
    if tensor is None or name in graph.input_names or (is_external(tensor) and graph.path is None):
        return None
    return numpy_helper.to_array(tensor, str(graph.path.parent) if graph.path else "").astype(np.float32)
