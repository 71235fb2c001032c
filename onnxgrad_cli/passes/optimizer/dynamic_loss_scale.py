"""A loss scale that adapts: the scale shrinks after a step with infinite gradients, and grows after many good ones.

Source: P. Micikevicius et al., Mixed Precision Training, ICLR 2018; the numbers are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import total
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.options import StepOptions
from onnxgrad_cli.passes.optimizer.state import OptimizerState
from onnxgrad_cli.record import StepRecord

SCALE, GOOD = "loss_scale", "good_steps"
FIRST, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
"""GradScaler's: the scale of the first step, its growth after so many good steps, and what it shrinks by after a bad
one."""

LARGEST = 2.0**127
"""The largest power of two in float32."""


def are_finite(op: Op, gradients: Iterable[Val]) -> Val:
    """Whether no element is infinite or no number."""
    return total(op, "ReduceL1", *gradients) < np.inf


def first_scale(op: Op, options: StepOptions, training: StepRecord) -> Val:
    """A new state for the scale."""
    return OptimizerState(op.graph, options, training).scalar(op, SCALE, FIRST, TensorProto.FLOAT)


def scale_in(op: Op, state: OptimizerState, training: StepRecord) -> tuple[Val, Val]:
    """The states of a dynamic scale: the scale, and a new one for the good steps since it changed."""
    scale = next(name for name, slot in training.slots.items() if slot.kind == SCALE and not slot.of)
    return op.val(scale), state.scalar(op, GOOD, 0, TensorProto.INT64)


def adapted(op: Op, scale: Val, good_steps: Val, good: Val) -> dict[str, Val]:
    """What the scale and the count of good steps become after a step that was good or not.

    Args:
        scale, good_steps: the states.
        good: whether all gradients were finite.
    """
    count = good_steps + 1
    full = op.Equal(count, op.const(INTERVAL))
    grown = op.Where(full, op.Min(scale * GROWTH, op.const(LARGEST, scale)), scale)
    return {
        scale.name: op.Where(good, grown, scale * BACKOFF),
        good_steps.name: op.Where(op.And(good, op.Not(full)), count, op.const(0)),
    }
