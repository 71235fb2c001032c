"""Run passes over a graph. A pipeline is a list of passes, and the report includes their records.

A pass names the passes that must have run before it, does one thing, and returns True if it changed the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options
from onnxgrad_cli.record import Training


class Pass(NamedTuple):
    """A pass: `run(graph, options, training)` returns True if it changed the graph; `needs` names earlier passes."""

    name: str
    summary: str
    run: Callable[[Graph, Options, Training], bool]
    needs: tuple[str, ...] = ()


class PassRecord(NamedTuple):
    """The record of a pass: its duration, the number of nodes before and after, and True if it changed the graph."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool


def run(
    passes: Sequence[Pass], graph: Graph, options: Options, training: Training, stop_after: str | None = None
) -> Iterator[tuple[Pass, PassRecord]]:
    """Run `passes` in order on `graph`, in place.

    Args:
        stop_after: the name of the last pass to run.

    Yields:
        Each pass that has run, with its record. The next pass runs when the next item is requested.

    Raises:
        OnnxgradError: a pass failed, or a pass that it needs did not run before it.
    """
    done: set[str] = set()
    for step in passes:
        missing = [name for name in step.needs if name not in done]
        if missing:
            raise OnnxgradError(f"pass '{step.name}' needs {', '.join(missing)} before it")
        before, start = len(graph.nodes), time.perf_counter()
        changed = step.run(graph, options, training)
        done.add(step.name)
        yield step, PassRecord(step.name, time.perf_counter() - start, before, len(graph.nodes), changed)
        if step.name == stop_after:
            break
