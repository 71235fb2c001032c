"""Activity analysis: find the nodes that cotangents pass on the way from the seeds back to the wanted values.

The seeds are the values whose cotangents are given. The wanted values are those to differentiate with respect to. A
value is active if a path of float values leads from a wanted value to it. A node is on the path of the cotangents if it
computes an active value that a seed depends on.
Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, section 6.2 (varied and useful variables).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, ROLE, Node, metadata_of
from onnxgrad_cli.ir.node_values import captured, reads
from onnxgrad_cli.ir.types import is_differentiable


class Activity:
    """The active values of a graph, and the path of the cotangents.

    Attributes:
        active: the active values, including the wanted ones. Integers are included only if they are quantized floats.
        quantized: map from an active integer value to True if it depends on a node that is refused by name
            (`registry.refuse`), and to False otherwise.
        path: the nodes on the path of the cotangents, from the last to the first.
        stops: active operands at which gradients stop (`registry.stop_gradient`) and that a seed depends on, as (node,
            position of the operand).
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
        upstream = graph.ancestors(seeds) if self.stops else set[str]()
        self.stops = [(node, position) for node, position in self.stops if upstream.intersection(node.output)]
        self.path = list(self._path(seeds))

    def rule(self, node: Node) -> registry.Rule | None:
        """Return the rule of a node at the graph's opset, or None if there is no rule."""
        key = (node.op_type, node.domain)
        if key not in self._rules:
            self._rules[key] = registry.lookup(*key, self.graph.opset(node.domain) or 1)
        return self._rules[key]

    @property
    def stopped(self) -> set[str]:
        """The active operands at which gradients stop although a seed depends on them."""
        return {node.input[position] for node, position in self.stops}

    def dependencies(self, names: Iterable[str]) -> set[str]:
        """Return `names`, and all values from which an active path leads to one of `names`."""
        found = set(names)
        for node in reversed(self._dependent):
            if found.intersection(node.output):
                found.update(open_reads(node))
        return found

    def _spread(self, node: Node) -> None:
        """Add the outputs of a node to the active values if the node reads an active one."""
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
        """Record the integer outputs of a node that quantizes floats, or that reads quantized floats."""
        read = [self.quantized[name] for name in names if name in self.quantized]
        if read or (rule is not None and rule.integers):
            is_named = any(read) or bool(rule and rule.refusal)
            self.quantized.update((n, is_named) for n in node.output if n and n not in floats)
            self.active |= self.quantized.keys()

    def _path(self, seeds: Iterable[str]) -> Iterator[Node]:
        """Yield the nodes that compute an active value which a seed depends on, last first."""
        needed = set(seeds)
        for node in reversed(self._dependent):
            if any(name in needed and name in self.active for name in node.output[:]):
                yield node
                needed.update(reads(node))


def carriers(graph: Graph) -> Callable[[str], bool]:
    """Return a function that takes the name of a value and returns True if a value of its type can have a cotangent.

    A value of unknown type counts as True. The results are cached per type.
    """
    types, known = graph.types, {id(None): True}

    def carries(name: str) -> bool:
        value_type = types.get(name)
        found = known.get(id(value_type))
        if found is None:
            found = known[id(value_type)] = is_differentiable(value_type)
        return found

    return carries


def on_the_way(graph: Graph, wanted: Iterable[str], seeds: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the active values, and the values that a seed depends on: the seeds and all that nodes on the path read.

    Args:
        graph: the graph.
        wanted: the values to differentiate with respect to.
        seeds: the values whose cotangents are given.
    """
    seeds = list(seeds)
    activity = Activity(graph, wanted, seeds)
    return activity.active, {*seeds, *(name for node in activity.path for name in reads(node))}


def open_reads(node: Node) -> list[str]:
    """Return the values that a node reads, except the operands at which gradients stop."""
    return [name for name in reads_by_position(node) if name]


def reads_by_position(node: Node) -> list[str]:
    """Return the inputs of a node, then the values that its bodies capture.

    Absent inputs, and operands at which gradients stop, are "".
    """
    inputs = node.input[:]
    for position in stopped(node):
        inputs[position] = ""
    return inputs + captured(node) if node.attribute else inputs


def stopped(node: Node) -> list[int]:
    """Return the positions of the operands of a node at which gradients stop.

    There are none if a loss, a definition or a rule has written the node.
    """
    declared = registry.stopped(node.op_type, node.domain)
    if not declared or metadata_of(node, ROLE) or metadata_of(node, FORWARD):
        return []
    return [position for position in sorted(declared) if position < len(node.input)]
