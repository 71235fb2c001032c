"""Keep a training within a memory limit, by recomputing activations and by splitting a step into several runs.

Neither changes the result of a step, except for the rounding of sums. For this reason a batch is split only if its
samples provably don't affect each other, and if the mean over the runs equals the mean over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.derivatives.sample_gradients import sample_axes
from onnxgrad_cli.errors import UnsupportedError, UsageError, missing_value, wrong_value
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.optimizer.accumulation import cautions
from onnxgrad_cli.report.formatting import scaled
from onnxgrad_cli.training.steps.step_memory import StepMemory, step_memory

KINDS = (RecomputeSpec("elementwise"), RecomputeSpec("block", "auto"))
"""The kinds of recomputation that are tried, the cheapest first."""

Build = Callable[[Options], TrainingModel]


@dataclass(frozen=True)
class StepPlan:
    """A plan for the training step: the options of its model, and the number of runs.

    Attributes:
        options: the options of the training model.
        built: the training model.
        runs: the number of runs per step. Each run gets an equal part of the batch.
        memory: the peak memory of a step.
    """

    options: Options
    built: TrainingModel
    runs: int
    memory: StepMemory

    def __str__(self) -> str:
        chosen = [f"`recompute={self.options.recompute}`"] if self.options.recompute else []
        chosen += [f"{self.runs} runs per step"] if self.runs > 1 else []
        return " and ".join(chosen) or "no recomputation"


def planned(
    build: Build, options: Options, limit: int, batch_size: int, threads: int | None, whole: str, tell: Tell
) -> StepPlan:
    """Return the fastest plan for a step that stays within a memory limit.

    Args:
        build: builds a training model.
        options: the user's options. If they set recomputation or accumulation, it is not changed.
        limit: the bytes that a step may use, in addition to the memory of the process and its data.
        batch_size: the number of samples per step.
        threads: see `Trainer`.
        whole: a known reason why a batch can't be split into several runs; "" if none is known.
        tell: receives progress messages.

    Raises:
        UsageError: no plan stays within the limit, or a size is unknown.
    """
    found: list[StepPlan] = []
    for plan in _ways(build, options, batch_size, threads, whole):
        if plan.memory.unknown:
            names = ", ".join(f"'{name}'" for name in plan.memory.unknown)
            raise missing_value(f"`memory`: the size of {names} is unknown", "set it with `dims`: NAME=SIZE")
        found.append(plan)
        if plan.memory.peak <= limit:
            first = "" if len(found) == 1 else f"; with the given options it would take {_size(found[0])}"
            tell(f"memory: a step takes about {_size(plan)} of the allowed {scaled(limit, 'B')} with {plan}{first}", 0)
            return plan
    raise _too_little(found, limit, whole or _mixing(found[0].built, options))


def _ways(build: Build, options: Options, batch_size: int, threads: int | None, whole: str) -> Iterator[StepPlan]:
    """Yield plans, the fastest first.

    The first plan uses the given options, and the next ones add each of `KINDS`. The last ones split the step of the
    plan with the least memory into 2, 4, 8 and more runs.
    """

    def way(options: Options, runs: int) -> StepPlan:
        built = build(options)
        return StepPlan(options, built, runs, step_memory(built, _sizes(built, batch_size // runs), threads))

    begun: list[StepPlan] = []
    for spec in (options.recompute, *(() if options.recompute else KINDS)):
        try:
            begun.append(way(replace(options, recompute=spec), 1))
        except UsageError:  # the model has no repeated layers
            if spec is options.recompute:
                raise
            continue
        yield begun[-1]
    best = min(begun, key=lambda plan: plan.memory.peak)
    if whole or options.accumulate > 1 or _mixing(best.built, options):
        return
    runs = 2
    while batch_size % runs == 0:
        yield way(replace(best.options, accumulate=runs), runs)
        runs *= 2


def _sizes(built: TrainingModel, batch_size: int) -> Mapping[str, int]:
    """Return a map: symbol on the first axis of an input or label -> the batch size."""
    types = built.graph.types
    first = ((shape_of(types[name]) or ("",))[0] for name in describe(built.model).sampled)
    return {symbol: batch_size for symbol in first if isinstance(symbol, str)}


def _mixing(built: TrainingModel, options: Options) -> str:
    """Return the reason why the gradients of parts of a batch don't add up to that of the batch; "" if they do."""
    if not _sizes(built, 1):
        return "the model has a fixed batch size"
    if any(cautions(replace(options, accumulate=2), built.training)):
        return "its labels weigh differently in a mean over several losses"
    if built.training.scalars or built.training.mixing:
        return next(iter(built.training.mixing.values()), "the loss is one number for a batch")
    try:
        sample_axes(built.graph, built.training.predictions)
    except UnsupportedError as error:
        return f"samples of a batch are not proven independent ({error.refusals[0].reason})"
    return ""


def _size(plan: StepPlan) -> str:
    return scaled(plan.memory.peak, "B")


def _too_little(found: list[StepPlan], limit: int, whole: str) -> UsageError:
    """Return the error that no plan stays within the limit."""
    least = min(found, key=lambda plan: plan.memory.peak)
    held, values = scaled(least.memory.held, "B"), scaled(least.memory.peak - least.memory.held, "B")
    text = f"`memory`: a step takes at least {_size(least)} (with {least}), but only {scaled(limit, 'B')} are allowed; "
    text += f"weights and state take {held}, each run takes {values}"
    hint = "train fewer weights, which changes what is learnt: `freeze=GLOB`, `train_last=N` or `lora=RANK`"
    return wrong_value(text, f"{hint}; a step can't be split into several runs: {whole}" if whole else hint)
