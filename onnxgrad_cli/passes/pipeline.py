"""The passes, in the order in which they turn an inference model into a training model, and a function to run them.

A pass does one thing. The report includes a record of each pass that has run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnxgrad_cli.common.catalogue import Documented
from onnxgrad_cli.common.checks import conflicts
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.adapters import adapters_asked, add_adapters
from onnxgrad_cli.passes.backward import append_backward
from onnxgrad_cli.passes.cleanup import clean_up
from onnxgrad_cli.passes.declare_outputs import declare_outputs
from onnxgrad_cli.passes.gradient_op import append_gradient_node
from onnxgrad_cli.passes.identifiers import rename_to_identifiers
from onnxgrad_cli.passes.loss.append import append_losses
from onnxgrad_cli.passes.loss_scale import scale_loss
from onnxgrad_cli.passes.low_bit import restore_kernels
from onnxgrad_cli.passes.optimizer import append_optimizer, is_optimizer_asked
from onnxgrad_cli.passes.prepare.prepare import prepare
from onnxgrad_cli.passes.sequential_chunks import run_chunks_in_turn
from onnxgrad_cli.passes.target import rewrite_for_target
from onnxgrad_cli.passes.yield_op import mark_loss
from onnxgrad_cli.record import Training
from onnxgrad_cli.targets import STANDARD


def _recompute(graph: Graph, options: Options, training: Training) -> None:
    """With --recompute: compute values again in the backward part instead of storing them."""
    from onnxgrad_cli.passes.rematerialization.recompute import recompute  # few builds need this module

    recompute(graph, options, training)


def _always(options: Options) -> bool:
    return True


def _in_full(options: Options) -> bool:
    return not options.as_gradient_op


@dataclass(frozen=True)
class Pass(Documented):
    """A pass. The first line of its function's docstring describes it to users.

    Attributes:
        name: the name.
        function: `function(graph, options, training)` changes the graph and the record of the build.
        needs: the name of a pass that must run before it.
        is_asked: returns True if a build with these options runs the pass.
    """

    name: str
    function: Callable[[Graph, Options, Training], None]
    needs: str = ""
    is_asked: Callable[[Options], bool] = _always


PASSES = (
    Pass("prepare", prepare),
    Pass("adapters", add_adapters, "prepare", adapters_asked),
    Pass("loss", append_losses, "prepare"),
    Pass("yield", mark_loss, "loss", _in_full),
    Pass("backward", append_backward, "yield", _in_full),
    Pass("gradient", append_gradient_node, "loss", lambda options: options.as_gradient_op),
    Pass("loss-scale", scale_loss, "backward", lambda options: options.loss_scale is not None),
    Pass("recompute", _recompute, "backward", lambda options: options.recompute is not None),
    Pass("outputs", declare_outputs, "loss"),
    Pass("optimizer", append_optimizer, "outputs", is_optimizer_asked),
    Pass("few-bits", restore_kernels, "outputs", _in_full),
    Pass("in-turn", run_chunks_in_turn, "few-bits", _in_full),
    Pass("cleanup", clean_up, "outputs"),
    Pass("target", rewrite_for_target, "cleanup", lambda options: options.target != STANDARD),
    Pass("identifiers", rename_to_identifiers, "cleanup", lambda options: options.identifiers),
)
"""All passes of `onnxgrad build`, in the order in which they run.

The check (`verify`) runs after them, on the written model. With --as-gradient-op, the model is expanded before the
check.
"""

VERIFY = "verify"
SUMMARIES = {step.name: step.summary for step in PASSES} | {
    VERIFY: "Prove the training model: checker, runtime, equal results, finite differences of the loss."
}
"""Map from the name of each step of a build to its description, in order."""


def pipeline_for(options: Options) -> tuple[Pass, ...]:
    """Return the passes that a build with these options runs, in order.

    Raises:
        UsageError: a target conflicts with an option that allows only standard operators, or an option of adapters is
            set without `lora`.
    """
    if options.target != STANDARD:
        others = {"`as_gradient_op`": options.as_gradient_op, "`training_info`": options.training_info}
        conflicts(f"`target={options.target!r}`", others, "leave out one of them")
    return tuple(step for step in PASSES if step.is_asked(options))


class PassRecord(NamedTuple):
    """The record of a pass: its name, its duration, and the number of nodes before and after it."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


def run(
    passes: Sequence[Pass], graph: Graph, options: Options, training: Training, stop_after: str | None = None
) -> Iterator[tuple[Pass, PassRecord]]:
    """Run `passes` in order on `graph`, in place.

    Args:
        stop_after: the name of the last pass to run.

    Yields:
        Each pass that has run, with its record. The next pass runs when the next item is requested.

    Raises:
        OnnxgradError: a pass failed.
    """
    for step in passes:
        before, start = len(graph.nodes), time.perf_counter()
        step.function(graph, options, training)
        yield step, PassRecord(step.name, time.perf_counter() - start, before, len(graph.nodes))
        if step.name == stop_after:
            break
