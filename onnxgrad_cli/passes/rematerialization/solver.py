"""Find the recomputation with the fewest operations within a memory budget, by integer programming.

P. Jain et al., Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020, arXiv:1910.02653,
choose the values in memory at every step of a run, which takes an unknown for each pair of nodes. Here, every value is
either stored from the forward part on, or recomputed once, before its first use, as `rewrite` does. So there are only
two unknowns for each node, and networks of thousands of nodes are solved in seconds. The solver is HiGHS in scipy (Q.
Huangfu, J. A. J. Hall, Parallelizing the dual revised simplex method, Mathematical Programming Computation 10, 2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.flops import node_flops
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.passes.rematerialization.plan import Plan, computed, flops_of, size_of

SECONDS = 20.0
"""Time limit of the solver in seconds. The best plan found until then is used, if it beats the heuristic plan."""

GAP = 1e-3
"""The solver stops when a plan's number of operations is at most this fraction above the lower bound."""

Terms = dict[int, float]


@dataclass
class IntegerProgram:
    """An integer program: unknowns that are 0 or 1, and constraints (rows): a weighted sum is at least a number.

    Attributes:
        cost: for each unknown, the amount added to the total cost if the unknown is 1.
        fixed: map from an unknown whose value is prescribed to the value.
        rows: for each constraint, a map from unknowns to their coefficients, and the lower bound of the sum.
    """

    cost: list[float] = field(default_factory=list)
    fixed: dict[int, int] = field(default_factory=dict)
    rows: list[tuple[Terms, float]] = field(default_factory=list)

    def unknown(self, cost: float = 0.0) -> int:
        """Add an unknown and return its index."""
        self.cost.append(cost)
        return len(self.cost) - 1

    def solved(self, more: list[tuple[Terms, float]], cost: np.ndarray) -> np.ndarray | None:
        """Return the cheapest values of the unknowns, or None if there is no solution or none was found in time."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows = [*self.rows, *more]
        entries = [(i, unknown, factor) for i, (terms, _) in enumerate(rows) for unknown, factor in terms.items()]
        at, unknowns, factors = zip(*entries, strict=True)
        # scipy 1.13 hands the indices to HiGHS as they are, and HiGHS reads 32 bits.
        indices = np.array(at, np.int32), np.array(unknowns, np.int32)
        sums = coo_array((np.array(factors, float), indices), shape=(len(rows), len(cost))).tocsr()
        low, high = np.zeros(len(cost)), np.ones(len(cost))
        for unknown, value in self.fixed.items():
            low[unknown] = high[unknown] = value
        found = milp(
            cost / (cost.max() or 1.0),
            integrality=np.ones(len(cost)),
            bounds=Bounds(low, high),
            constraints=LinearConstraint(sums, np.array([least for _, least in rows]), np.inf),
            options={"time_limit": SECONDS, "mip_rel_gap": GAP},
        )
        return None if found.x is None else found.x > 0.5


def plan_optimal(heuristic: Plan, budget: int, sizes: Facts, total: int) -> Plan:
    """Return the plan with the fewest operations that stores at most `budget` bytes.

    If the budget can't be reached, the plan stores as few bytes as possible.

    Args:
        heuristic: the plan of `plan_budget`, which is returned if the solver finds no better one.
        budget, sizes, total: as for `plan_budget`.

    Raises:
        UsageError: the solver is not installed.
    """
    load_package("scipy.optimize", "`recompute=optimal`", f"`recompute=budget:{budget}`, which plans without scipy")
    plan = Plan(heuristic.flow)
    everything = sum(size_of(root, sizes) for root in plan.groups)
    if total <= budget or not plan.groups:
        return plan
    program, kept = _program(plan, sizes)
    weight = {unknown: size_of(root, sizes) for root, unknown in kept.items()}
    allowed = budget - (total - everything)
    fewest, cost = np.zeros(len(program.cost)), np.array(program.cost)
    fewest[list(weight)] = list(weight.values())
    found = program.solved([_at_most(weight, allowed)], cost)
    if found is None:
        least = program.solved([], fewest)
        if least is None:
            return heuristic
        found = program.solved([_at_most(weight, float(fewest @ least))], cost)
    if found is None:
        return heuristic
    plan.stored = {root for root, unknown in kept.items() if found[unknown]}
    return min(heuristic, plan, key=lambda each: _price(each, sizes, allowed))


def _price(plan: Plan, sizes: Facts, allowed: int) -> tuple[int, float]:
    """Return the bytes that a plan stores above the allowed number, and the operations that it adds."""
    again = plan.recomputation(plan.recomputed)
    stored = sum(size_of(root, sizes) for root in plan.stored)
    return max(stored - allowed, 0), inf if again is None else flops_of(again, sizes)


def _program(plan: Plan, sizes: Facts) -> tuple[IntegerProgram, dict[str, int]]:
    """Return the integer program for a plan, and a map: value that is not a view -> unknown that is 1 if it is stored.

    A node that runs again reads stored values, or values of its own segment whose nodes run again too.
    """
    flow, program = plan.flow, IntegerProgram()
    forward = [node for node in flow.forward if any(not flow.is_resident(name) for name in node.output if name)]
    runs = {name: unknown for node in forward for unknown in [_runs_again(program, plan, node, sizes)]
            for name in node.output if name}  # fmt: skip
    kept: dict[str, int] = {}
    for name in runs:
        if (root := flow.storage(name)) not in kept and not flow.is_resident(root):
            kept[root] = program.unknown()
    must_store = plan.must_store
    program.fixed.update((kept[root], 1) for root in plan.groups if root in must_store or not size_of(root, sizes))
    for root, names in plan.groups.items():
        program.rows += [({kept[root]: 1.0, runs[name]: 1.0}, 1.0) for name in names]
    for node in forward:
        again = runs[next(filter(None, node.output))]
        for name in dict.fromkeys(computed(flow, node)):
            row = {kept[flow.storage(name)]: 1.0, again: -1.0}
            if flow.segments[name] == flow.segments[next(filter(None, node.output))]:
                row[runs[name]] = 1.0
            program.rows.append((row, 0.0))
    return program, kept


def _runs_again(program: IntegerProgram, plan: Plan, node: Node, sizes: Facts) -> int:
    """Add an unknown that is 1 if a node runs again, and return its index.

    Each node costs one operation more than it has, so that nodes without operations are not recomputed needlessly.
    """
    try:
        unknown = program.unknown(1.0 + node_flops(node, sizes))
    except LookupError:
        unknown = program.unknown()
        program.fixed[unknown] = 0
    if not plan.can_run_twice(node):
        program.fixed[unknown] = 0
    return unknown


def _at_most(weight: dict[int, int], most: float) -> tuple[Terms, float]:
    """Return the constraint that a weighted sum is at most `most`, scaled so that the largest weight is 1."""
    unit = max(max(weight.values()), 1)
    return {unknown: -size / unit for unknown, size in weight.items() if size}, -most / unit
