"""Bounds of the gradients before a step: of the norm of all together, or of each element."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import norm
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.options import Options

EPS = 1e-6
"""Added to the norm that is divided by, as torch.nn.utils.clip_grad_norm_ does."""


def check_clipping(options: Options) -> None:
    """Refuse bounds that are none.

    Raises:
        UsageError: a bound is not above zero, or there are two.
    """
    for name, bound in (("--clip-norm", options.clip_norm), ("--clip-value", options.clip_value)):
        if bound is not None and not 0 < bound < float("inf"):
            raise UsageError(f"{name} must be above 0, not {bound}", "leave it out for no bound")
    if options.clip_norm is not None and options.clip_value is not None:
        raise UsageError("--clip-norm and --clip-value don't go together", "leave one of the two out")


def clipped(op: Op, gradients: Mapping[str, Val], options: Options) -> dict[str, Val]:
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
