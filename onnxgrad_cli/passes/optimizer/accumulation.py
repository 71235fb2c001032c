"""Gradients gathered over several runs, so that a step is taken as on a batch of all their samples.

The mean over that batch is the mean of the runs' means, each weighted by what it was divided by: of a loss that leaves
labels out or weighs them, this is the number of labels that count, or the sum of their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution, UsageError
from onnxgrad_cli.options import StepOptions
from onnxgrad_cli.passes.optimizer.state import OptimizerState
from onnxgrad_cli.record import LossRecord


@dataclass(frozen=True)
class Gathered:
    """What was gathered so far, this run's gradients included.

    Attributes:
        totals: weight -> the sum of its gradients, each times what its run counts.
        count: what all runs count; None where that is the number of runs.
        due: whether it is time for a step.
        after: state -> what it holds after this run.
    """

    totals: dict[str, Val]
    count: Val | None
    due: Val
    after: dict[str, Val]


def check_accumulation(options: StepOptions) -> None:
    """Refuse what is not the same on one large batch.

    Raises:
        UsageError: it is to be refused.
    """
    if options.accumulate > 1 and options.reduction == "sum" and (options.l1 or options.l2):
        raise UsageError(
            "`accumulate` does not go with `l1` or `l2` and `reduction='sum'`: the penalty would count at each run",
            "use `reduction='mean'`",
        )


def counted_by(options: StepOptions, training: LossRecord) -> str | None:
    """The value that tells what a run counts in the mean of several; None where all count alike."""
    one = options.reduction == "mean" and len(options.losses) == 1
    return training.divisors.get(0) if one else None


def cautions(options: StepOptions, training: LossRecord) -> Iterator[Caution]:
    """Where a mean over the batch is not the mean of the runs' means."""
    asked = {name.rpartition(":")[2] for name in options.loss_options}
    uneven: list[str] = [name for name in ("class_weights", "ignore_index") if name in asked]
    uneven += [spec.name for spec in options.losses if spec.name == "causal-lm"]
    alike = counted_by(options, training) is None
    if options.accumulate > 1 and options.reduction == "mean" and uneven and alike:
        text = (
            f"`accumulate`: with {' and '.join(uneven)} and several losses the mean of a run divides by what its "
            "labels weigh, and all runs count alike: nearly what one batch of all their samples gives"
        )
        yield Caution("note", "`accumulate`", text)


def accumulate(
    op: Op, state: OptimizerState, gradients: Mapping[str, Val], runs: int, weight: Val | None = None
) -> Gathered:
    """Add this run's gradients to those before them, or begin anew with them after a step.

    Args:
        op, state: where it is written.
        gradients: weight -> its gradient.
        runs: how many there are for a step.
        weight: what this run counts, a scalar; None where all count alike.
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
