"""Accumulate gradients over several runs, so that a step is the same as on one batch of all their samples.

Each run of the model takes one batch. The mean over the large batch is the weighted mean of the runs' means. The weight
of a run is the divisor of its mean. For losses that ignore labels, this is the number of the other labels. For losses
that weigh labels, it is the sum of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution, conflict
from onnxgrad_cli.options import StepOptions
from onnxgrad_cli.passes.optimizer.state import OptimizerState
from onnxgrad_cli.record import LossRecord


@dataclass(frozen=True)
class Gathered:
    """The accumulated gradients after a run.

    Attributes:
        totals: map from a weight (parameter) to the sum of its gradients, each multiplied by the weight of its run.
        count: the sum of the weights of all runs; None if it is the number of runs.
        due: a boolean value that is true in the last run before a step.
        after: map from a state to its value after this run.
    """

    totals: dict[str, Val]
    count: Val | None
    due: Val
    after: dict[str, Val]


def check_accumulation(options: StepOptions) -> None:
    """Refuse options with which accumulation gives a different result than one large batch.

    Raises:
        UsageError: such options are set.
    """
    if options.accumulate > 1 and options.reduction == "sum" and (options.l1 or options.l2):
        raise conflict(
            "`accumulate` can't be combined with `l1` or `l2` and `reduction='sum'`, because each batch would "
            "add the penalty again",
            "use `reduction='mean'`",
        )


def counted_by(options: StepOptions, training: LossRecord) -> str | None:
    """Return the name of the value that is the weight of a run in the mean over runs, or None if all weigh the same."""
    one = options.reduction == "mean" and len(options.losses) == 1
    return training.divisors.get(0) if one else None


def cautions(options: StepOptions, training: LossRecord) -> Iterator[Caution]:
    """Yield a caution if the accumulated gradient is only close to the gradient of one large batch."""
    asked = {name.rpartition(":")[2] for name in options.loss_options}
    uneven: list[str] = [name for name in ("class_weights", "ignore_index") if name in asked]
    uneven += [spec.name for spec in options.losses if spec.name == "causal-lm"]
    alike = counted_by(options, training) is None
    if options.accumulate > 1 and options.reduction == "mean" and uneven and alike:
        text = (
            f"`accumulate`: with several losses and {' and '.join(uneven)}, each batch divides by the weight of "
            "its own labels, but all batches count equally; the result only approximates that of one batch with "
            "all samples"
        )
        yield Caution("note", "`accumulate`", text)


def accumulate(
    op: Op, state: OptimizerState, gradients: Mapping[str, Val], runs: int, weight: Val | None = None
) -> Gathered:
    """Add this run's gradients to those of earlier runs; after a step, start again with this run's gradients.

    Args:
        op, state: the emitter and the state of the optimizer.
        gradients: map from a weight (parameter) to its gradient.
        runs: number of runs per step.
        weight: the weight of this run in the mean, a scalar; None if all runs weigh the same.
    """
    op.scope = "optimizer/accumulation"
    position = state.scalar(op, "accumulated", 0, TensorProto.INT64)
    first, now = op.Equal(position, op.const(0)), position + 1
    due = op.Equal(now, op.const(runs))
    totals, after, count = {}, {}, None
    if weight is not None:
        before = state.scalar(op, "counted", 0.0, weight.dtype)
        count = after[before.name] = op.Where(first, weight, before + weight)
    for name, gradient in gradients.items():
        gradient = gradient if weight is None else gradient * op.cast(weight, gradient)
        before = state.like_weight(op, name, "acc", 0.0, gradient.dtype)
        totals[name] = after[before.name] = op.Where(first, gradient, before + gradient)
    after[position.name] = op.Where(due, op.const(0), now)
    return Gathered(totals, count, due, after)
