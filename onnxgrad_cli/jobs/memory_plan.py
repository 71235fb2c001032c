"""How a training keeps to a limit of memory: what it computes again, and in how many runs it takes a step.

Nothing is chosen that changes what a step comes to, but for the rounding of sums. So samples of a batch are shared
among runs only where they are proven not to mix, and where the mean of the runs' means is that of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.derivatives.independence import sample_axes
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.optimizer.accumulation import cautions
from onnxgrad_cli.report.words import scaled
from onnxgrad_cli.training.steps.step_memory import StepMemory, step_memory

KINDS = (RecomputeSpec("elementwise"), RecomputeSpec("block", "auto"))
"""What can be computed again, the cheaper first."""

Build = Callable[[Options], TrainingModel]


@dataclass(frozen=True)
class Plan:
    """A way to take a step.

    Attributes:
        options: what is built.
        built: the training model.
        runs: how many runs a step takes, each on as large a part of the batch.
        memory: what a step takes at its peak.
    """

    options: Options
    built: TrainingModel
    runs: int
    memory: StepMemory

    def __str__(self) -> str:
        chosen = [f"`recompute={self.options.recompute}`"] if self.options.recompute else []
        chosen += [f"{self.runs} runs a step"] if self.runs > 1 else []
        return " and ".join(chosen) or "as it is"


def planned(
    build: Build, options: Options, limit: int, batch_size: int, threads: int | None, whole: str, tell: Tell
) -> Plan:
    """The first way to take a step within a limit, from the quickest to the slowest.

    Args:
        build: makes a training model.
        options: what is asked for; what they say of recomputation and accumulation is kept to.
        limit: the bytes that a step may take, beyond what the process and its data take.
        batch_size: the samples of a step.
        threads: see `Trainer`.
        whole: why a batch can't be shared among runs; "" where nothing is known against it.
        tell: takes what is narrated.

    Raises:
        UsageError: there is no such way, or a size is not known.
    """
    found: list[Plan] = []
    for plan in _ways(build, options, batch_size, threads, whole):
        if plan.memory.unknown:
            names = ", ".join(f"'{name}'" for name in plan.memory.unknown)
            raise UsageError(f"`memory`: nobody has told the size of {names}", "`dims` tells it: NAME=SIZE")
        found.append(plan)
        if plan.memory.peak <= limit:
            first = "" if len(found) == 1 else f"; as asked it would take {_size(found[0])}"
            tell(f"memory: a step takes about {_size(plan)} of {scaled(limit, 'B')}: {plan}{first}", 0)
            return plan
    raise _too_little(found, limit, whole or _mixing(found[0].built, options))


def _ways(build: Build, options: Options, batch_size: int, threads: int | None, whole: str) -> Iterator[Plan]:
    """Ways to take a step: as asked, with recomputation, then in ever more runs with what has saved most."""

    def way(options: Options, runs: int) -> Plan:
        built = build(options)
        return Plan(options, built, runs, step_memory(built, _sizes(built, batch_size // runs)))

    begun: list[Plan] = []
    for spec in (options.recompute, *(() if options.recompute else KINDS)):
        try:
            begun.append(way(replace(options, recompute=spec), 1))
        except UsageError:  # there are no layers that are alike
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
    """The sizes of the symbols that the first axes of inputs and labels have."""
    types = built.graph.types
    first = ((shape_of(types[name]) or ("",))[0] for name in describe(built.model).sampled)
    return {symbol: batch_size for symbol in first if isinstance(symbol, str)}


def _mixing(built: TrainingModel, options: Options) -> str:
    """Why the gradients of parts of a batch don't add up to those of the batch; "" where they do."""
    if not _sizes(built, 1):
        return "the model takes batches of one size"
    if any(cautions(replace(options, accumulate=2), built.training)):
        return "its labels weigh differently in a mean over several losses"
    try:
        sample_axes(built.graph, built.training.predictions)
    except UnsupportedError as error:
        return f"samples of a batch are not proven independent ({error.refusals[0].reason})"
    return ""


def _size(plan: Plan) -> str:
    return scaled(plan.memory.peak, "B")


def _too_little(found: list[Plan], limit: int, whole: str) -> UsageError:
    """What to say where no way fits."""
    least = min(found, key=lambda plan: plan.memory.peak)
    held, values = scaled(least.memory.held, "B"), scaled(least.memory.peak - least.memory.held, "B")
    text = f"`memory`: a step takes {_size(least)} at least, {least}, and {scaled(limit, 'B')} are allowed: "
    text += f"weights and state take {held}, a run {values}"
    hint = "train fewer weights, which changes what is learnt: `freeze=GLOB`, `train_last=N` or `lora=RANK`"
    return UsageError(text, f"{hint}; a batch is not shared among runs: {whole}" if whole else hint)
