"""Rematerialization: recompute forward values in the backward part instead of storing them.

- `recompute`: parses the request and runs the pass.
- `dataflow`: cuts the forward part into segments, and finds which forward values the backward part reads and where it
  first needs them.
- `layers`: finds the layers of a network, which repeat the same sequence of operators.
- `plan`: chooses the values that are recomputed: cheap ones, those between boundaries, or enough values to meet a
  memory budget.
- `solver`: finds the plan with the fewest operations within a budget.
- `rewrite`: writes the copies, with control dependencies that keep runtimes from running them early.
"""

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import RematerializationOptions
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import Training

__all__ = ["RECOMPUTE"]


def _run(graph: Graph, options: RematerializationOptions, training: Training) -> bool:
    from onnxgrad_cli.passes.rematerialization.recompute import recompute  # few builds need this module

    return recompute(graph, options, training)


RECOMPUTE = Pass(
    "recompute",
    "with --recompute: computes values again in the backward part instead of storing them",
    _run,
    ("backward",),
)
