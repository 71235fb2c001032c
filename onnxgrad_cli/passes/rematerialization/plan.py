"""Which results of the forward part are kept for the backward part, and which are computed again.

Forward values stand on levels. A value is computed again from kept values of any level and from others of its own, so
that what comes back at one time is no more than a level holds. A level ends at an operator that is dear, or at a
boundary that was named.
Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable

from onnx import NodeProto

from onnxgrad_cli.cost import EXACT, VIEWS, Facts, node_flops
from onnxgrad_cli.emission.emitter import FORWARD
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import reads, subgraphs
from onnxgrad_cli.ir.randomness import is_random
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.record import Training

DEAR = frozenset(EXACT) - {"AveragePool", "MaxPool", "LpPool"}
"""Operators that take many operations for each element that they read."""

CHEAP = VIEWS | frozenset(
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr "
    "BitwiseXor Cast CastLike Ceil Celu Clip Concat Cos Cosh DepthToSpace DequantizeLinear Div Elu Equal Erf Exp "
    "Expand Floor Gelu Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish InstanceNormalization IsInf "
    "IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pad Pow "
    "QuantizeLinear RMSNormalization Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Slice Softplus "
    "Softsign SpaceToDepth Split Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Tile Transpose Trilu Where Xor".split()
)
"""Operators that go over their elements once or twice and give about as many."""

SIZES = frozenset("Constant Shape Size".split())
"""Operators whose results depend on no data: what is made of them alone is small, and known to runtimes early."""

LONGEST = 32
"""How many cheap nodes in a row one level holds: a longer chain would come back as a whole."""


class Flow:
    """What flows from the forward part into the backward part, and when it is needed there.

    Attributes:
        forward, backward: the nodes before and after the seed of the backward part.
        made: the node that makes each forward value.
        varying: the values that depend on what the model is fed.
        late: the values that depend on the seed.
        level: the level of each forward value.
        anchor: forward value that the backward part reads -> the position there of the first node on which the seed has
            an influence, and that needs the value.
        starts: the position of each node of the backward part, or that of the first late one which needs it.
        begun: the position of the first node whose result can't be known before the forward part has run.
        fixed: values that may not be computed again, whoever needs them.
    """

    def __init__(
        self, graph: Graph, training: Training, ends: Collection[str] = (), longest: int | None = None
    ) -> None:
        seeds = set(training.yielded.values())
        start = 1 + next(i for i, node in enumerate(graph.nodes) if seeds.intersection(node.output))
        self.graph = graph
        self.forward, self.backward = graph.nodes[:start], graph.nodes[start:]
        self.made = {name: node for node in self.forward for name in node.output if name}
        self.varying = self._varying()
        self.level: dict[str, int] = {}
        self._layers(frozenset(ends), longest)
        self.late: set[str] = set(seeds)
        self.anchor: dict[str, int] = {}
        self.done: dict[int, list[str]] = {}
        self.begun = len(self.backward)
        self.hot: set[str] = set()  # late, and of no value that could be known before the forward part has run
        self.gradients = set(training.gradients.values())
        self.starts = list(range(len(self.backward)))
        self.fixed: set[str] = set()
        self._needs()

    def _varying(self) -> set[str]:
        varying = {name for name in self.graph.input_names if name not in self.graph.initializers}
        for node in self.graph.nodes:
            if node.op_type not in SIZES and any(name in varying for name in reads(node)):
                varying.update(filter(None, node.output))
        return varying

    def read_level(self, node: NodeProto) -> int:
        """The highest level that a node reads."""
        return max((self.level.get(name, 0) for name in reads(node) if name in self.varying), default=0)

    def _layers(self, ends: Collection[str], longest: int | None) -> None:
        length: dict[str, int] = {}
        for node in self.forward:
            level = self.read_level(node)
            count = 1 + max((length.get(name, 0) for name in node.input if self.level.get(name) == level), default=0)
            full = longest is not None and (node.op_type in DEAR or count > longest)
            ended = full or node.name in ends or any(name in ends for name in node.output)
            for name in filter(None, node.output):
                self.level[name] = level + ended
                length[name] = 0 if ended else count

    def _needs(self) -> None:
        """Find what is late, and go back from there to what each late node needs of the forward part."""
        for position, node in enumerate(self.backward):
            names = reads(node)
            if not any(name in self.late for name in names):
                continue
            made = list(filter(None, node.output))
            if any(name in self.hot or (name in self.varying and name not in self.late) for name in names):
                self.hot.update(made)
            self.late.update(made)
            self.done[position] = [name for name in made if self._is_tensor(name)]
            self.begun = min(position, self.begun) if self.hot else self.begun
        first: dict[str, int] = {}  # of what is not late
        labels = {node.name: node for node in self.forward}
        for position in reversed(range(len(self.backward))):
            node = self.backward[position]
            is_late = any(name in self.late for name in node.output)
            needed = position if is_late else min((first[name] for name in node.output if name in first), default=None)
            if needed is None:
                continue
            self.starts[position] = needed
            label = next((entry.value for entry in node.metadata_props if entry.key == FORWARD), "")
            level = self.read_level(labels[label]) if label in labels else None
            for name in reads(node):
                if name in self.late:
                    continue
                first[name] = min(needed, first.get(name, needed))
                if level is not None and self.level.get(name, level) != level:
                    self.fixed.add(name)
            if subgraphs(node):
                self.fixed.update(reads(node))
        for name, position in first.items():
            if name in self.made and name in self.varying:
                self.anchor[name] = position
                if position <= self.begun:
                    self.fixed.add(name)

    def seen(self, start: int, end: int) -> list[str]:
        """What shows that the backward part has come to `end`, and is held anyway.

        These are the gradients that the node there reads, and the weights' that nodes from `start` on have made; if
        there are none, what was made last.
        """
        read = [name for name in reads(self.backward[end]) if name in self.hot and self._is_tensor(name)]
        made = [name for position in range(start, end) for name in self.done.get(position, ()) if name in self.hot]
        return [*(name for name in made if name in self.gradients and name not in read), *read] or made[-1:]

    def root(self, name: str) -> str:
        """The value of which `name` is a view, or `name` itself."""
        while (node := self.made.get(name)) is not None and node.op_type in VIEWS and not node.domain:
            if any(other in self.varying for other in node.input[1:]):
                break
            name = node.input[0]
        return name

    def given(self, name: str) -> bool:
        """Whether a value is there anyway: fed, stored, or made of no data."""
        return name not in self.made or name not in self.varying

    def again(self, node: NodeProto) -> bool:
        """Whether a node may run twice: it draws nothing, keeps nothing, has no body, and its purpose is known."""
        if not is_standard(node.domain) or subgraphs(node) or is_random(self.graph, node):
            return False
        if any(a.name == "training_mode" and a.i for a in node.attribute) or node.op_type == "YieldOp":
            return False
        if not all(self._is_tensor(name) for name in (*node.input, *node.output) if name):
            return False
        return any(self.holds(name) for name in node.input)

    def _is_tensor(self, name: str) -> bool:
        found = self.graph.types.get(name)
        return found is not None and found.HasField("tensor_type")

    def holds(self, name: str) -> bool:
        """Whether a value can be held back until the backward part needs it: its rank is known, and not 0."""
        return name in self.varying and bool(shape_of(self.graph.types.get(name)))


class Plan:
    """The choice of what to keep.

    Attributes:
        kept: the forward values that are kept, each by the value of which it is a view.
        dropped: the forward values that the backward part reads and that are computed again for it.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.groups: dict[str, list[str]] = defaultdict(list)
        for name in flow.made:
            if name in flow.anchor and not flow.given(root := flow.root(name)):
                self.groups[root].append(name)
        self.kept = set(self.groups)
        self._may: dict[int, bool] = {}

    def has(self, name: str) -> bool:
        """Whether a value is there when the backward part begins."""
        root = self.flow.root(name)
        return self.flow.given(root) or root in self.kept

    def again(self, node: NodeProto) -> bool:
        """Whether a node may run twice."""
        if id(node) not in self._may:
            self._may[id(node)] = self.flow.again(node)
        return self._may[id(node)]

    @property
    def fixed(self) -> set[str]:
        """The groups that may not be dropped."""
        return {root for root, names in self.groups.items() if not self.flow.fixed.isdisjoint((root, *names))}

    @property
    def dropped(self) -> list[str]:
        """See above; in the order of the forward part."""
        return [name for root, names in self.groups.items() if root not in self.kept for name in names]

    def chain(self, names: Iterable[str], done: Collection[str] = ()) -> tuple[list[NodeProto], set[str]] | None:
        """The nodes that make `names` of what is kept, given or `done`, and the kept values that they read.

        None where one of them may not run twice, or reads what is not kept, of another level.
        """
        nodes: dict[int, NodeProto] = {}
        read: set[str] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            node = self.flow.made[name]
            if name in done or id(node) in nodes:
                continue
            if not self.again(node):
                return None
            nodes[id(node)] = node
            for operand in filter(None, node.input):
                if self.flow.given(operand):
                    continue
                if self.has(operand):
                    read.add(operand)
                elif self.flow.level[operand] == self.flow.level[name]:
                    stack.append(operand)
                else:
                    return None
        return list(nodes.values()), read


def cheap_again(flow: Flow) -> Plan:
    """Compute again what cheap operators make of what is kept anyway."""
    plan = Plan(flow)
    again: set[str] = set()
    open_ = {root for root in plan.groups if flow.made[root].op_type in CHEAP} - plan.fixed
    plan.kept -= open_
    for node in flow.forward:
        may = node.op_type in CHEAP and plan.again(node)
        for name in filter(None, node.output):
            operands = [x for x in node.input if x and not plan.has(x)]
            if may and all(x in again and flow.level[x] == flow.level[name] for x in operands):
                again.add(name)
            elif flow.root(name) in open_:
                plan.kept.add(flow.root(name))
    return plan


def between(flow: Flow, ends: Collection[str]) -> Plan:
    """Compute again what lies between boundaries: `ends`, values or nodes, whose results are kept."""
    plan = Plan(flow)
    keep = plan.fixed
    keep |= {flow.root(name) for name, node in flow.made.items() if name in ends or node.name in ends}
    needed = {name for names in plan.groups.values() for name in names}
    for node in reversed(flow.forward):
        for name in node.output:
            root = flow.root(name)
            if name not in needed or root in keep:
                continue
            if not plan.again(node):
                keep.add(root)
                continue
            for operand in filter(None, node.input):
                if flow.given(operand):
                    continue
                if flow.level[operand] == flow.level[name]:
                    needed.add(operand)
                else:
                    keep.add(flow.root(operand))
    plan.kept = keep
    return plan


def within(flow: Flow, budget: int, sizes: Facts, total: int) -> Plan:
    """Compute again what frees most bytes for an operation, until no more than `budget` of `total` bytes are kept.

    `total` counts what is made of weights alone, too, which is there anyway.
    """
    plan = Plan(flow)
    fixed, done = plan.fixed, set[str]()

    def price(root: str) -> tuple[float, list[NodeProto], set[str]] | None:
        plan.kept.discard(root)
        found = plan.chain(plan.groups[root], done)
        plan.kept.add(root)
        if found is None:
            return None
        try:
            return sum(node_flops(node, sizes) for node in found[0]) / max(size[root], 1), *found
        except LookupError:
            return None

    size = {root: _bytes(root, sizes) for root in plan.groups}
    queue = [(found[0], place, root) for place, root in enumerate(plan.groups) if (found := price(root)) and size[root]]
    heapq.heapify(queue)
    while queue and total > budget:
        _, place, root = heapq.heappop(queue)
        if root in fixed or (found := price(root)) is None:
            continue
        if queue and found[0] > queue[0][0]:  # dearer than it was, for others were dropped meanwhile
            heapq.heappush(queue, (found[0], place, root))
            continue
        plan.kept.discard(root)
        total -= size[root]
        level = {flow.level[name] for name in plan.groups[root]}
        fixed |= {flow.root(name) for name in found[2] if flow.level[name] not in level}
        done.update(name for node in found[1] for name in node.output)
    return plan


def _bytes(name: str, sizes: Facts) -> int:
    try:
        return sizes.bytes(name)
    except LookupError:
        return 0
