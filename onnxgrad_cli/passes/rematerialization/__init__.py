"""Rematerialization: forward values are recomputed in the backward part instead of being stored for it.

- `request`: what was asked for.
- `recompute`: what the pass does.
- `dataflow`: what the forward part hands to the backward part, in segments, and where it is first needed.
- `layers`: where the layers of a network end, by what repeats.
- `plan`: which values are stored and which recomputed: cheap ones, those between boundaries, or to keep a budget.
- `solver`: the plan with the fewest operations within a budget.
- `rewrite`: writes the copies, with control dependencies that keep runtimes from running them early.
"""

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import RematerializationOptions
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import Training

__all__ = ["RECOMPUTE"]


def _run(graph: Graph, options: RematerializationOptions, training: Training) -> bool:
    from onnxgrad_cli.passes.rematerialization.recompute import recompute  # which few builds need

    return recompute(graph, options, training)


RECOMPUTE = Pass(
    "recompute",
    "with --recompute: values computed again in the backward part instead of being kept",
    _run,
    ("backward",),
)
