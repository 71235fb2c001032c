"""The cost of a run of a training model, as the report shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from onnxgrad_cli.cost.facts import Facts, Sizes, known_sizes
from onnxgrad_cli.cost.flops import operations_by_part
from onnxgrad_cli.cost.live_memory import course_of_memory
from onnxgrad_cli.cost.steps import FORWARD, ScheduledNode, steps_of
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import module_finder
from onnxgrad_cli.ir.node import FORWARD as FORWARD_OF, metadata_of
from onnxgrad_cli.ir.node_values import CONTROL_FLOW, with_bodies
from onnxgrad_cli.ir.types import nbytes
from onnxgrad_cli.record import StepRecord, parts

LISTED_VALUES = 8
"""Largest number of values, kept in memory for the backward part, that a report lists."""


@dataclass(frozen=True)
class OperatorCost:
    """The FLOPs of all nodes of one operator, in the forward and in the backward part."""

    op: str
    forward: int
    backward: int


@dataclass(frozen=True)
class Kept:
    """A forward value that stays in memory because the backward part reads it, with the operator that computes it."""

    name: str
    op: str
    shape: Sizes
    bytes: int


@dataclass(frozen=True)
class Cost:
    """The cost of one run of the training model.

    Attributes:
        sizes: symbol -> its given size.
        assumed: other symbol -> its assumed size: 1, or more if the network can't take such a small input.
        at_run_time: the number of values that have a size known only at run time. Such a size counts as 1.
        nodes: part ('model', 'loss', 'backward' or 'optimizer') -> its number of nodes.
        flops_forward, flops_backward, flops_optimizer: the number of floating-point operations of each part.
        weight_bytes: the size of the trained weights in bytes.
        gradient_bytes: the size of the gradients in bytes.
        kept_bytes: the size in bytes of all forward values that the backward part reads, without weights and inputs. A
            value and its reshaped forms count once.
        kept: the largest kept values.
        operators: the FLOPs by operator, the most expensive first.
        modules: the FLOPs by module, in the model's order; empty if the nodes can't be assigned to several modules.
        memory: the bytes of all live values after each node, in onnxruntime's order of execution, without weights and
            inputs. For more than 200 nodes, the maximum of each group of consecutive nodes.
        branches: the number of If nodes, including those in bodies. Only the more expensive branch of each is counted.
        uncounted: operator -> the number of its nodes whose cost is unknown, such as loops of unknown length, or nodes
            with values of unknown rank.
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
    """Count the operations of a training model, which may be incomplete, and the bytes of its stored activations.

    Args:
        graph: the model, with inferred types.
        training: the results of the passes.
        sizes: symbol -> its size. Other symbols get size 1, or more if the network can't take such a small input.
    """
    given, assumed, facts = known_sizes(graph, sizes or {})
    steps = steps_of(graph.nodes, parts(graph, training))
    count = Counter(step.part for step in steps)
    flops, flops_of, uncounted = operations_by_part(graph, steps, facts)
    kept_bytes, kept, unknown = _kept(steps, facts)
    uncounted.update(unknown)
    weight_bytes = sum(nbytes(graph.initializers[name]) for name in training.trained)
    inputs = [fact.bytes if (fact := facts.known(name)) else None for name in training.grad_of_input]
    uncounted += Counter(input=inputs.count(None))
    before, after = flops["forward"], flops["backward"]
    costs = [OperatorCost(op, before[op], after[op]) for op in sorted({*before, *after})]
    return Cost(
        sizes=given,
        assumed=assumed,
        at_run_time=facts.guesses,
        nodes={part: count[part] for part in (*FORWARD, "backward", "optimizer")},
        flops_forward=flops["forward"].total(),
        flops_backward=flops["backward"].total(),
        flops_optimizer=flops["optimizer"].total(),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes + sum(filter(None, inputs)),
        kept_bytes=kept_bytes,
        kept=kept,
        operators=sorted((c for c in costs if c.forward + c.backward), key=lambda c: -c.forward - c.backward),
        modules=by_module(graph, steps, flops_of),
        memory=course_of_memory(steps, graph.output_names, facts),
        branches=sum(node.op_type == "If" for node in with_bodies(s.node for s in steps if s.op_type in CONTROL_FLOW)),
        uncounted=dict(uncounted),
    )


def _kept(steps: Iterable[ScheduledNode], facts: Facts) -> tuple[int, list[Kept], Counter[str]]:
    """Find the forward values that the backward part reads.

    Return their total bytes, the largest of them, and a map from operator to the number of its results of unknown size.
    """
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
    largest = sorted(kept, key=kept.__getitem__, reverse=True)[:LISTED_VALUES]
    return sum(kept.values()), [Kept(n, made[n], facts[n].shape, kept[n]) for n in largest], unknown


MODULES = 30
"""Largest number of modules that a report shows."""


@dataclass(frozen=True)
class ModuleCost:
    """The FLOPs of one module: of its own nodes, and of the backward nodes that differentiate them.

    The module "" holds the nodes without a module.
    """

    module: str
    forward: int
    backward: int


def by_module(graph: Graph, steps: Sequence[ScheduledNode], own: Sequence[int]) -> list[ModuleCost]:
    """Return the FLOPs of each module, at the deepest level that has at most `MODULES` modules.

    Args:
        graph: the model.
        steps: its nodes.
        own: the FLOPs of each node.

    Returns:
        An empty list if the nodes can't be assigned to several modules.
    """
    modules = _modules(graph, steps)
    if not any(modules):
        return []
    every = zip(steps, modules, own, strict=True)
    counted = [(path, step.part in FORWARD, count) for step, path, count in every if step.part != "optimizer"]
    paths = [path for path, _, _ in counted]
    levels = ({path[:depth] for path in paths} for depth in range(1, max(map(len, paths), default=0) + 1))
    depth = sum(1 for _ in takewhile(lambda level: len(level) <= MODULES, levels))
    sums: dict[tuple[str, ...], list[int]] = {}
    for path, forward, count in counted:
        sums.setdefault(path[:depth], [0, 0])[not forward] += count
    costs = [ModuleCost(path[-1] if path else "", *counts) for path, counts in sums.items() if any(counts)]
    return costs if len(costs) > 1 else []


def _modules(graph: Graph, steps: Sequence[ScheduledNode]) -> list[tuple[str, ...]]:
    """Return the module path of each node. A backward node belongs to the module of the node that it differentiates."""
    nodes = [step.node for step in steps if step.part == "model"]
    around = list(map(module_finder(nodes, graph.initializers), nodes))
    if not any(around):
        return [()] * len(steps)
    paths = {node.name or next(iter(node.output), ""): path for node, path in zip(nodes, around, strict=True)}
    model = iter(around)
    return [
        next(model) if step.part == "model" else paths.get(metadata_of(step.node, FORWARD_OF), ()) for step in steps
    ]
