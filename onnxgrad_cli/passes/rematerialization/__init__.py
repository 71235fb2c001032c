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
