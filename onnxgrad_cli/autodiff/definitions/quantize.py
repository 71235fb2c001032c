"""onnxruntime's own QuantizeLinear and DequantizeLinear, which had 16-bit and 4-bit integers before the standard's."""

from __future__ import annotations

from onnxgrad_cli.autodiff.registry import definition


@definition("QuantizeLinear", domain="com.microsoft", needs_opset=21)
def quantize_linear(op, x, scale, zero=None, *, axis=1, block_size=0):
    """The standard operator, which needs opset 21 for such integers."""
    return op.QuantizeLinear(x, scale, zero, axis=axis, block_size=block_size or None)


@definition("DequantizeLinear", domain="com.microsoft", needs_opset=21)
def dequantize_linear(op, x, scale, zero=None, *, axis=1, block_size=0):
    """The standard operator, which needs opset 21 for such integers."""
    return op.DequantizeLinear(x, scale, zero, axis=axis, block_size=block_size or None)
