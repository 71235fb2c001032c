"""The operations of each module of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from onnxgrad_cli.cost.steps import FORWARD, Step
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import module_finder
from onnxgrad_cli.ir.node import FORWARD as FORWARD_OF, Node, metadata_of

MODULES = 30
"""Modules up to which a level of them is told."""


@dataclass(frozen=True)
class ModuleCost:
    """The FLOPs of all nodes of one module, and of what differentiates them; "" is what lies in no module."""

    module: str
    forward: int
    backward: int


def by_module(graph: Graph, steps: Sequence[Step], own: Sequence[int]) -> list[ModuleCost]:
    """The modules with what their nodes compute, at the deepest level that has no more than `MODULES` of them."""
    modules = _modules(graph, steps)
    if not any(modules):
        return []
    every = zip(steps, modules, own, strict=True)
    counted = [(path, step.part in FORWARD, count) for step, path, count in every if step.part != "optimizer"]
    depth = _depth([path for path, _, _ in counted])
    sums: dict[tuple[str, ...], list[int]] = {}
    for path, forward, count in counted:
        sums.setdefault(path[:depth], [0, 0])[not forward] += count
    costs = [ModuleCost(path[-1] if path else "", *counts) for path, counts in sums.items() if any(counts)]
    return costs if len(costs) > 1 else []


def _modules(graph: Graph, steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """The path of the module of each node; a node of the backward part belongs to that of the one it differentiates."""
    nodes = [step.node for step in steps if step.part == "model"]
    around = list(map(module_finder(nodes, graph.initializers), nodes))
    if not any(around):
        return [()] * len(steps)
    paths = {node.name or next(iter(node.output), ""): path for node, path in zip(nodes, around, strict=True)}
    model = iter(around)
    return [next(model) if step.part == "model" else paths.get(_forward_of(step.node), ()) for step in steps]


def _forward_of(node: Node) -> str:
    """The forward node that a node differentiates; "" where it says none."""
    return metadata_of(node, FORWARD_OF)


def _depth(paths: Sequence[tuple[str, ...]]) -> int:
    """How deep a level of modules can be looked at that still has no more than `MODULES`."""
    levels = ({path[:depth] for path in paths} for depth in range(1, max(map(len, paths), default=0) + 1))
    return sum(1 for _ in takewhile(lambda level: len(level) <= MODULES, levels))
