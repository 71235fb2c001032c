"""Copies of forward nodes in the backward part, which no runtime merges with the nodes or runs before their time.

What a copy reads is first reshaped to the shape that it has: `Reshape` to zeros, which keep each size, moves no data in
memory. The zeros are computed from a gradient, so that no runtime knows them before the backward part has come there.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxgrad_cli.emit import ROLE, Op
from onnxgrad_cli.graph import reads, rename
from onnxgrad_cli.passes.kept import Plan

SCOPE = "recompute"
"""What the names of the nodes begin with."""


def write_copies(plan: Plan) -> int:
    """Let the backward part read copies of what the plan drops; returns how many nodes were copied.

    Each copy stands before the first node with a gradient that needs it, and so do the nodes between the two.
    """
    flow, graph = plan.flow, plan.flow.graph
    copies = _Copies(plan)
    wanted: dict[int, list[str]] = defaultdict(list)
    for name in plan.dropped:
        wanted[flow.anchor[name]].append(name)
    placed: dict[int, list[NodeProto]] = defaultdict(list)
    before = 0
    for position, names in sorted(wanted.items()):
        held = copies.held
        placed[position] += copies.make(names, flow.results(before, position))
        if copies.held > held:  # else the next ones wait for these results too
            before = position
    rename(flow.backward, copies.names)
    behind = set(copies.names.values())
    backward: list[NodeProto] = []
    waiting: dict[int, list[NodeProto]] = defaultdict(list)
    for position, node in enumerate(flow.backward):
        if flow.starts[position] > position and behind.intersection(reads(node)):  # it waits for the copies
            behind.update(node.output)
            waiting[flow.starts[position]].append(node)
            continue
        backward += [*placed[position], *waiting[position], node]
    graph.nodes = [*flow.forward, *backward]
    return copies.count


class _Copies:
    """The copies there are: forward value -> the copy of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.flow.graph
        self.names: dict[str, str] = {}
        self.count = self.held = 0
        self._op = Op(self.graph)
        self._op.role = "backward"
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

    def _copy(self, node: NodeProto, known: list[str]) -> None:
        inputs = [self.names.get(name, name) for name in node.input]
        if inputs == list(node.input):
            place = next(i for i, name in enumerate(inputs) if self.plan.flow.holds(name))
            inputs[place] = self._held(inputs[place], known)
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

    def _held(self, name: str, known: list[str]) -> str:
        """`name`, but not before all of `known` is."""
        op, own = self._op, self.graph.types[name]
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
