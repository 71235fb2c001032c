"""What a training model costs to run, counted from its types alone: operations, and bytes kept for the backward part.

The figures let a user compare models and batch sizes before running anything. They are counts, not times: a
floating-point operation (FLOP) is one addition or multiplication, so a multiply-add counts as two. What runs at some
runs only (a branch, the step after gathered gradients) counts as if it did at each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.errors import OnnxgradError, Unknown
from onnxgrad_cli.ir.execution_order import run_order
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import fixed_trips, follow_shapes, input_types, inside
from onnxgrad_cli.ir.modules import module_finder
from onnxgrad_cli.ir.node import FORWARD as FORWARD_OF, Node, metadata_of
from onnxgrad_cli.ir.nodes import CONTROL_FLOW, reads, subgraphs, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import dtype_of, is_float, itemsize, nbytes, shape_of
from onnxgrad_cli.record import StepRecord, parts
from onnxgrad_cli.targets.standard import standard_domain

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class OperatorCost:
    """The FLOPs of all nodes of one operator."""

    op: str
    forward: int
    backward: int


@dataclass(frozen=True)
class ModuleCost:
    """The FLOPs of all nodes of one module, and of what differentiates them; "" is what lies in no module."""

    module: str
    forward: int
    backward: int


@dataclass(frozen=True)
class Kept:
    """A value of the forward part that the backward part reads, so that it stays in memory between them."""

    name: str
    op: str
    shape: Sizes
    bytes: int


@dataclass(frozen=True)
class Cost:
    """What one run of the training model costs.

    Attributes:
        sizes: the size each symbol was given.
        assumed: the sizes of symbols that nobody gave one: 1, or more where a network can't take so little.
        at_run_time: how many values have a size that is known at run time only; it counts as 1.
        nodes: 'model', 'loss', 'backward' and 'optimizer' -> how many nodes.
        flops_forward, flops_backward, flops_optimizer: floating-point operations.
        weight_bytes: the size of the trained weights.
        gradient_bytes: the size of the gradients.
        kept_bytes: the size of all forward values that the backward part reads; weights and inputs don't count,
            and a value counts once however it is reshaped.
        kept: the largest of them.
        operators: the FLOPs by operator, dearest first.
        modules: the FLOPs by module, in the model's order; empty where nothing tells modules apart.
        memory: the bytes of all values that are still to be read, after each node in the order in which onnxruntime
            runs them, or after the one in each of 200 runs of nodes at which they are most; without weights and inputs.
        branches: how many If there are, in bodies too; of each the dearer branch counts.
        uncounted: operator -> nodes whose cost is unknown: loops of unknown length, and values of unknown rank.
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


LARGER = (8, 64, 512, 4096, 32768)
"""What one symbol without a size counts as, or all, where 1 is too short: the first that a network can take."""

MODULES = 30
"""Modules up to which a level of them is told."""

COURSE = 200
"""Points of the course of the memory."""

LARGEST = 8
"""How many of the kept values are listed."""

NEVER, GONE = -1, -2
"""In place of the last node, in an order, that reads a value: that there is none, and that it has run."""

VIEWS = frozenset("Flatten Identity Reshape Squeeze Unsqueeze".split())
"""Operators whose output is their input's memory under another shape."""

IN_PLACE = frozenset(
    "Abs Add Cast Ceil Clip Cos Div Elu Erf Exp Floor Identity LeakyRelu Log Mul Neg Not Pow Reciprocal Relu Sigmoid "
    "Sign Sin Softmax Softplus Sqrt Sub Sum Tanh Where".split()
)
"""Operators whose result runtimes write over an operand of its size that nobody reads any more."""

MOVES = VIEWS | frozenset(
    "Cast CastLike Compress Concat ConcatFromSequence Constant ConstantOfShape DepthToSpace Expand EyeLike Gather "
    "GatherElements GatherND MaxUnpool NonZero OneHot OptionalGetElement Pad Range ReverseSequence SequenceAt Shape "
    "Size Slice SpaceToDepth Split SplitToSequence Tile Transpose Trilu Where YieldOp".split()
)
"""Operators that move numbers and compute none."""

SCATTER, REDUCE = PARTLY_READ = ("Scatter", "Reduce")
"""What the names of operators begin with that compute with some of what they read."""

FORWARD = ("model", "loss")
"""The parts of a training model that come before its backward part."""


def cost(graph: Graph, training: StepRecord, sizes: Mapping[str, int] | None = None) -> Cost:
    """Count operations and kept bytes of a training model, or of as much of it as there is.

    Args:
        graph: the model, typed.
        training: what the passes know of it.
        sizes: symbol -> size; see `Cost.assumed` for those without one.
    """
    given, assumed, facts = known_sizes(graph, sizes or {})
    steps = steps_of(graph.nodes, parts(graph, training))
    count = Counter(step.part for step in steps)
    flops, flops_of, uncounted = _operations(graph, steps, facts)
    kept_bytes, kept, unknown = _kept(steps, facts)
    uncounted.update(unknown)
    weight_bytes = sum(nbytes(graph.initializers[name]) for name in training.trained)
    input_bytes, unknown_inputs = _known_bytes(training.grad_of_input, facts)
    if unknown_inputs:
        uncounted["input"] += unknown_inputs
    return Cost(
        sizes=given,
        assumed=assumed,
        at_run_time=facts.guesses,
        nodes={part: count[part] for part in (*FORWARD, "backward", "optimizer")},
        flops_forward=flops["forward"].total(),
        flops_backward=flops["backward"].total(),
        flops_optimizer=flops["optimizer"].total(),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes + input_bytes,
        kept_bytes=kept_bytes,
        kept=kept,
        operators=_by_operator(flops["forward"], flops["backward"]),
        modules=_by_module(graph, steps, flops_of),
        memory=_memory(steps, graph.output_names, facts),
        branches=sum(node.op_type == "If" for node in with_bodies(s.node for s in steps if s.op_type in CONTROL_FLOW)),
        uncounted=dict(uncounted),
    )


def operations(graph: Graph, sizes: Mapping[str, int]) -> int:
    """The floating-point operations of one run of a graph, as far as they are known.

    Args:
        graph: the model, typed.
        sizes: symbol -> size; see `Cost.assumed` for those without one.
    """
    _, _, facts = known_sizes(graph, sizes)
    return sum(sum(_count(graph, node, facts, Counter()).values()) for node in graph.nodes)


class Step(NamedTuple):
    """A node and what is asked of it again and again, read once: each look into a node copies its words.

    Attributes:
        node: itself.
        op_type: its operator.
        part: of the training model.
        reads: the values that it reads, in bodies too.
        made: the values that it makes.
        shows: the value whose memory its result is, under another shape; "" where it is no view.
    """

    node: Node
    op_type: str
    part: str
    reads: Sequence[str]
    made: Sequence[str]
    shows: str


def steps_of(nodes: Iterable[Node], where: Iterable[str]) -> list[Step]:
    """Nodes, in order, each of its part of a training model."""
    found = []
    for node, part in zip(nodes, where, strict=False):
        op_type, made = node.op_type, node.output
        is_view = op_type in VIEWS and not node.domain
        made = [name for name in made if name] if "" in made else made
        found.append(Step(node, op_type, part, reads(node), made, node.input[0] if is_view else ""))
    return found


Flops = Mapping[str, int]
"""Operations by operator."""


def _operations(
    graph: Graph, steps: Iterable[Step], facts: Facts
) -> tuple[dict[str, Counter[str]], list[int], Counter[str]]:
    """The FLOPs of forward part, backward part and optimizer, by operator; those of each node, with its bodies; and
    the operators whose cost is unknown."""
    flops: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter(), "optimizer": Counter()}
    own, uncounted = list[int](), Counter[str]()
    known: dict[tuple[object, ...], int] = {}
    for step in steps:
        total = flops["forward" if step.part in FORWARD else step.part]
        alike = _alike(step.node, facts)
        if alike in known:
            total[step.op_type] += known[alike]
            own.append(known[alike])
            continue
        counts = _count(graph, step.node, facts, uncounted)
        total.update(counts)
        own.append(sum(counts.values()))
        if alike and counts:
            known[alike] = own[-1]
    return flops, own, uncounted


def _alike(node: Node, facts: Facts) -> tuple[object, ...]:
    """What is the same for nodes that compute one number for each element; () of others."""
    if node.attribute or node.op_type in MOVES or node.op_type in EXACT or node.op_type.startswith(PARTLY_READ):
        return ()
    try:
        known = facts.__getitem__
        return (node.op_type, node.domain, *map(id, map(known, node.input)), "->", *map(id, map(known, node.output)))
    except LookupError:  # something is unknown, or left out
        return ()


def _input_symbols(graph: Graph) -> list[str]:
    """The symbols in the types of the graph's inputs, each once, in order."""
    distinct = {id(value_type): value_type for value_type in map(graph.types.get, graph.input_names)}
    return list(dict.fromkeys(dim for value_type in distinct.values() for dim in _symbols(value_type)))


def _known_bytes(names: Iterable[str], facts: Facts) -> tuple[int, int]:
    """The bytes of values together, and how many of the values have an unknown size."""
    total = unknown = 0
    for name in names:
        try:
            total += facts.bytes(name)
        except LookupError:
            unknown += 1
    return total, unknown


def _by_operator(forward: Counter[str], backward: Counter[str]) -> list[OperatorCost]:
    """The operators that compute something, the dearest first."""
    costs = [OperatorCost(op, forward[op], backward[op]) for op in sorted({*forward, *backward})]
    return sorted((c for c in costs if c.forward + c.backward), key=lambda c: -c.forward - c.backward)


def _by_module(graph: Graph, steps: Sequence[Step], own: Sequence[int]) -> list[ModuleCost]:
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


def live_bytes(
    steps: Sequence[Step], outputs: Iterable[str], facts: Facts, elsewhere: Collection[str] = ()
) -> list[int]:
    """The bytes of all values alive after each node, in the order in which onnxruntime runs them.

    A value is alive from the node that makes it to the last one that reads it; a view is the memory of what it shows,
    and a result of an elementwise operator takes the place of an operand that nobody reads any more, as runtimes have
    it. Weights and inputs don't count.

    Args:
        steps: the nodes of a training model, or some of them.
        outputs: values that stay alive to the end.
        facts: the size of every value; what has none counts as nothing.
        elsewhere: values that are written to memory which is there already.
    """
    numbers = {name: at for at, name in enumerate(chain.from_iterable(step.made for step in steps))}
    reads = [[numbers[name] for name in step.reads if name in numbers] for step in steps]
    made = [[numbers[name] for name in step.made] for step in steps]
    order = run_order(reads, made)
    sizes = [0 if name in elsewhere else facts.bytes_or_nothing(name) for name in numbers]
    owner, last = list(range(len(numbers))), [NEVER] * len(numbers)
    for i, at in enumerate(order):
        if steps[at].shows:
            (view, *_), shown = made[at], numbers.get(steps[at].shows)
            owner[view], sizes[view] = view if shown is None else owner[shown], 0
        for value in reads[at]:
            last[owner[value]] = i
    for name in outputs:
        if name in numbers:
            last[owner[numbers[name]]] = len(order)
    alive, course = 0, list[int]()
    for i, at in enumerate(order):
        new = unread = gone = taken = 0
        for value in made[at]:
            new += sizes[value]
            unread += sizes[value] if last[value] == NEVER else 0
        first = sizes[made[at][0]] if made[at] else 0
        for value in reads[at]:
            value = owner[value]
            if last[value] == i:
                last[value] = GONE
                gone += sizes[value]
                taken = first if sizes[value] == first else taken
        course.append(alive + new - (taken if steps[at].op_type in IN_PLACE else 0))
        alive += new - gone - unread
    return course


def _memory(steps: Sequence[Step], outputs: Iterable[str], facts: Facts) -> list[int]:
    """The course of `live_bytes`: of each of `COURSE` runs of nodes the most."""
    course = live_bytes(steps, outputs, facts)
    size = -(-len(course) // COURSE) or 1
    return [max(course[i : i + size]) for i in range(0, len(course), size)]


def _count(graph: Graph, node: Node, facts: Facts, uncounted: Counter[str]) -> Flops:
    """The FLOPs of a node and of its bodies, by operator; where they are unknown, the node is added to `uncounted`."""
    try:
        if node.op_type in CONTROL_FLOW:
            return _count_bodies(graph, node, facts, uncounted)
        return {node.op_type: node_flops(node, facts)}
    except (LookupError, Unknown, OnnxgradError):  # the last where a body can't be typed on its own
        uncounted[node.op_type] += 1
        return {}


def _count_bodies(graph: Graph, node: Node, facts: Facts, uncounted: Counter[str]) -> Flops:
    """Those of the dearer branch of an If, or of the body of a loop as often as it runs."""
    types = input_types(graph, node)
    bodies = [inside(graph, body, types) for body in subgraphs(node)]
    times = _times(graph, node, bodies[0], facts)
    counts: list[Counter[str]] = []
    for body in bodies:
        counts.append(Counter())
        known = facts.inside(body)
        for each in body.nodes:
            counts[-1].update(_count(body, each, known, uncounted))
    dearest = max(counts, key=Counter.total)
    return {op_type: times * count for op_type, count in dearest.items()}


def _times(graph: Graph, node: Node, body: Graph, facts: Facts) -> int:
    """How often a body runs in one run of its node; raises LookupError where that is unknown."""
    if node.op_type == "Loop":
        trips = fixed_trips(graph, node, body)
        if trips is None:
            raise LookupError(node.name)
        return trips
    if node.op_type == "Scan":
        first = _attribute(node, "num_scan_inputs", 0)
        axis = _attribute(node, "scan_input_axes", [0])[0]
        return facts[node.input[-first]].shape[axis]
    return 1


def _kept(steps: Iterable[Step], facts: Facts) -> tuple[int, list[Kept], Counter[str]]:
    """The bytes that are kept, the largest of what is, and the operators of results whose size is unknown."""
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
    largest = sorted(kept, key=kept.__getitem__, reverse=True)[:LARGEST]
    return sum(kept.values()), [Kept(n, made[n], facts[n].shape, kept[n]) for n in largest], unknown


class Fact(NamedTuple):
    """What is known of a value: its shape in numbers, how many elements and bytes it has, and of what type."""

    shape: Sizes
    elements: int
    dtype: int
    bytes: int | None
    is_float: bool
    guessed: bool


_ELEMENTS, _IS_FLOAT = attrgetter("elements"), attrgetter("is_float")


def is_known(value_type: TypeProto | None) -> bool:
    """Whether a type has a shape, and every size of it is a number."""
    shape = shape_of(value_type)
    return shape is not None and all(isinstance(size, int) for size in shape)


def known_sizes(graph: Graph, sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int], Facts]:
    """What is known of a graph's values.

    A convolution makes a negative size of an input shorter than its kernel: symbols without a size get the least
    one of which no value is too short.

    Args:
        graph: the model, typed.
        sizes: symbol -> size; those of other graphs don't matter.

    Returns:
        The sizes of the symbols in the inputs' types that have one, those that were assumed for the others, and what
        is known of each value with them.
    """
    own = _input_symbols(graph)
    given = {symbol: int(sizes[symbol]) for symbol in own if symbol in sizes}
    free = [symbol for symbol in own if symbol not in given]
    ones = dict.fromkeys(free, 1)
    facts = Facts(graph, {**given, **ones})
    if facts.too_short:
        larger = (ones | dict.fromkeys(some, size) for size in LARGER for some in (*([one] for one in free), free))
        for assumed in larger:
            longer = Facts(graph, {**given, **assumed})
            if not longer.too_short:
                return given, assumed, longer
    return given, ones, facts


class Facts(dict[str, Fact]):
    """The shape of every value in numbers.

    With the inputs' symbols replaced by `sizes`, most shapes are known. Where there are other symbols, shape inference
    on those sizes finds them; what it can't (a size that an operator computes) counts as 1. Values share few types,
    so each type is read once.
    """

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self._types = graph.types
        self._by_type: dict[tuple[int, int], Fact] = {}
        self._sizes = dict(sizes)
        self._exact: dict[str, TypeProto] = {}
        self._bodies: list[Facts] = []
        symbols = {symbol for value_type in graph.distinct_types() for symbol in _symbols(value_type)}
        if sizes and not symbols <= sizes.keys():
            self._exact = self._infer(graph)

    @property
    def too_short(self) -> bool:
        """Whether a value would have a negative size."""
        return any(isinstance(n, int) and n < 0 for each in self._exact.values() for n in shape_of(each) or ())

    def inside(self, body: Graph) -> Facts:
        """What is known of the values in a body: symbols have the sizes there that they have here."""
        self._bodies.append(Facts(body, self._sizes))
        return self._bodies[-1]

    def _infer(self, graph: Graph) -> dict[str, TypeProto]:
        bare = graph.skeleton()
        stated = list(bare.graph.value_info)
        del bare.graph.value_info[:]
        for value in (*bare.graph.input, *bare.graph.output):
            self._put_sizes(value.type)
        exact = self._inferred(graph, bare)
        more = [value for value in stated if not is_known(exact.get(value.name)) and self._put_sizes(value.type)]
        if not more:
            return exact
        bare.graph.value_info.extend(more)  # what only its statement tells: its symbols are known by now
        return self._inferred(graph, bare)

    def _put_sizes(self, value_type: TypeProto) -> bool:
        """Write the sizes of symbols into a type; whether all of them are known."""
        for dim in value_type.tensor_type.shape.dim:
            if not dim.HasField("dim_value") and (dim.dim_param or "?") in self._sizes:
                dim.dim_value = self._sizes[dim.dim_param or "?"]
        return is_known(value_type)

    def _inferred(self, graph: Graph, bare: ModelProto) -> dict[str, TypeProto]:
        """The types of a model whose inputs have sizes, from which follow those of the graph's other symbols."""
        try:
            found = (follow_shapes(graph, bare) or infer_shapes(bare)).graph
        except onnx.shape_inference.InferenceError:  # no model for these sizes: symbols alone must do
            return {}
        exact = {value.name: value.type for value in (*found.value_info, *found.output)}
        for name, value_type in exact.items():
            before, now = shape_of(graph.types.get(name)), shape_of(value_type)
            if before is not None and now is not None and len(before) == len(now):
                for symbol, size in zip(before, now, strict=True):
                    if isinstance(symbol, str) and symbol != "?" and isinstance(size, int):
                        self._sizes.setdefault(symbol, size)
        return exact

    def __missing__(self, name: str) -> Fact:
        """What is known of a value; raises LookupError where its rank is unknown."""
        built, exact = self._types.get(name), self._exact.get(name)
        if built is None:
            raise LookupError(name)
        key = (id(built), id(exact))  # both live as long as this
        if key not in self._by_type:
            self._by_type[key] = self._fact(built, exact)
        self[name] = self._by_type[key]
        return self[name]

    def _fact(self, value_type: TypeProto, exact_type: TypeProto | None) -> Fact:
        built, exact = shape_of(value_type), shape_of(exact_type)
        if built is None or (exact is not None and len(exact) != len(built)):
            built = exact
        if built is None:
            raise LookupError
        known = [
            next(
                (s for s in (now, dim, self._sizes.get(str(now)), self._sizes.get(str(dim))) if isinstance(s, int)),
                None,
            )
            for dim, now in zip(built, exact or built, strict=True)
        ]
        shape = tuple(1 if found is None else found for found in known)
        elements, dtype, size = math.prod(shape), dtype_of(value_type), None
        with suppress(LookupError):  # an unknown type
            size = elements * itemsize(dtype)
        return Fact(shape, elements, dtype, size, is_float(value_type), None in known)

    def bytes(self, name: str) -> int:
        """The size of a value in bytes; raises LookupError where its rank or its type is unknown."""
        size = self[name].bytes
        if size is None:
            raise LookupError(name)
        return size

    def bytes_or_nothing(self, name: str) -> int:
        """The size of a value in bytes, 0 where it is unknown."""
        try:
            return self[name].bytes or 0
        except LookupError:
            return 0

    @property
    def guesses(self) -> int:
        """How many of the values asked for have a size that counts as 1 because nothing is known of it."""
        return sum(fact.guessed for fact in self.values()) + sum(body.guesses for body in self._bodies)


def _symbols(value_type: TypeProto | None) -> list[str]:
    return [dim for dim in shape_of(value_type) or () if isinstance(dim, str)]


def node_flops(node: Node, facts: Mapping[str, Fact]) -> int:
    """The floating-point operations of one node, whose values `facts` knows.

    Products (MatMul, Gemm, Conv, ConvTranspose, Einsum, Attention, RNN, GRU, LSTM) are exact but for activation
    functions inside; a pooling counts its windows; what moves numbers counts 0; everything else counts one operation
    per element of its largest operand or result, so that functions such as Exp or Softmax are underestimated.

    Raises:
        LookupError: the rank of an operand is unknown.

    Source: the operators' definitions at https://onnx.ai/onnx/operators; 2 operations for a multiply-add as in
    NVIDIA's Matrix Multiplication Background User's Guide.
    """
    op_type = node.op_type
    if op_type in MOVES:
        return 0
    exact = EXACT.get(op_type)
    if exact is not None and not standard_domain(node.domain):
        return exact(node, lambda name: facts[name].shape)
    if op_type.startswith(SCATTER):
        return facts[node.input[2]].elements if _attribute(node, "reduction", b"none") != b"none" else 0
    if op_type.startswith(REDUCE):
        return facts[node.input[0]].elements if facts[node.input[0]].is_float else 0
    read = list(map(facts.__getitem__, filter(None, node.input[:])))
    made = list(map(facts.__getitem__, filter(None, node.output[:])))
    if not any(map(_IS_FLOAT, made + read[:1])):
        return 0
    return int(max(map(_ELEMENTS, made + read)))


ShapeOf = Callable[[str], Sizes]


def _attribute(node: Node, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def _bias(node: Node, out: int) -> int:
    position = 3 if node.op_type == "DeformConv" else 2
    return out if len(node.input) > position and node.input[position] else 0


def _matmul(node: Node, shape: ShapeOf) -> int:
    """2 · elements of the result · inner size, which both factors have: one may know what counts as 1 in the other."""
    left, right = (shape(name) for name in node.input)
    return 2 * math.prod(shape(node.output[0])) * max(left[-1], right[max(len(right) - 2, 0)])


def _gemm(node: Node, shape: ShapeOf) -> int:
    """2·M·N·K, and M·N for the addend."""
    inner = shape(node.input[0])[0 if _attribute(node, "transA", 0) else 1]
    out = math.prod(shape(node.output[0]))
    return 2 * out * inner + _bias(node, out)


def _conv(node: Node, shape: ShapeOf) -> int:
    """2 · elements of the result · (C / group · kernel), the weight being [M, C / group, *kernel]; and the bias."""
    out = math.prod(shape(node.output[0]))
    return 2 * out * math.prod(shape(node.input[1])[1:]) + _bias(node, out)


def _conv_transpose(node: Node, shape: ShapeOf) -> int:
    """2 · elements of the input · (M / group · kernel), the weight being [C, M / group, *kernel]; and the bias."""
    product = 2 * math.prod(shape(node.input[0])) * math.prod(shape(node.input[1])[1:])
    return product + _bias(node, math.prod(shape(node.output[0])))


def _einsum(node: Node, shape: ShapeOf) -> int:
    """For n operands, n - 1 products and, if an index is summed, one addition, at each point of the index space."""
    equation = _attribute(node, "equation", b"").decode().replace(" ", "")
    left, arrow, right = equation.partition("->")
    space: dict[str, int] = {}
    terms = left.split(",")
    for term, name in zip(terms, node.input, strict=False):
        dims = shape(name)
        head, dots, tail = term.partition("...")
        free = [f".{i}" for i in range(len(head) + len(tail) - len(dims), 0)] if dots else []
        for index, size in zip([*head, *free, *tail], dims, strict=False):
            space[index] = max(size, space.get(index, 1))
    written = right if arrow else {index for index in left if left.count(index) == 1}
    summed = any(index not in written for index in space if not index.startswith("."))
    return (len(terms) - 1 + summed) * math.prod(space.values())


def _attention(node: Node, shape: ShapeOf) -> int:
    """Query times key and weights times value: 2 · heads · S · T · (head size + value head size) a sample."""
    q, k, v = (shape(name) for name in node.input[:3])
    past = shape(node.input[4])[-2] if len(node.input) > 4 and node.input[4] else 0
    keys = k[-2] + past
    if len(q) == 4:
        return 2 * q[0] * q[1] * q[2] * keys * (q[3] + v[3])
    heads, kv_heads = _attribute(node, "q_num_heads", 1), _attribute(node, "kv_num_heads", 1)
    return 2 * q[0] * q[1] * keys * (q[2] + heads * v[2] // kv_heads)


def _recurrent(node: Node, shape: ShapeOf) -> int:
    """2 · sequence · batch · (elements of W and R): each weight is used once a step and sample."""
    steps = math.prod(shape(node.input[0])[:2])
    return 2 * steps * (math.prod(shape(node.input[1])) + math.prod(shape(node.input[2])))


def _pool(node: Node, shape: ShapeOf) -> int:
    """One operation per element of each window."""
    return math.prod(shape(node.output[0])) * math.prod(_attribute(node, "kernel_shape", [1]))


EXACT: dict[str, Callable[[Node, ShapeOf], int]] = {
    "MatMul": _matmul, "Gemm": _gemm,
    "Conv": _conv, "DeformConv": _conv, "ConvTranspose": _conv_transpose,
    "Einsum": _einsum, "Attention": _attention,
    "RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent,
    "AveragePool": _pool, "MaxPool": _pool, "LpPool": _pool,
}  # fmt: skip
"""Operators whose operations are counted from their definition."""
