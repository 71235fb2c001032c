"""Nodes that unpack low-bit integers from bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require


def unpacked(op: Op, packed: Val, bits: int, dims: Sequence[int | Val], kept: int | None = None) -> Val:
    """Unpack bytes into values of `bits` bits as uint8, with the low bits first.

    Args:
        op: the emitter.
        packed: the bytes.
        bits: the number of bits of a value: 2, 4 or 8.
        dims: the shape of all values.
        kept: the number of values to keep on the last axis; None keeps all.
    """
    require(bits in (2, 4, 8), f"its weight has {bits} bits")
    values = op.unsqueeze(packed, [packed.rank])
    if bits < 8:
        up = op.const(np.arange(8 - bits, -1, -bits), TensorProto.UINT8)  # these shifts remove the higher bits
        values = op.BitShift(op.BitShift(values, up, direction="LEFT"), op.const(8 - bits, up), direction="RIGHT")
    values = op.reshape(values, dims)
    if kept is None:
        return values
    shape = (*values.shape[:-1], kept)
    return op.Slice(values, op.ints([0]), op.ints([kept]), op.ints([values.rank - 1]), shape=shape)
