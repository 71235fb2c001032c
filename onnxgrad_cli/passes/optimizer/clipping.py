"""Bounds of the gradients before a step: of the norm of all together, or of each element."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import norm
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.options import OptimizerOptions

EPS = 1e-6
"""Added to the norm that is divided by, as torch.nn.utils.clip_grad_norm_ does."""


def clipped(op: Op, gradients: Mapping[str, Val], options: OptimizerOptions) -> dict[str, Val]:
    """The gradients within the bounds.

    `clip_norm` multiplies all with min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_, `clip_value`
    clips each element, as torch.nn.utils.clip_grad_value_.
    """
    op.scope = "optimizer/clipping"
    if options.clip_value is not None:
        low, high = -options.clip_value, options.clip_value
        return {name: op.Clip(g, op.const(low, g), op.const(high, g)) for name, g in gradients.items()}
    if options.clip_norm is None:
        return dict(gradients)
    length = norm(op, *gradients.values())
    share = op.Min(options.clip_norm / (length + EPS), op.const(1.0, length))
    return {name: g * op.cast(share, g) for name, g in gradients.items()}
