"""Which forward values the backward part reads from memory, and which it recomputes.

This is activation checkpointing (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
arXiv:1604.06174): a few forward values are stored, and what the backward part reads besides is recomputed from these,
segment by segment. Strategies choose the stored values: `plan_elementwise`, `plan_blocks`, `plan_budget` and
that of `solver`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
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
"""Operators that go over their elements once or twice and give about as many."""


class Recomputation(NamedTuple):
    """How some values are recomputed.

    Attributes:
        nodes: the forward nodes that run again.
        operands: the stored values that these nodes read.
    """

    nodes: list[Node]
    operands: set[str]


class Plan:
    """The choice of what is stored.

    A value and its views share memory, so that they are stored or recomputed together: each such group is known by the
    value that the others are views of.

    Attributes:
        flow: the dataflow that is planned.
        groups: value that is no view -> the values of its group that the backward part reads.
        stored: the groups that are stored; at first all.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.groups: dict[str, list[str]] = defaultdict(list)
        for name in flow.producers:
            if name in flow.first_use and not flow.is_resident(root := flow.storage(name)):
                self.groups[root].append(name)
        self.stored = set(self.groups)
        self._can_run_twice: dict[int, bool] = {}

    @property
    def recomputed(self) -> list[str]:
        """The values that the backward part reads and that are not stored, in the order of the forward part."""
        return [name for root, names in self.groups.items() if root not in self.stored for name in names]

    @property
    def must_store(self) -> set[str]:
        """The groups that may not be recomputed."""
        return {root for root, names in self.groups.items() if not self.flow.must_store.isdisjoint((root, *names))}

    def is_available(self, name: str) -> bool:
        """Whether a forward value is in memory when the backward part begins."""
        root = self.flow.storage(name)
        return self.flow.is_resident(root) or root in self.stored

    def can_run_twice(self, node: Node) -> bool:
        """Whether a second run of a node gives the same and harms nothing."""
        if id(node) not in self._can_run_twice:
            self._can_run_twice[id(node)] = self.flow.can_run_twice(node)
        return self._can_run_twice[id(node)]

    def recomputation(self, names: Iterable[str], recomputed: Collection[str] = ()) -> Recomputation | None:
        """How `names` are recomputed from what is available and from values that are `recomputed` already.

        Returns:
            None where one of the nodes may not run twice, or reads a value of another segment that is not available.
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
    """The operands of a node that are not in memory anyway."""
    return [name for name in node.input if name and not flow.is_resident(name)]


# -- the strategies -------------------------------------------------------------------------------------------------


def plan_elementwise(flow: Dataflow) -> Plan:
    """Recompute the results of cheap operators, from values that are stored anyway."""
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
    """Store the results at `boundaries`, names of values or nodes, and recompute what lies between."""
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
    """Recompute first what frees most bytes for an operation, until no more than `budget` bytes are stored.

    Args:
        flow: the dataflow.
        budget: in bytes.
        sizes: the size of every value.
        total: the bytes that the backward part reads of the forward part if nothing is recomputed, values included that
            are computed of weights alone and are in memory anyway.
    """
    plan = Plan(flow)
    if total > budget:
        for left, _ in _freed(plan, sizes, total):
            if left <= budget:
                break
    return plan


def trade(flow: Dataflow, sizes: Facts, total: int) -> list[tuple[int, float]]:
    """What `plan_budget` has to offer: the bytes that stay stored, from all to the fewest, and the operations for that.

    Args:
        flow, sizes, total: see `plan_budget`.
    """
    found, again = [(total, 0.0)], dict[int, Node]()
    for left, recomputation in _freed(Plan(flow), sizes, total):
        new = {id(node): node for node in recomputation.nodes if id(node) not in again}
        again |= new
        found.append((left, found[-1][1] + sum(node_flops(node, sizes) for node in new.values())))
    return found


def _freed(plan: Plan, sizes: Facts, total: int) -> Iterator[tuple[int, Recomputation]]:
    """Let group after group be recomputed, first what frees most bytes for an operation.

    Yields:
        The bytes that stay stored, and how the group is recomputed.
    """
    must_store, recomputed = plan.must_store, set[str]()
    size = {root: size_of(root, sizes) for root in plan.groups}

    def way(root: str) -> Recomputation | None:
        """How `root` is recomputed from what is stored besides it."""
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
        plan.stored.discard(root)  # no other price rises by this: who reads `root` finds it recomputed
        total -= size[root]
        must_store.update(_of_other_segments(plan, root, found))
        recomputed.update(name for node in found.nodes for name in node.output)
        yield total, found


def _of_other_segments(plan: Plan, root: str, recomputation: Recomputation) -> Iterator[str]:
    """The groups of other segments that the recomputation of `root` reads: they have to stay stored."""
    segments = plan.flow.segments
    own = {segments[name] for name in plan.groups[root]}
    return (plan.flow.storage(name) for name in recomputation.operands if segments[name] not in own)


def flops_of(recomputation: Recomputation, sizes: Facts) -> float:
    """The operations of a recomputation; infinitely many where nobody can tell."""
    try:
        return sum(node_flops(node, sizes) for node in recomputation.nodes)
    except LookupError:
        return inf


def size_of(name: str, sizes: Facts) -> int:
    """The bytes of a value; 0 where nobody can tell."""
    try:
        return sizes.bytes(name)
    except LookupError:
        return 0
