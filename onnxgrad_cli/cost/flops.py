"""Count the floating-point operations of nodes from the definitions of their operators, with branches and loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from onnxgrad_cli.cost.facts import Fact, Facts, Sizes, known_sizes
from onnxgrad_cli.cost.steps import FORWARD, VIEWS, ScheduledNode
from onnxgrad_cli.errors import OnnxgradError, Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.iterations import fixed_trips
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import CONTROL_FLOW, attributes_of, subgraphs
from onnxgrad_cli.ir.type_inference import input_types, inside
from onnxgrad_cli.targets.standard import standard_domain

MOVES = VIEWS | frozenset(
    "Cast CastLike Compress Concat ConcatFromSequence Constant ConstantOfShape DepthToSpace Expand EyeLike Gather "
    "GatherElements GatherND MaxUnpool NonZero OneHot OptionalGetElement Pad Range ReverseSequence SequenceAt Shape "
    "Size Slice SpaceToDepth Split SplitToSequence Tile Transpose Trilu Where YieldOp".split()
)
"""Operators that only move elements, so they count no operations."""

SCATTER, REDUCE = "Scatter", "Reduce"
"""Prefixes of operators whose number of operations depends on only some of the values that they read or compute."""

_ELEMENTS, _IS_FLOAT = attrgetter("elements"), attrgetter("is_float")

ShapeOf = Callable[[str], Sizes]


def node_flops(node: Node, facts: Mapping[str, Fact]) -> int:
    """Return the number of floating-point operations of one node.

    - The counts of products (MatMul, Gemm, Conv, ConvTranspose, Einsum, Attention, RNN, GRU, LSTM) are exact, except
      for activation functions inside them.
    - A pooling counts one operation for each element of its windows.
    - An operator that only moves elements counts 0.
    - Any other operator counts one operation per element of its largest operand or result. This underestimates
      functions such as Exp or Softmax.

    Args:
        node: the node.
        facts: the shapes of its values.

    Raises:
        LookupError: the rank of an operand is unknown.

    Source: the operators' definitions at https://onnx.ai/onnx/operators; 2 operations for a multiply-add as in NVIDIA's
    Matrix Multiplication Background User's Guide.
    """
    op_type = node.op_type
    if op_type in MOVES:
        return 0
    exact = EXACT.get(op_type)
    if exact is not None and not standard_domain(node.domain):
        return exact(node, lambda name: facts[name].shape)
    if op_type.startswith(SCATTER):
        return facts[node.input[2]].elements if attributes_of(node).get("reduction", b"none") != b"none" else 0
    if op_type.startswith(REDUCE):
        return facts[node.input[0]].elements if facts[node.input[0]].is_float else 0
    read = list(map(facts.__getitem__, filter(None, node.input[:])))
    made = list(map(facts.__getitem__, filter(None, node.output[:])))
    if not any(map(_IS_FLOAT, made + read[:1])):
        return 0
    return int(max(map(_ELEMENTS, made + read)))


def _bias(node: Node, out: int) -> int:
    position = 3 if node.op_type == "DeformConv" else 2
    return out if len(node.input) > position and node.input[position] else 0


def _matmul(node: Node, shape: ShapeOf) -> int:
    """Return 2 · elements of the result · inner size.

    The inner size is the larger one in the two factors, because an unknown size counts as 1.
    """
    left, right = (shape(name) for name in node.input)
    return 2 * math.prod(shape(node.output[0])) * max(left[-1], right[max(len(right) - 2, 0)])


def _gemm(node: Node, shape: ShapeOf) -> int:
    """Return 2 · M · N · K, plus M · N for the bias C."""
    inner = shape(node.input[0])[0 if attributes_of(node).get("transA", 0) else 1]
    out = math.prod(shape(node.output[0]))
    return 2 * out * inner + _bias(node, out)


def _conv(node: Node, shape: ShapeOf) -> int:
    """Return 2 · elements of the result · C / group · kernel, plus the bias. The weight is [M, C / group, *kernel]."""
    out = math.prod(shape(node.output[0]))
    return 2 * out * math.prod(shape(node.input[1])[1:]) + _bias(node, out)


def _conv_transpose(node: Node, shape: ShapeOf) -> int:
    """Return 2 · elements of the input · M / group · kernel, plus the bias. The weight is [C, M / group, *kernel]."""
    product = 2 * math.prod(shape(node.input[0])) * math.prod(shape(node.input[1])[1:])
    return product + _bias(node, math.prod(shape(node.output[0])))


def _einsum(node: Node, shape: ShapeOf) -> int:
    """Count n - 1 multiplications for n operands, and an addition if any index is summed, per point of index space."""
    equation = attributes_of(node).get("equation", b"").decode().replace(" ", "")
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
    """Return 2 · heads · S · T · (head size + value head size) for each sample, with S queries and T keys."""
    q, k, v = (shape(name) for name in node.input[:3])
    past = shape(node.input[4])[-2] if len(node.input) > 4 and node.input[4] else 0
    keys = k[-2] + past
    if len(q) == 4:
        return 2 * q[0] * q[1] * q[2] * keys * (q[3] + v[3])
    given = attributes_of(node)
    heads, kv_heads = given.get("q_num_heads", 1), given.get("kv_num_heads", 1)
    return 2 * q[0] * q[1] * keys * (q[2] + heads * v[2] // kv_heads)


def _recurrent(node: Node, shape: ShapeOf) -> int:
    """Return 2 · sequence · batch · (elements of W and R), because each weight is used once per step and sample."""
    steps = math.prod(shape(node.input[0])[:2])
    return 2 * steps * (math.prod(shape(node.input[1])) + math.prod(shape(node.input[2])))


def _pool(node: Node, shape: ShapeOf) -> int:
    """Return one operation per element of each window."""
    return math.prod(shape(node.output[0])) * math.prod(attributes_of(node).get("kernel_shape", [1]))


EXACT: dict[str, Callable[[Node, ShapeOf], int]] = {
    "MatMul": _matmul, "Gemm": _gemm,
    "Conv": _conv, "DeformConv": _conv, "ConvTranspose": _conv_transpose,
    "Einsum": _einsum, "Attention": _attention,
    "RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent,
    "AveragePool": _pool, "MaxPool": _pool, "LpPool": _pool,
}  # fmt: skip
"""Operator -> the function that counts its operations from its definition."""


Flops = Mapping[str, int]
"""Operator -> number of operations."""


def operations(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Return the number of floating-point operations of one run of a graph, as far as it is known.

    Args:
        graph: the model, typed.
        sizes: symbol -> its size. Other symbols get size 1, or more if the network can't take such a small input.
    """
    _, _, facts = known_sizes(graph, sizes)
    return sum(sum(_count(graph, node, facts, Counter()).values()) for node in graph.nodes)


def operations_by_part(
    graph: Graph, steps: Iterable[ScheduledNode], facts: Facts
) -> tuple[dict[str, Counter[str]], list[int], Counter[str]]:
    """Count the FLOPs of the nodes of a training model.

    Returns:
        1. Part ('forward', 'backward' or 'optimizer') -> operator -> FLOPs.
        2. The FLOPs of each node, including its bodies.
        3. Operator -> the number of its nodes whose cost is unknown.
    """
    flops: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter(), "optimizer": Counter()}
    own, uncounted = list[int](), Counter[str]()
    for step in steps:
        counts = _count(graph, step.node, facts, uncounted)
        flops["forward" if step.part in FORWARD else step.part].update(counts)
        own.append(sum(counts.values()))
    return flops, own, uncounted


def _count(graph: Graph, node: Node, facts: Facts, uncounted: Counter[str]) -> Flops:
    """Return operator -> FLOPs, for a node and its bodies. A node of unknown cost is counted in `uncounted` instead."""
    try:
        if node.op_type in CONTROL_FLOW:
            return _count_bodies(graph, node, facts, uncounted)
        return {node.op_type: node_flops(node, facts)}
    except (LookupError, Unknown, OnnxgradError):  # OnnxgradError: a body can't be typed on its own
        uncounted[node.op_type] += 1
        return {}


def _count_bodies(graph: Graph, node: Node, facts: Facts, uncounted: Counter[str]) -> Flops:
    """Return operator -> FLOPs, for the more expensive branch of an If, or for all iterations of a loop."""
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
    """Return the number of times that a body runs in one run of its node.

    Raises:
        LookupError: the number is unknown.
    """
    if node.op_type == "Loop":
        trips = fixed_trips(graph, node, body)
        if trips is None:
            raise LookupError(node.name)
        return trips
    if node.op_type == "Scan":
        given = attributes_of(node)
        first, axis = given.get("num_scan_inputs", 0), given.get("scan_input_axes", [0])[0]
        return facts[node.input[-first]].shape[axis]
    return 1
