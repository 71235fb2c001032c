"""Remove what nobody reads: backward nodes that a rule wrote for operands without takers."""

from __future__ import annotations

from onnxgrad_cli.graph import Graph
from onnxgrad_cli.pipeline import Options, Pass, Training


def _run(graph: Graph, options: Options, training: Training) -> bool:
    return graph.remove_unused() > 0


CLEANUP = Pass("cleanup", "nodes nobody reads removed", _run, ("outputs",))
