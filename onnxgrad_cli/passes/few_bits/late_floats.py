"""Floats that DequantizeLinear makes of what is stored, made anew for each product when its other factor has come.

So one matrix at a time is in memory as floats. It also keeps onnxruntime from writing a product with floats that
nobody else reads as one of few bits, whose kernel rounds the other factor unless a session's settings forbid it.
"""

from __future__ import annotations

from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.passes.control import zero_after

NARROW = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})
"""Types that onnxruntime's Reshape knows at the newest opsets only."""


def late_floats(op: Op, dequantizer: Node, after: Val) -> Val:
    """What a DequantizeLinear gives, when `after` has come: the integers, or their scale, wait for it.

    Not the scale where it need not be: onnxruntime may write stored int8 as uint8, and can't for two readers.
    """
    integers, scale, *zero_point = (op.val(name) if name else None for name in dequantizer.input)
    assert integers is not None and scale is not None
    zero = zero_after(op, [after])
    if integers.dtype in NARROW:
        scale = _late(op, scale, zero)
    else:
        integers = _late(op, integers, zero)
    return op.DequantizeLinear(integers, scale, *zero_point, **attributes_of(dequantizer))


def _late(op: Op, x: Val, zero: Val) -> Val:
    """Something stored, which waits for a 0."""
    sizes = [int(size) for size in x.shape]
    shape = op.ints(sizes) + zero if sizes else op.Slice(op.ints([1]), op.ints([0]), op.reshape(zero, [1]))
    return op.Reshape(x, shape, shape=sizes)


def times_transposed(op: Op, x: Val, floats: Val) -> Val:
    """X Wᵀ for such floats, without a node that transposes them: onnxruntime would move what dequantizes behind it."""
    rows = op.reshape(x, [-1, x.shape[-1] if isinstance(x.shape[-1], int) else op.dim(x, -1)]) if x.rank > 2 else x
    y = op.Gemm(rows, floats, transB=1)
    if x.rank == 2:
        return y
    lead = [op.size(x, axis) for axis in range(x.rank - 1)]
    return op.Reshape(y, op.vector([*lead, op.size(floats, 0)]), shape=[*x.shape[:-1], floats.shape[0]])
