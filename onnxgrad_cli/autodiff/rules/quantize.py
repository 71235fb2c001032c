"""Rules of quantization. Scales have a derivative; if the user requests it, rounding has the gradient of the identity.

The integers between QuantizeLinear and DequantizeLinear have a float32 cotangent: the derivative with respect to the
integer, as if it were a float. The rule of DequantizeLinear computes this cotangent. The straight-through estimator of
QuantizeLinear passes it on to the float that was quantized. If both nodes read the same scale, the two cotangents of
the scale add up to the gradient of learned step size quantization (LSQ), as in PyTorch's fake quantization.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from onnxgrad_cli.autodiff.registry import refuse, rule
from onnxgrad_cli.emission.values import require
from onnxgrad_cli.ir.domains import MICROSOFT

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.UINT2: (0, 3), TensorProto.INT2: (-2, 1), TensorProto.UINT4: (0, 15), TensorProto.INT4: (-8, 7),
    TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127), TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767),
}  # fmt: skip
"""Map from an integer type to its smallest and largest value, at which QuantizeLinear saturates."""

SATURATED = "with --quantization ste or lsq, identity within the quantized range and constant outside"
EXTREMES = "with respect to the scale: equal extremes share evenly, and an extreme that is 0 gets none"


@rule("DequantizeLinear", integers=True)
def dequantize_linear(op, g, y, x, scale, zero, *, axis, block_size, output_dtype):
    """y = (x - zero) scale, with a single scale, one per index along `axis`, or one per block of indices."""
    g, form = op.cast(g, TensorProto.FLOAT), {"axis": axis, "block_size": block_size}
    gx = g * _spread(op, scale, x, **form) if op.wants(x) else None
    if not op.wants(scale):
        return gx, None, None
    steps = op.DequantizeLinear(x, op.cast(op.fill(1.0, scale), TensorProto.FLOAT), zero, **form)
    return gx, op.cast(_gathered(op, g * steps, scale, **form), scale), None


@rule("QuantizeLinear", integers=True, kink=SATURATED)
def quantize_linear(op, g, y, x, scale, zero, *, axis, block_size, saturate, output_dtype, precision):
    """y = saturate(round(x / scale) + zero), with the gradient of x / scale + zero for values that don't saturate.

    Source: Y. Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013; for the scale,
    S. Esser et al., Learned Step Size Quantization, 2020.
    """
    hint = "pass `quantization='ste'` to use the straight-through estimator"
    require(op.training.straight_through, "rounding to integers has no derivative", hint)
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


@rule("DynamicQuantizeLinear", integers=True, kink=EXTREMES)
def dynamic_quantize_linear(op, gs, ys, x):
    """The gradient of scale = (max(x, 0) - min(x, 0)) / 255. The gradient through the integers is refused."""
    reason = "its scale and zero point are computed from the data, and rounding to integers has no derivative"
    require(gs[0] is None, reason, STRAIGHT_THROUGH)

    def share(kind, beyond):
        extreme = op.reduce(kind, x, keepdims=False)
        chosen = op.cast(op.Equal(x, extreme), x)
        return op.Where(beyond(extreme), chosen / op.sum(chosen, keepdims=False), op.const(0.0, x))

    highest, lowest = share("ReduceMax", lambda x: x > 0.0), share("ReduceMin", lambda x: x < 0.0)
    return gs[1] / 255.0 * (highest - lowest)


def _spread(op, scale, x, axis, block_size):
    """Return a scale or zero point in float32, in a shape that broadcasts to `x`."""
    if block_size:
        ones = op.ConstantOfShape(op.shape(x), value=helper.make_tensor("one", TensorProto.INT8, [1], [1]))
        return op.DequantizeLinear(ones, op.cast(scale, TensorProto.FLOAT), None, axis=axis, block_size=block_size)
    wide = op.cast(scale, TensorProto.FLOAT)
    return wide if _is_single(scale) else op.unsqueeze(wide, range(1, x.rank - axis % x.rank))


def _gathered(op, values, scale, axis, block_size):
    """Sum the values that share a scale. Return the sums in the shape of `scale`."""
    if _is_single(scale):
        return op.reshape_like(op.sum(values, keepdims=False), scale)
    axis %= values.rank
    if not block_size:
        return op.sum(values, [i for i in range(values.rank) if i != axis], keepdims=False)
    sizes, count = op.sizes(values), op.size(scale, axis)
    missing = count * block_size - sizes[axis]
    if not (isinstance(missing, int) and missing == 0):
        values = op.Pad(values, op.vector([missing if i == axis + values.rank else 0 for i in range(2 * values.rank)]))
    blocks = op.reshape(values, [*sizes[:axis], count, block_size, *sizes[axis + 1 :]])
    return op.sum(blocks, [axis + 1], keepdims=False)


def _is_single(scale):
    """Return True if there is a single scale: a scalar, or a vector of one element, which onnxruntime allows."""
    return int(np.prod([size if isinstance(size, int) else 2 for size in scale.shape])) == 1


refuse("BitCast", "the bits of a number have no derivative", "freeze the weights before it with `freeze`")
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
    domain=MICROSOFT,
)
refuse(
    "MatMulInteger16 NhwcMaxPool QLinearReduceMean",
    f"{WITH_INTEGERS}; onnxruntime does not run this variant on the CPU, or the node has no scale",
    FROM_FLOATS,
    domain=MICROSOFT,
)
