"""Floats that DequantizeLinear makes of what is stored, made anew for each product when its other factor has come.

So one matrix at a time is in memory as floats. It also keeps onnxruntime from writing a product with floats that
nobody else reads as one of few bits, whose kernel rounds the other factor unless a session's settings forbid it.
"""

from __future__ import annotations

from onnx import NodeProto, helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.passes.control import zero_after


def late_floats(op: Op, dequantizer: NodeProto, after: Val) -> Val:
    """What a DequantizeLinear gives, when `after` has come: its scale goes through a control dependency."""
    integers, scale, *zero_point = (op.val(name) if name else None for name in dequantizer.input)
    assert scale is not None
    sizes, zero = [int(size) for size in scale.shape], zero_after(op, [after])
    nothing = op.Slice(op.ints([1]), op.ints([0]), op.reshape(zero, [1]))
    late = op.Reshape(scale, op.ints(sizes) + zero if sizes else nothing, shape=sizes)
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in dequantizer.attribute}
    return op.DequantizeLinear(integers, late, *zero_point, **attributes)


def times_transposed(op: Op, x: Val, floats: Val) -> Val:
    """X Wᵀ for such floats, without a node that transposes them: onnxruntime would move what dequantizes behind it."""
    rows = op.reshape(x, [-1, x.shape[-1] if isinstance(x.shape[-1], int) else op.dim(x, -1)]) if x.rank > 2 else x
    y = op.Gemm(rows, floats, transB=1)
    if x.rank == 2:
        return y
    lead = [op.size(x, axis) for axis in range(x.rank - 1)]
    return op.Reshape(y, op.vector([*lead, op.size(floats, 0)]), shape=[*x.shape[:-1], floats.shape[0]])
