"""Rematerialization: forward values are recomputed in the backward part instead of being stored for it.

- `recompute`: the pass behind --recompute.
- `dataflow`: what the forward part hands to the backward part, in segments, and where it is first needed.
- `layers`: where the layers of a network end, by what repeats.
- `plan`: which values are stored and which recomputed: cheap ones, those between boundaries, or to keep a budget.
- `solver`: the plan with the fewest operations within a budget.
- `rewrite`: writes the copies, with control dependencies that keep runtimes from running them early.
"""

from onnxgrad_cli.passes.rematerialization.recompute import RECOMPUTE

__all__ = ["RECOMPUTE"]
