"""Activity analysis: through which nodes cotangents go from the seeds back to what is wanted.

A value is active if it depends on something wanted along float paths; a node is on the path if it makes an active value
on which a seed depends.
Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, section 6.2 (varied and useful variables).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, ROLE, Node, metadata_of
from onnxgrad_cli.ir.nodes import captured, reads
from onnxgrad_cli.ir.types import is_differentiable


class Activity:
    """The active values of a graph, and the path that cotangents take.

    Attributes:
        active: the values that depend on something wanted along float paths; integers only where they are quantized
            floats.
        quantized: the active integers -> whether a node on the way to them is refused by name.
        path: the nodes to visit, last first: they make something active, and a seed depends on it.
        stops: active operands at which gradients stop although a seed depends on them, as (node, position).
    """

    def __init__(self, graph: Graph, wanted: Iterable[str], seeds: Iterable[str]) -> None:
        self.graph = graph
        self.active: set[str] = set(wanted)
        self.quantized: dict[str, bool] = {}
        self.stops: list[tuple[Node, int]] = []
        self._dependent: list[Node] = []
        self._rules: dict[tuple[str, str], registry.Rule | None] = {}
        self._carries = carriers(graph)
        seeds = list(seeds)
        for node in graph.nodes:
            self._spread(node)
        self.stops = list(self._upstream_stops(seeds))
        self.path = list(self._path(seeds))

    def rule(self, node: Node) -> registry.Rule | None:
        """The rule of a node at the graph's opset; None where there is none."""
        key = (node.op_type, node.domain)
        if key not in self._rules:
            self._rules[key] = registry.lookup(*key, self.graph.opset(node.domain) or 1)
        return self._rules[key]

    @property
    def stopped(self) -> set[str]:
        """The active operands at which gradients stop although a seed depends on them."""
        return {node.input[position] for node, position in self.stops}

    def dependencies(self, names: Iterable[str]) -> set[str]:
        """`names`, and the values from which an active path leads to one of them."""
        found = set(names)
        for node in reversed(self._dependent):
            if found.intersection(node.output):
                found.update(open_reads(node))
        return found

    def _spread(self, node: Node) -> None:
        """Note what is active after a node, given what is active before it."""
        names = reads(node)
        if self.active.isdisjoint(names):
            return
        rule = self.rule(node)
        if rule is not None and rule.is_zero:
            return
        if positions := stopped(node):
            self.stops += [(node, position) for position in positions if node.input[position] in self.active]
            if self.active.isdisjoint(open_reads(node)):
                return
        self._dependent.append(node)
        held, carries = self.graph.held, self._carries
        floats = [name for name in node.output if name and name not in held and carries(name)]
        self.active.update(floats)
        if self.quantized or (rule is not None and rule.integers):
            self._spread_integers(node, rule, names, floats)

    def _spread_integers(
        self, node: Node, rule: registry.Rule | None, names: Iterable[str], floats: Iterable[str]
    ) -> None:
        """Note the integers that stand for floats after a node that quantizes, or that reads such integers."""
        read = [self.quantized[name] for name in names if name in self.quantized]
        if read or (rule is not None and rule.integers):
            is_named = any(read) or bool(rule and rule.refusal)
            self.quantized.update((n, is_named) for n in node.output if n and n not in floats)
            self.active |= self.quantized.keys()

    def _upstream_stops(self, seeds: Iterable[str]) -> Iterator[tuple[Node, int]]:
        """Those of the stopped active operands on which a seed depends."""
        if self.stops:
            upstream = self.graph.ancestors(seeds)
            yield from ((node, position) for node, position in self.stops if upstream.intersection(node.output))

    def _path(self, seeds: Iterable[str]) -> Iterator[Node]:
        """The nodes that make something active on which a seed depends, last first."""
        needed = set(seeds)
        for node in reversed(self._dependent):
            if any(name in needed and name in self.active for name in node.output[:]):
                yield node
                needed.update(reads(node))


def carriers(graph: Graph) -> Callable[[str], bool]:
    """What tells whether a value may carry a cotangent, as far as its type is known: types are looked at once."""
    types, known = graph.types, {id(None): True}

    def carries(name: str) -> bool:
        value_type = types.get(name)
        found = known.get(id(value_type))
        if found is None:
            found = known[id(value_type)] = is_differentiable(value_type)
        return found

    return carries


def on_the_way(graph: Graph, wanted: Iterable[str], seeds: Iterable[str]) -> tuple[set[str], set[str]]:
    """The values that depend on something wanted, and those of which a seed depends, along float paths."""
    seeds = list(seeds)
    activity = Activity(graph, wanted, seeds)
    return activity.active, {*seeds, *(name for node in activity.path for name in reads(node))}


def open_reads(node: Node) -> list[str]:
    """What a node reads where a cotangent may go: all but the operands that `registry.stop_gradient` declares."""
    return [name for name in reads_by_position(node) if name]


def reads_by_position(node: Node) -> list[str]:
    """The inputs of a node, "" where one is absent or stopped, and then what its bodies capture."""
    inputs = node.input[:]
    for position in stopped(node):
        inputs[position] = ""
    return inputs + captured(node) if node.attribute else inputs


def stopped(node: Node) -> list[int]:
    """The operands of a node at which gradients stop: none where a loss, a definition or a rule has written it."""
    declared = registry.stopped(node.op_type, node.domain)
    if not declared or metadata_of(node, ROLE) or metadata_of(node, FORWARD):
        return []
    return [position for position in sorted(declared) if position < len(node.input)]
