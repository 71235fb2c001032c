"""The floating-point operations of one node, from the definition of its operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter

from onnxgrad_cli.cost.facts import Fact, Sizes
from onnxgrad_cli.cost.steps import VIEWS
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.targets.standard import standard_domain

MOVES = VIEWS | frozenset(
    "Cast CastLike Compress Concat ConcatFromSequence Constant ConstantOfShape DepthToSpace Expand EyeLike Gather "
    "GatherElements GatherND MaxUnpool NonZero OneHot OptionalGetElement Pad Range ReverseSequence SequenceAt Shape "
    "Size Slice SpaceToDepth Split SplitToSequence Tile Transpose Trilu Where YieldOp".split()
)
"""Operators that move numbers and compute none."""

SCATTER, REDUCE = PARTLY_READ = ("Scatter", "Reduce")
"""What the names of operators begin with that compute with some of what they read."""

_ELEMENTS, _IS_FLOAT = attrgetter("elements"), attrgetter("is_float")

ShapeOf = Callable[[str], Sizes]


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
    """2 · elements of the result · inner size, which both factors have: one may know what counts as 1 in the other."""
    left, right = (shape(name) for name in node.input)
    return 2 * math.prod(shape(node.output[0])) * max(left[-1], right[max(len(right) - 2, 0)])


def _gemm(node: Node, shape: ShapeOf) -> int:
    """2·M·N·K, and M·N for the addend."""
    inner = shape(node.input[0])[0 if attributes_of(node).get("transA", 0) else 1]
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
    """Query times key and weights times value: 2 · heads · S · T · (head size + value head size) a sample."""
    q, k, v = (shape(name) for name in node.input[:3])
    past = shape(node.input[4])[-2] if len(node.input) > 4 and node.input[4] else 0
    keys = k[-2] + past
    if len(q) == 4:
        return 2 * q[0] * q[1] * q[2] * keys * (q[3] + v[3])
    given = attributes_of(node)
    heads, kv_heads = given.get("q_num_heads", 1), given.get("kv_num_heads", 1)
    return 2 * q[0] * q[1] * keys * (q[2] + heads * v[2] // kv_heads)


def _recurrent(node: Node, shape: ShapeOf) -> int:
    """2 · sequence · batch · (elements of W and R): each weight is used once a step and sample."""
    steps = math.prod(shape(node.input[0])[:2])
    return 2 * steps * (math.prod(shape(node.input[1])) + math.prod(shape(node.input[2])))


def _pool(node: Node, shape: ShapeOf) -> int:
    """One operation per element of each window."""
    return math.prod(shape(node.output[0])) * math.prod(attributes_of(node).get("kernel_shape", [1]))


EXACT: dict[str, Callable[[Node, ShapeOf], int]] = {
    "MatMul": _matmul, "Gemm": _gemm,
    "Conv": _conv, "DeformConv": _conv, "ConvTranspose": _conv_transpose,
    "Einsum": _einsum, "Attention": _attention,
    "RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent,
    "AveragePool": _pool, "MaxPool": _pool, "LpPool": _pool,
}  # fmt: skip
"""Operators whose operations are counted from their definition."""
