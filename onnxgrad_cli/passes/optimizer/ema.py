"""The exponential moving average of the weights, which often judges better than the last of them."""

from __future__ import annotations

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import AVERAGE
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.state import States


def check_average(options: Options) -> None:
    """Refuse a share that is none.

    Raises:
        UsageError: it does not lie between 0 and 1.
    """
    if options.ema is not None and not 0 <= options.ema < 1:
        raise UsageError(f"--ema must be at least 0 and below 1, not {options.ema}", "such as 0.999")


def averaged(op: Op, states: States, name: str, weight: Val, step: Val, decay: float) -> dict[str, Val]:
    """The average of a weight after a step: decay times the one before plus (1 - decay) times the weight.

    The first one is the weight itself, as in torch.optim.swa_utils.AveragedModel.

    Args:
        name: of the weight before the step.
        weight: what it is after it.
        step: how many were taken before.
    """
    before = states.of(op, name, AVERAGE, 0.0, weight.dtype)
    share = op.Where(op.Equal(step, op.const(0)), op.const(0.0, weight), op.const(decay, weight))
    return {before.name: share * before + (1 - share) * weight}
