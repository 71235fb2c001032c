"""What runs: a pipeline is a list of passes over one graph, and their records are in the report.

A pass states what it needs, does one thing, and tells the truth about what it changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options
from onnxgrad_cli.record import Training


class Pass(NamedTuple):
    """One step: `run(graph, options, training) -> changed`; `needs` names the passes that come before it."""

    name: str
    summary: str
    run: Callable[[Graph, Options, Training], bool]
    needs: tuple[str, ...] = ()


class PassRecord(NamedTuple):
    """What a pass did: how long it took, the nodes before and after, whether it changed the graph."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool


def run(
    passes: Sequence[Pass],
    graph: Graph,
    options: Options,
    training: Training,
    after: Callable[[Pass, Graph, PassRecord], None] | None = None,
    stop_after: str | None = None,
) -> list[PassRecord]:
    """Run `passes` in order on `graph`, in place, and return their records.

    Args:
        after: called after each pass, to write the model or to check it.
        stop_after: the name of the pass to end with.

    Raises:
        OnnxgradError: a pass failed, or its needs were not met.
    """
    records: list[PassRecord] = []
    for step in passes:
        missing = [name for name in step.needs if name not in {r.name for r in records}]
        if missing:
            raise OnnxgradError(f"pass '{step.name}' needs {', '.join(missing)} before it")
        before, start = len(graph.nodes), time.perf_counter()
        changed = step.run(graph, options, training)
        record = PassRecord(step.name, time.perf_counter() - start, before, len(graph.nodes), changed)
        records.append(record)
        if after:
            after(step, graph, record)
        if step.name == stop_after:
            break
    return records
