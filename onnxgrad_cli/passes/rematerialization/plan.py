"""Plans: which forward values are stored for the backward part, and which are recomputed.

This is activation checkpointing (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
arXiv:1604.06174). A few forward values are stored, and the other values that the backward part reads are recomputed
from them, segment by segment. A strategy chooses the stored values: `plan_elementwise`, `plan_blocks`, `plan_budget`,
or the strategy of `solver`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from math import inf
from typing import NamedTuple

from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.flops import node_flops
from onnxgrad_cli.cost.steps import VIEWS
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.passes.rematerialization.dataflow import Dataflow

CHEAP = VIEWS | frozenset(
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr "
    "BitwiseXor Cast CastLike Ceil Celu Clip Concat Cos Cosh DepthToSpace DequantizeLinear Div Elu Equal Erf Exp "
    "Expand Floor Gelu Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish InstanceNormalization IsInf "
    "IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pad Pow "
    "QuantizeLinear RMSNormalization Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Slice Softplus "
    "Softsign SpaceToDepth Split Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Tile Transpose Trilu Where Xor".split()
)
"""Cheap operators: they read each element once or twice, and their outputs are about as large as their inputs."""


class Recomputation(NamedTuple):
    """The nodes that have to run again in order to recompute some values.

    Attributes:
        nodes: the forward nodes that run again.
        operands: the available values that these nodes read.
    """

    nodes: list[Node]
    operands: set[str]


class Plan:
    """A choice of the forward values to store; the others are recomputed.

    A value and its views share memory, so they are stored or recomputed together. Such a group is identified by the
    value that the others are views of.

    Attributes:
        flow: the dataflow.
        groups: map from a value that is not a view to the values of its group that the backward part reads.
        stored: the groups that are stored; initially all.
        can_run_twice: `Dataflow.can_run_twice` with cached results.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.groups: dict[str, list[str]] = defaultdict(list)
        for name in flow.producers:
            if name in flow.first_use and not flow.is_resident(root := flow.storage(name)):
                self.groups[root].append(name)
        self.stored = set(self.groups)
        self.can_run_twice = cache(flow.can_run_twice)

    @property
    def recomputed(self) -> list[str]:
        """The values that are read by the backward part but not stored, in the order of the forward part."""
        return [name for root, names in self.groups.items() if root not in self.stored for name in names]

    @property
    def must_store(self) -> set[str]:
        """The groups that may not be recomputed."""
        return {root for root, names in self.groups.items() if not self.flow.must_store.isdisjoint((root, *names))}

    def is_available(self, name: str) -> bool:
        """Return True if a forward value is still in memory when the backward part begins."""
        root = self.flow.storage(name)
        return self.flow.is_resident(root) or root in self.stored

    def recomputation(self, names: Iterable[str], recomputed: Collection[str] = ()) -> Recomputation | None:
        """Return how to recompute `names` from available values and from those that are already `recomputed`.

        Returns:
            The recomputation. None if a node may not run twice, or reads a value of another segment that is not
            available.
        """
        nodes: dict[int, Node] = {}
        stored: set[str] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            node = self.flow.producers[name]
            if name in recomputed or id(node) in nodes:
                continue
            if not self.can_run_twice(node):
                return None
            nodes[id(node)] = node
            operands = computed(self.flow, node)
            stored.update(filter(self.is_available, operands))
            missing = [operand for operand in operands if not self.is_available(operand)]
            if any(self.flow.segments[operand] != self.flow.segments[name] for operand in missing):
                return None
            stack += missing
        return Recomputation(list(nodes.values()), stored)


def computed(flow: Dataflow, node: Node) -> list[str]:
    """Return the operands of a node that are not always in memory (see `Dataflow.is_resident`)."""
    return [name for name in node.input if name and not flow.is_resident(name)]


# -- the strategies -------------------------------------------------------------------------------------------------


def plan_elementwise(flow: Dataflow) -> Plan:
    """Return a plan that recomputes the results of cheap operators from values that are stored anyway."""
    plan = Plan(flow)
    undecided = {root for root in plan.groups if flow.producers[root].op_type in CHEAP} - plan.must_store
    plan.stored -= undecided
    recomputable: set[str] = set()
    for node in flow.forward:
        cheap = node.op_type in CHEAP and plan.can_run_twice(node)
        for name in filter(None, node.output):
            missing = [operand for operand in node.input if operand and not plan.is_available(operand)]
            if cheap and all(x in recomputable and flow.segments[x] == flow.segments[name] for x in missing):
                recomputable.add(name)
            elif flow.storage(name) in undecided:
                plan.stored.add(flow.storage(name))
    return plan


def plan_blocks(flow: Dataflow, boundaries: Collection[str]) -> Plan:
    """Return a plan that stores the results at `boundaries` (nodes or values) and recomputes those in between."""
    plan = Plan(flow)
    stored = plan.must_store | _results_at(flow, boundaries)
    needed = {name for names in plan.groups.values() for name in names}
    for node in reversed(flow.forward):
        for name in node.output:
            root = flow.storage(name)
            if name not in needed or root in stored:
                continue
            if not plan.can_run_twice(node):
                stored.add(root)
                continue
            operands = computed(flow, node)
            inside = {operand for operand in operands if flow.segments[operand] == flow.segments[name]}
            needed |= inside
            stored.update(flow.storage(operand) for operand in operands if operand not in inside)
    plan.stored = stored
    return plan


def _results_at(flow: Dataflow, boundaries: Collection[str]) -> set[str]:
    named = (name for name, node in flow.producers.items() if name in boundaries or node.name in boundaries)
    return set(map(flow.storage, named))


def plan_budget(flow: Dataflow, budget: int, sizes: Facts, total: int) -> Plan:
    """Return a plan that stores at most `budget` bytes; recomputes first the values that free most bytes per operation.

    Args:
        flow: the dataflow.
        budget: the largest number of bytes to store.
        sizes: the size of every value.
        total: the bytes of all forward values that the backward part reads, if nothing is recomputed. This includes
            values that are computed from weights alone and are in memory anyway.
    """
    plan = Plan(flow)
    if total > budget:
        for left, _ in _freed(plan, sizes, total):
            if left <= budget:
                break
    return plan


def trade(flow: Dataflow, sizes: Facts, total: int) -> list[tuple[int, float]]:
    """Return the choices that `plan_budget` has: (bytes stored, operations added), from the most bytes to the fewest.

    Args:
        flow, sizes, total: as for `plan_budget`.
    """
    found, again = [(total, 0.0)], dict[int, Node]()
    for left, recomputation in _freed(Plan(flow), sizes, total):
        new = {id(node): node for node in recomputation.nodes if id(node) not in again}
        again |= new
        found.append((left, found[-1][1] + sum(node_flops(node, sizes) for node in new.values())))
    return found


def _freed(plan: Plan, sizes: Facts, total: int) -> Iterator[tuple[int, Recomputation]]:
    """Mark groups as recomputed one by one. Groups that free the most bytes per operation come first.

    Yields:
        The bytes that stay stored, and the recomputation of the group.
    """
    must_store, recomputed = plan.must_store, set[str]()
    size = {root: size_of(root, sizes) for root in plan.groups}

    def way(root: str) -> Recomputation | None:
        """Return how to recompute `root` from the other stored values, or None."""
        plan.stored.discard(root)
        found = plan.recomputation(plan.groups[root], recomputed)
        plan.stored.add(root)
        return found

    prices = {root: flops_of(found, sizes) / size[root] for root in plan.groups if size[root] and (found := way(root))}
    for root in sorted(prices, key=prices.__getitem__):
        if prices[root] == inf:
            break
        if root in must_store or (found := way(root)) is None:
            continue
        plan.stored.discard(root)  # this raises no other price: nodes that read `root` find it recomputed
        total -= size[root]
        must_store.update(_of_other_segments(plan, root, found))
        recomputed.update(name for node in found.nodes for name in node.output)
        yield total, found


def _of_other_segments(plan: Plan, root: str, recomputation: Recomputation) -> Iterator[str]:
    """Yield the groups of other segments that the recomputation of `root` reads, which therefore must stay stored."""
    segments = plan.flow.segments
    own = {segments[name] for name in plan.groups[root]}
    return (plan.flow.storage(name) for name in recomputation.operands if segments[name] not in own)


def flops_of(recomputation: Recomputation, sizes: Facts) -> float:
    """Return the number of operations of a recomputation, or infinity if the number is unknown."""
    try:
        return sum(node_flops(node, sizes) for node in recomputation.nodes)
    except LookupError:
        return inf


def size_of(name: str, sizes: Facts) -> int:
    """Return the size of a value in bytes, or 0 if it is unknown."""
    try:
        return sizes.bytes(name)
    except LookupError:
        return 0
