"""Write recomputation into a training model: copies of forward nodes, placed where the backward part needs them.

A runtime would merge a copy with its original node, or run it early. A control dependency prevents both: an operand of
the copy is passed through a Reshape to a shape of zeros, which keeps each size. The zeros are computed from *control
values*, which are cotangents that don't exist before the backward part has reached this position.
"""

from __future__ import annotations

from collections import defaultdict

from onnx import helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.node import ROLE, Node, copied
from onnxgrad_cli.ir.node_values import reads
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.passes.control_dependencies import zero_after
from onnxgrad_cli.passes.rematerialization.plan import Plan

SCOPE = "recompute"
"""Prefix of the names of the nodes that are written here."""


def write_recomputation(plan: Plan) -> int:
    """Make the backward part read recomputed values in place of the values that the plan does not store.

    Args:
        plan: the plan; its graph is changed.

    Returns:
        The number of copied nodes.
    """
    if not plan.recomputed:
        return 0
    writer = _CopyWriter(plan)
    inserted = _copies(plan, writer)
    rename(plan.flow.backward, writer.names)
    plan.flow.graph.nodes = [*plan.flow.forward, *_rescheduled(plan, writer, inserted)]
    return writer.count


def _copies(plan: Plan, writer: _CopyWriter) -> dict[int, list[Node]]:
    """Return a map: position in the backward part -> the nodes that recompute the values first needed there."""
    needed: dict[int, list[str]] = defaultdict(list)
    for name in plan.recomputed:
        needed[plan.flow.first_use[name]].append(name)
    inserted: dict[int, list[Node]] = defaultdict(list)
    start = 0  # first position at which control values are searched
    for position, names in sorted(needed.items()):
        barriers, control_values = writer.barriers, plan.flow.control_values(start, position)
        if not control_values:  # the backward part has not begun: the values are still in memory
            continue
        inserted[position] = writer.recompute(names, control_values)
        if writer.barriers > barriers:  # otherwise the next copies wait for these gradients too
            start = position
    return inserted


def _rescheduled(plan: Plan, writer: _CopyWriter, inserted: dict[int, list[Node]]) -> list[Node]:
    """Return the backward part with the copies inserted, and nodes that read no cotangent moved back or delayed.

    A node that reads no cotangent may run at any time, even before the backward part, and its result would then take
    the memory that recomputation saves. If the node reads a recomputed value, it is moved to its first use. Otherwise,
    it gets a control dependency on the values that its first use waits for.

    Args:
        plan: the plan.
        writer: the writer of the copies.
        inserted: map from a position to the nodes to insert before the node there; more nodes are added to it.
    """
    flow, nodes = plan.flow, list[Node]()
    late = set(writer.names.values())  # values that exist only after a control dependency
    for position, node in enumerate(flow.backward):
        nodes += inserted[position]
        use = flow.node_use[position]
        if use > position and late.isdisjoint(reads(node)):
            made, barrier = writer.delay(node, use, late)
            inserted[max(made, position) + 1] += barrier
        if use == position or late.isdisjoint(reads(node)):
            nodes.append(node)
        else:
            late.update(node.output)
            inserted[use].append(node)
    return nodes


class _CopyWriter:
    """Writes copies of forward nodes, and control dependencies.

    Attributes:
        names: map from a forward value to the name of the recomputed value.
        count: number of copied nodes.
        barriers: number of control dependencies written for copies and delayed nodes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.flow.graph
        self.names: dict[str, str] = {}
        self.count = self.barriers = 0
        self._last_use = 0  # the position of the use that the last delayed node waits for
        self._copying, self._delaying = Op(self.graph), Op(self.graph)
        self._copying.role = self._delaying.role = "backward"
        self._made_at = plan.flow.made_at()
        self._order = {id(node): position for position, node in enumerate(plan.flow.forward)}

    def recompute(self, names: list[str], control_values: list[str]) -> list[Node]:
        """Return nodes that recompute `names` from available and recomputed values, after `control_values` exist."""
        nodes, stack = dict[int, Node](), list(names)
        while stack:
            name = stack.pop()
            if name in self.names or self.plan.is_available(name):
                continue
            node = self.plan.flow.producers[name]
            if id(node) not in nodes:
                nodes[id(node)] = node
                stack += filter(None, node.input)
        before = len(self._copying.nodes)
        for node in sorted(nodes.values(), key=lambda node: self._order[id(node)]):
            self._copy(node, control_values)
        return self._copying.nodes[before:]

    def delay(self, node: Node, use: int, late: set[str]) -> tuple[int, list[Node]]:
        """Delay a node that reads no cotangent until the values exist for which the node at position `use` waits.

        Args:
            node: the node. Its first operand that a Reshape can delay is replaced.
            use: the position of the node that first uses its result.
            late: the values that exist only after a control dependency. The delayed operand is added.

        Returns:
            The position where the last control value is computed, and the nodes of the control dependency. The result
            is (0, []) if no operand can be delayed or there is no control value.
        """
        flow = self.plan.flow
        position = next((i for i, name in enumerate(node.input) if flow.can_be_delayed(name)), None)
        control_values = flow.control_values(min(self._last_use, use), use)
        if position is None or not control_values:
            return 0, []
        self._last_use, count = use, len(self._delaying.nodes)
        node.input[position] = self._delayed(self._delaying, node.input[position], control_values)
        late.add(node.input[position])
        return max(self._made_at[name] for name in control_values), self._delaying.nodes[count:]

    def _copy(self, node: Node, control_values: list[str]) -> None:
        """Write a copy of a node. If it reads no recomputed value, delay one operand until `control_values` exist."""
        inputs = [self.names.get(name, name) for name in node.input]
        if inputs == list(node.input):
            position = next(i for i, name in enumerate(inputs) if self.plan.flow.can_be_delayed(name))
            inputs[position] = self._delayed(self._copying, inputs[position], control_values)
        copy = copied(node)
        del copy.input[:], copy.output[:]
        copy.name = self.graph.fresh(f"{SCOPE}/{node.name}")
        copy.input.extend(inputs)
        copy.metadata = {ROLE: "backward"}
        copy.output.extend(self._recomputed(name) if name else "" for name in node.output)
        pairs = zip(node.output, copy.output, strict=True)
        self.names.update((old, new) for old, new in pairs if old and not self.plan.is_available(old))
        self._copying.nodes.append(copy)
        self.count += 1

    def _recomputed(self, name: str) -> str:
        """Return a new name for the recomputed version of a value, with the same type."""
        new, types = self.graph.fresh(f"{name}_recomputed"), self.graph.types
        if name in types:
            types[new] = types[name]
        return new

    def _delayed(self, op: Op, name: str, control_values: list[str]) -> str:
        """Return the name of a copy of `name` that does not exist before all of `control_values` exist."""
        own = self.graph.types[name]
        x = op.val(name)
        op.scope = SCOPE
        zeros = op.Expand(zero_after(op, [op.val(each) for each in control_values]), op.ints([x.rank]))
        before = len(op.nodes)
        delayed = op.emit("Reshape", x, zeros, types=[own])
        if len(op.nodes) > before:  # otherwise the same control dependency was written before
            self.barriers += 1
            self.graph.proto.graph.value_info.append(helper.make_value_info(delayed.name, own))
        return delayed.name
