"""Copies of forward nodes in the backward part, which no runtime merges with the nodes or runs before their time.

What a copy reads is first reshaped to the shape that it has: `Reshape` to zeros, which keep each size, moves no data in
memory. The zeros are computed from a gradient, so that no runtime knows them before the backward part has come there.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxgrad_cli.emission.emitter import ROLE, Op
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.passes.rematerialization.plan import Plan

SCOPE = "recompute"
"""What the names of the nodes begin with."""


def write_copies(plan: Plan) -> int:
    """Let the backward part read copies of what the plan drops; returns how many nodes were copied.

    Each copy stands before the first node with a gradient that needs it, and so do the nodes between the two, and those
    that take no gradient: of what is kept they would make as much again before the backward part begins.
    """
    if not plan.dropped:
        return 0
    flow, graph = plan.flow, plan.flow.graph
    copies = _Copies(plan)
    wanted: dict[int, list[str]] = defaultdict(list)
    for name in plan.dropped:
        wanted[flow.anchor[name]].append(name)
    placed: dict[int, list[NodeProto]] = defaultdict(list)
    before = 0
    for position, names in sorted(wanted.items()):
        held = copies.held
        placed[position] += copies.make(names, flow.seen(before, position))
        if copies.held > held:  # else the next ones wait for these results too
            before = position
    rename(flow.backward, copies.names)
    behind = set(copies.names.values())
    backward: list[NodeProto] = []
    for position, node in enumerate(flow.backward):
        backward += placed[position]
        start = flow.starts[position]
        if start > position and behind.isdisjoint(reads(node)):
            made, shown = copies.hold_back(node, start, behind)
            placed[max(made, position) + 1] += shown
        if start == position or behind.isdisjoint(reads(node)):
            backward.append(node)
        else:
            behind.update(node.output)
            placed[start].append(node)
    graph.nodes = [*flow.forward, *backward]
    return copies.count


class _Copies:
    """The copies there are: forward value -> the copy of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.flow.graph
        self.names: dict[str, str] = {}
        self.count = self.held = 0
        self._before = 0
        self._op, self._early = Op(self.graph), Op(self.graph)
        self._op.role = self._early.role = "backward"
        self._made = {name: position for position, names in plan.flow.done.items() for name in names}
        self._place = {id(node): place for place, node in enumerate(plan.flow.forward)}

    def make(self, names: list[str], known: list[str]) -> list[NodeProto]:
        """The nodes that make copies of values, of what is kept and of earlier copies, not before `known` is known."""
        chain, stack = dict[int, NodeProto](), list(names)
        while stack:
            name = stack.pop()
            if name in self.names or self.plan.has(name) or id(node := self.plan.flow.made[name]) in chain:
                continue
            chain[id(node)] = node
            stack += filter(None, node.input)
        before = len(self._op.nodes)
        for node in sorted(chain.values(), key=lambda node: self._place[id(node)]):
            self._copy(node, known)
        return self._op.nodes[before:]

    def hold_back(self, node: NodeProto, start: int, behind: set[str]) -> tuple[int, list[NodeProto]]:
        """Let a node, if it reads a tensor, wait for what the one at `start` waits for; what it reads then is `behind`.

        Returns:
            the position where all of that is made, and the nodes that show it.
        """
        flow = self.plan.flow
        place = next((i for i, name in enumerate(node.input) if flow.holds(name)), None)
        known = flow.seen(min(self._before, start), start)
        if place is None or not known:
            return 0, []
        self._before, count = start, len(self._early.nodes)
        node.input[place] = self._held(self._early, node.input[place], known)
        behind.add(node.input[place])
        return max(self._made[name] for name in known), self._early.nodes[count:]

    def _copy(self, node: NodeProto, known: list[str]) -> None:
        inputs = [self.names.get(name, name) for name in node.input]
        if inputs == list(node.input):
            place = next(i for i, name in enumerate(inputs) if self.plan.flow.holds(name))
            inputs[place] = self._held(self._op, inputs[place], known)
        copy = NodeProto()
        copy.CopyFrom(node)
        del copy.input[:], copy.output[:], copy.metadata_props[:]
        copy.name = self.graph.fresh(f"{SCOPE}/{node.name}")
        copy.input.extend(inputs)
        copy.metadata_props.add(key=ROLE, value="backward")
        for name in node.output:
            copy.output.append(self._twin(name, "recomputed") if name else "")
        twins = zip(node.output, copy.output, strict=True)
        self.names.update((old, new) for old, new in twins if old and not self.plan.has(old))
        self._op.nodes.append(copy)
        self.count += 1

    def _twin(self, name: str, kind: str) -> str:
        """A new value of the type that `name` has."""
        twin, types = self.graph.fresh(f"{name}_{kind}"), self.graph.types
        if name in types:
            types[twin] = types[name]
        return twin

    def _held(self, op: Op, name: str, known: list[str]) -> str:
        """`name`, but not before all of `known` is."""
        own = self.graph.types[name]
        x = op.val(name)
        op.scope = SCOPE
        values = [op.val(each) for each in known]
        firsts = [op.Slice(op.Reshape(v, op.ints([-1])), op.ints([0]), op.ints([1])) for v in values]
        first = op.Concat(*(op.cast(v, TensorProto.BOOL) for v in firsts), axis=0)
        never = op.And(first, op.const(np.array(False)))
        zeros = op.Expand(op.sum(op.cast(never, TensorProto.INT64), keepdims=False), op.ints([x.rank]))
        before = len(op.nodes)
        held = op.emit("Reshape", x, zeros, types=[own])
        if len(op.nodes) > before:  # else it is there already
            self.held += 1
            self.graph.proto.graph.value_info.append(helper.make_value_info(held.name, own))
        return held.name
