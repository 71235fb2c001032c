"""Quantization: an integer has no derivative, its scale has, and rounding is the identity to whoever asks for that.

The integers between QuantizeLinear and DequantizeLinear carry a float32 cotangent, per step: DequantizeLinear gives it
to them, and the straight-through estimator takes it on to what was quantized. With one scale for both, the sum is the
gradient of learned step sizes, as in PyTorch's fake quantization.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from onnxgrad_cli.autodiff.registry import refuse, rule

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.UINT2: (0, 3),
    TensorProto.INT2: (-2, 1),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767),
}
"""The least and the greatest value of each integer type, where QuantizeLinear saturates."""


@rule("DequantizeLinear", integers=True)
def dequantize_linear(op, g, y, x, scale, zero, *, axis, block_size, output_dtype):
    """y = (x - zero) scale, with one scale in all, for each index along `axis` or for each block of it."""
    g, form = op.cast(g, TensorProto.FLOAT), {"axis": axis, "block_size": block_size}
    gx = g * _spread(op, scale, x, **form) if op.wants(x) else None
    if not op.wants(scale):
        return gx, None, None
    steps = op.DequantizeLinear(x, op.cast(op.fill(1.0, scale), TensorProto.FLOAT), zero, **form)
    return gx, op.cast(_gathered(op, g * steps, scale, **form), scale), None


@rule(
    "QuantizeLinear",
    integers=True,
    kink="with --quantization ste or lsq the identity within the quantized range, and constant beyond it",
)
def quantize_linear(op, g, y, x, scale, zero, *, axis, block_size, saturate, output_dtype, precision):
    """y = saturate(round(x / scale) + zero), as if it were x / scale + zero where nothing is saturated.

    Source: Y. Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013; for the scale,
    S. Esser et al., Learned Step Size Quantization, 2020.
    """
    if not op.training.straight_through:
        no = op.no(
            "rounding to integers has no derivative", "pass `quantization='ste'` to use the straight-through estimator"
        )
        return no, no, None
    if y.dtype not in RANGES:
        no = op.no(f"no straight-through estimator is proven for {TensorProto.DataType.Name(y.dtype).lower()}")
        return no, no, None
    form = {"axis": axis, "block_size": block_size}
    step = _spread(op, scale, x, **form)
    steps = op.cast(x, TensorProto.FLOAT) / step
    whole = op.Round(steps)
    if zero is not None:
        whole = whole + _spread(op, zero, x, **form)
    least, greatest = RANGES[y.dtype]
    inside = op.And(whole >= float(least), whole <= float(greatest))
    gx = op.Where(inside, g / step, op.const(0.0, TensorProto.FLOAT))
    gscale = op.cast(_gathered(op, -gx * steps, scale, **form), scale) if op.wants(scale) else None
    return op.cast(gx, x), gscale, None


@rule(
    "DynamicQuantizeLinear", integers=True, kink="of the scale: equal extremes share evenly, and one that is 0 has none"
)
def dynamic_quantize_linear(op, gs, ys, x):
    """scale = (max(x, 0) - min(x, 0)) / 255; what is quantized with it is refused."""
    if gs[0] is not None:
        return op.no(
            "its scale and zero point follow the data, and rounding to integers has no derivative", STRAIGHT_THROUGH
        )

    def share(kind, beyond):
        extreme = op.reduce(kind, x, keepdims=False)
        chosen = op.cast(op.Equal(x, extreme), x)
        return op.Where(beyond(extreme), chosen / op.sum(chosen, keepdims=False), op.const(0.0, x))

    highest, lowest = share("ReduceMax", lambda x: x > 0.0), share("ReduceMin", lambda x: x < 0.0)
    return gs[1] / 255.0 * (highest - lowest)


def _spread(op, scale, x, axis, block_size):
    """A scale, or zero point, in float32, so that it broadcasts with `x`."""
    if block_size:
        ones = op.ConstantOfShape(op.shape(x), value=helper.make_tensor("one", TensorProto.INT8, [1], [1]))
        return op.DequantizeLinear(ones, op.cast(scale, TensorProto.FLOAT), None, axis=axis, block_size=block_size)
    wide = op.cast(scale, TensorProto.FLOAT)
    return wide if _is_single(scale) else op.unsqueeze(wide, range(1, x.rank - axis % x.rank))


def _gathered(op, values, scale, axis, block_size):
    """The sum of what shares a scale, in the shape of the scale."""
    if _is_single(scale):
        return op.reshape_like(op.sum(values, keepdims=False), scale)
    axis %= values.rank
    if not block_size:
        return op.sum(values, [i for i in range(values.rank) if i != axis], keepdims=False)
    sizes, count = [op.size(values, i) for i in range(values.rank)], op.size(scale, axis)
    missing = count * block_size - sizes[axis]
    if not (isinstance(missing, int) and missing == 0):
        values = op.Pad(values, op.vector([missing if i == axis + values.rank else 0 for i in range(2 * values.rank)]))
    blocks = op.reshape(values, [*sizes[:axis], count, block_size, *sizes[axis + 1 :]])
    return op.sum(blocks, [axis + 1], keepdims=False)


def _is_single(scale):
    """Whether there is one scale in all: a scalar, or as onnxruntime allows a vector of one."""
    return int(np.prod([size if isinstance(size, int) else 2 for size in scale.shape])) == 1


refuse(
    "BitCast",
    "the bits of a number have no derivative",
    "freeze the weights before it with `freeze`",
)
WITH_INTEGERS = "it computes with integers, which have no derivative"
STRAIGHT_THROUGH = "pass `quantization='ste'` to use the straight-through estimator, or start from the float model"
FROM_FLOATS = (
    "start from the float model, or from one with QuantizeLinear and DequantizeLinear around its float operators"
)
refuse("ConvInteger MatMulInteger QLinearConv QLinearMatMul", WITH_INTEGERS, STRAIGHT_THROUGH)
refuse(
    "DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulIntegerToFloat QAttention QEmbedLayerNormalization QGemm "
    "QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul "
    "QLinearSigmoid QLinearSoftmax QLinearWhere",
    WITH_INTEGERS,
    STRAIGHT_THROUGH,
    domain="com.microsoft",
)
refuse(
    "MatMulInteger16 NhwcMaxPool QLinearReduceMean",
    f"{WITH_INTEGERS}, in a form that onnxruntime does not run on the CPU, or that has no scale",
    FROM_FLOATS,
    domain="com.microsoft",
)
