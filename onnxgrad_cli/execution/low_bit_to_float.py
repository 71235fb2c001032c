"""Replace matrix products with low-bit weights by products of floats, because their kernels don't accept float64."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.ir.types import is_external


def write_out_few_bits(model: ModelProto) -> None:
    """Replace, in place, each MatMulNBits whose weight is stored in the model by a MatMul."""
    fed = {value.name for value in model.graph.input}
    stored = {t.name: t for t in model.graph.initializer if t.name not in fed and not is_external(t)}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        in_order = node.op_type == "MatMulNBits" and not any(node.input[4:5])
        if in_order and all(name in stored for name in filter(None, node.input[1:4])):
            nodes += _written_out(model, node, stored)
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _written_out(model: ModelProto, node: NodeProto, stored: dict[str, TensorProto]) -> list[NodeProto]:
    name, bias = f"{node.output[0]}_matrix", node.input[5] if len(node.input) > 5 else ""
    packed, scales, *zeros = (numpy_helper.to_array(stored[each]) for each in node.input[1:4] if each)
    given = {attribute.name: attribute.i for attribute in node.attribute}
    matrix = _matrix(packed, scales, *zeros, **given)
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(matrix.T), name))
    product = f"{node.output[0]}_product" if bias else node.output[0]
    nodes = [helper.make_node("MatMul", [node.input[0], name], [product], node.name)]
    return nodes + ([helper.make_node("Add", [product, bias], node.output)] if bias else [])


def _matrix(
    packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None, *,
    K: int, N: int, bits: int = 4, block_size: int = 128, **_: int,
) -> np.ndarray:  # fmt: skip
    """Return the dequantized weight [N, K] of a MatMulNBits in float64. The keywords are the operator's attributes."""
    blocks = -(-K // block_size)
    steps = unpacked(packed.reshape(N, -1), bits)
    if zeros is None:
        shift = np.full((N, blocks), 2 ** (bits - 1))
    else:
        shift = unpacked(zeros.reshape(N, -1), bits)[:, :blocks] if zeros.dtype == np.uint8 else zeros
    scale, zero = (each.reshape(N, blocks, 1).astype(np.float64) for each in (scales, shift))
    return ((steps.reshape(N, blocks, block_size) - zero) * scale).reshape(N, -1)[:, :K]


def unpacked(rows: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of `bits` bits that are packed in rows of bytes, beginning with the low bits of a byte."""
    numbers = (rows[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
    return numbers.reshape(len(rows), -1)
