"""Quantization: an integer has no derivative, its scale has."""

from __future__ import annotations

from onnxgrad_cli.registry import rule


@rule("DequantizeLinear")
def dequantize_linear(op, g, y, x, scale, zero, *, axis, block_size, output_dtype):
    """y = (x - zero) scale, with one scale in all or one for each index along `axis`."""
    if block_size:
        return None, op.no("one scale a block", "train other weights: --freeze its name"), None
    steps = op.cast(x, scale)
    if scale.rank == 0:
        steps = steps if zero is None else steps - op.cast(zero, scale)
        return None, op.sum(op.cast(g, scale) * steps, keepdims=False), None
    axis %= x.rank
    if zero is not None:
        steps = steps - op.unsqueeze(op.cast(zero, scale), list(range(1, x.rank - axis)))
    others = [i for i in range(x.rank) if i != axis]
    return None, op.sum(op.cast(g, scale) * steps, others, keepdims=False), None
