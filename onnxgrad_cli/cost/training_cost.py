"""All that the report tells of what a run of a training model costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnxgrad_cli.cost.facts import Facts, Sizes, known_bytes, known_sizes
from onnxgrad_cli.cost.liveness import course_of_memory
from onnxgrad_cli.cost.modules import ModuleCost, by_module
from onnxgrad_cli.cost.operations import operations_by_part
from onnxgrad_cli.cost.steps import FORWARD, Step, steps_of
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import CONTROL_FLOW, with_bodies
from onnxgrad_cli.ir.types import nbytes
from onnxgrad_cli.record import StepRecord, parts

LARGEST = 8
"""How many of the kept values are listed."""


@dataclass(frozen=True)
class OperatorCost:
    """The FLOPs of all nodes of one operator."""

    op: str
    forward: int
    backward: int


@dataclass(frozen=True)
class Kept:
    """A value of the forward part that the backward part reads, so that it stays in memory between them."""

    name: str
    op: str
    shape: Sizes
    bytes: int


@dataclass(frozen=True)
class Cost:
    """What one run of the training model costs.

    Attributes:
        sizes: the size each symbol was given.
        assumed: the sizes of symbols that nobody gave one: 1, or more where a network can't take so little.
        at_run_time: how many values have a size that is known at run time only; it counts as 1.
        nodes: 'model', 'loss', 'backward' and 'optimizer' -> how many nodes.
        flops_forward, flops_backward, flops_optimizer: floating-point operations.
        weight_bytes: the size of the trained weights.
        gradient_bytes: the size of the gradients.
        kept_bytes: the size of all forward values that the backward part reads; weights and inputs don't count,
            and a value counts once however it is reshaped.
        kept: the largest of them.
        operators: the FLOPs by operator, dearest first.
        modules: the FLOPs by module, in the model's order; empty where nothing tells modules apart.
        memory: the bytes of all values that are still to be read, after each node in the order in which onnxruntime
            runs them, or after the one in each of 200 runs of nodes at which they are most; without weights and inputs.
        branches: how many If there are, in bodies too; of each the dearer branch counts.
        uncounted: operator -> nodes whose cost is unknown: loops of unknown length, and values of unknown rank.
    """

    sizes: dict[str, int]
    assumed: dict[str, int]
    at_run_time: int
    nodes: dict[str, int]
    flops_forward: int
    flops_backward: int
    flops_optimizer: int
    weight_bytes: int
    gradient_bytes: int
    kept_bytes: int
    kept: list[Kept]
    operators: list[OperatorCost]
    modules: list[ModuleCost]
    memory: list[int]
    branches: int
    uncounted: dict[str, int]


def cost(graph: Graph, training: StepRecord, sizes: Mapping[str, int] | None = None) -> Cost:
    """Count operations and kept bytes of a training model, or of as much of it as there is.

    Args:
        graph: the model, typed.
        training: what the passes know of it.
        sizes: symbol -> size; see `Cost.assumed` for those without one.
    """
    given, assumed, facts = known_sizes(graph, sizes or {})
    steps = steps_of(graph.nodes, parts(graph, training))
    count = Counter(step.part for step in steps)
    flops, flops_of, uncounted = operations_by_part(graph, steps, facts)
    kept_bytes, kept, unknown = _kept(steps, facts)
    uncounted.update(unknown)
    weight_bytes = sum(nbytes(graph.initializers[name]) for name in training.trained)
    input_bytes, unknown_inputs = known_bytes(training.grad_of_input, facts)
    if unknown_inputs:
        uncounted["input"] += unknown_inputs
    return Cost(
        sizes=given,
        assumed=assumed,
        at_run_time=facts.guesses,
        nodes={part: count[part] for part in (*FORWARD, "backward", "optimizer")},
        flops_forward=flops["forward"].total(),
        flops_backward=flops["backward"].total(),
        flops_optimizer=flops["optimizer"].total(),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes + input_bytes,
        kept_bytes=kept_bytes,
        kept=kept,
        operators=_by_operator(flops["forward"], flops["backward"]),
        modules=by_module(graph, steps, flops_of),
        memory=course_of_memory(steps, graph.output_names, facts),
        branches=sum(node.op_type == "If" for node in with_bodies(s.node for s in steps if s.op_type in CONTROL_FLOW)),
        uncounted=dict(uncounted),
    )


def _by_operator(forward: Counter[str], backward: Counter[str]) -> list[OperatorCost]:
    """The operators that compute something, the dearest first."""
    costs = [OperatorCost(op, forward[op], backward[op]) for op in sorted({*forward, *backward})]
    return sorted((c for c in costs if c.forward + c.backward), key=lambda c: -c.forward - c.backward)


def _kept(steps: Iterable[Step], facts: Facts) -> tuple[int, list[Kept], Counter[str]]:
    """The bytes that are kept, the largest of what is, and the operators of results whose size is unknown."""
    made: dict[str, str] = {}
    memory: dict[str, str] = {}
    kept: dict[str, int] = {}
    unknown: Counter[str] = Counter()
    for step in steps:
        if step.part in FORWARD:
            made.update(dict.fromkeys(step.made, step.op_type))
            if step.shows:
                memory[step.made[0]] = memory.get(step.shows, step.shows)
            continue
        for name in step.reads:
            name = memory.get(name, name)
            if name not in made or name in kept:
                continue
            try:
                kept[name] = facts.bytes(name)
            except LookupError:
                unknown[made[name]] += 1
    largest = sorted(kept, key=kept.__getitem__, reverse=True)[:LARGEST]
    return sum(kept.values()), [Kept(n, made[n], facts[n].shape, kept[n]) for n in largest], unknown
