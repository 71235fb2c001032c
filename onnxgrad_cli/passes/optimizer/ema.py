"""The exponential moving average of the weights, which often judges better than the last of them."""

from __future__ import annotations

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.metadata import AVERAGE
from onnxgrad_cli.passes.optimizer.state import OptimizerState


def ema_after(op: Op, state: OptimizerState, name: str, weight: Val, step: Val, decay: float) -> dict[str, Val]:
    """The average of a weight after a step: decay times the one before plus (1 - decay) times the weight.

    The first one is the weight itself, as in torch.optim.swa_utils.AveragedModel.

    Args:
        name: of the weight before the step.
        weight: what it is after it.
        step: how many were taken before.
    """
    before = state.like_weight(op, name, AVERAGE, 0.0, weight.dtype)
    share = op.Where(op.Equal(step, op.const(0)), op.const(0.0, weight), op.const(decay, weight))
    return {before.name: share * before + (1 - share) * weight}
