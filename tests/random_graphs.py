"""Draw random graphs for tests/test_random_graphs.py. They combine operators in ways that one-node tests don't.

A program is drawn step by step. Each step chooses existing values, which may then have several readers, and an operator
that accepts them, and adds new leaves if an operand is missing. The shape of every value and a bound of its elements
are known, so that no value overflows and no logarithm has a negative argument. Smaller draws give smaller programs, so
hypothesis can shrink them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

OPSETS = (16, 17, 18, 20, 21, 23, 25)
OLDER = (13, 14, 15)
"""Opsets that a build converts to a newer one if a rule requires it. A reverse walk without a build does not."""

LARGE = 30.0


@dataclass(frozen=True)
class Value:
    """A value of the program: its name, its shape, and a bound of the magnitude of its elements."""

    name: str
    shape: tuple[int, ...]
    bound: float

    @property
    def rank(self) -> int:
        return len(self.shape)


class Program:
    """A random program: nodes, leaves (float64, all differentiated), constants, and one to three outputs."""

    def __init__(self, draw: Any, opsets: Sequence[int]) -> None:
        self.draw = draw
        self.opset: int = draw(st.sampled_from(opsets))
        self.seed: int = draw(st.integers(0, 2**16))
        self.by_reference = self.number(0, 3) == 3
        """True if the program may have operators without a float64 kernel in onnxruntime."""

        self.nodes: list[onnx.NodeProto] = []
        self.values: list[Value] = []
        self.leaves: list[Value] = []
        self.outputs: list[Value] = []
        self.constants: list[onnx.TensorProto] = []
        self.symbols: dict[tuple[str, int], str] = {}

    # -- drawing ------------------------------------------------------------------------------------------

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def some(self, keep: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """Return an existing value that satisfies a condition, or None. Smaller draws choose newer values."""
        fitting = [value for value in reversed(self.values) if keep(value)]
        return self.pick(fitting) if fitting else None

    def leaf(self, shape: Sequence[int]) -> Value:
        """Add and return a new leaf: an input or a weight with elements between -2 and 2."""
        value = Value(f"x{len(self.leaves)}", tuple(shape), 2.0)
        self.leaves.append(value)
        self.values.append(value)
        for axis, size in enumerate(shape):
            symbol = self.pick(["", f"n{size}", f"{value.name}_{axis}"])
            if symbol:
                self.symbols[value.name, axis] = symbol
        return value

    def fitting(self, shape: Sequence[int]) -> Value:
        """Return a value with a shape: an existing one, or a new leaf."""
        found = self.some(lambda value: value.shape == tuple(shape)) if self.number(0, 1) else None
        return found or self.leaf(shape)

    def const(self, array: Any, dtype: Any = np.int64) -> str:
        name, values = f"c{len(self.constants)}", np.asarray(array, dtype)
        if values.dtype.kind == "f":  # onnxruntime fuses scales into products, as float32
            values = values.astype(np.float32).astype(dtype)
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    # -- writing ------------------------------------------------------------------------------------------

    def emit(self, op: str, inputs: Sequence[Value | str], outputs: int = 1, **attributes: Any) -> list[str]:
        node = len(self.nodes)
        names = [f"v{node}_{i}" if outputs > 1 else f"v{node}" for i in range(outputs)]
        read = [x if isinstance(x, str) else x.name for x in inputs]
        self.nodes.append(helper.make_node(op, read, names, name=f"node{node}", **attributes))
        return names

    def add(
        self, op: str, inputs: Sequence[Value | str], shape: Sequence[int], bound: float, **attributes: Any
    ) -> Value:
        (name,) = self.emit(op, inputs, **attributes)
        return self.keep(name, shape, bound)

    def keep(self, name: str, shape: Sequence[int], bound: float) -> Value:
        """Add an output to the values for later steps. If its bound is too large, it is scaled down first."""
        if bound > LARGE:
            (name,) = self.emit("Mul", [name, self.const(10.0 / bound, np.float64)])
            bound = 10.0
        value = Value(name, tuple(int(size) for size in shape), bound)
        self.values.append(value)
        return value

    def positive(self, x: Value) -> Value:
        """Return x² + 0.5, which is positive and not close to zero."""
        square = self.add("Mul", [x, x], x.shape, x.bound**2)
        return self.add("Add", [square, self.const(0.5, np.float64)], x.shape, square.bound + 0.5)

    def narrow(self, x: Value) -> Value:
        """Return tanh(x), which is between -1 and 1."""
        return self.add("Tanh", [x], x.shape, 1.0)

    def transposed(self, x: Value) -> bool:
        """Return True if `x` is the result of a Transpose, perhaps followed by Identity."""
        makers = {node.output[0]: node for node in self.nodes}
        node = makers.get(x.name)
        while node is not None and node.op_type == "Identity":
            node = makers.get(node.input[0])
        return node is not None and node.op_type == "Transpose"

    # -- the model ----------------------------------------------------------------------------------------

    def model(self, weights: Sequence[str] = (), outputs: int | None = None) -> onnx.ModelProto:
        """Return the program as a model. Leaves named in `weights` are initializers, the others are inputs."""
        feeds, inputs = self.feeds(), []
        initializers = [*self.constants]
        for leaf in self.leaves:
            if leaf.name in weights:
                initializers.append(numpy_helper.from_array(feeds[leaf.name], leaf.name))
                continue
            dims = [self.symbols.get((leaf.name, axis), size) for axis, size in enumerate(leaf.shape)]
            inputs.append(helper.make_tensor_value_info(leaf.name, TensorProto.DOUBLE, dims))
        infos = [
            helper.make_tensor_value_info(value.name, TensorProto.DOUBLE, [None] * value.rank)
            for value in self.outputs[:outputs]
        ]
        graph = helper.make_graph(self.nodes, "program", inputs, infos, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def feeds(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        return {leaf.name: np.asarray(rng.uniform(-2, 2, leaf.shape)) for leaf in self.leaves}

    def __repr__(self) -> str:
        return f"seed {self.seed}\n{onnx.printer.to_text(self.model())}"


Step = Callable[[Program, Value], Value | None]
STEPS: list[Step] = []


def step(function: Step) -> Step:
    STEPS.append(function)
    return function


# -- one operand, elementwise ----------------------------------------------------------------------------

SMOOTH = {"Neg": None, "Sin": 1.0, "Cos": 1.0, "Tanh": 1.0, "Sigmoid": 1.0, "Identity": None}
SMOOTH_BY_REFERENCE = {"Erf": 1.0, "Atan": 1.6, "Asinh": None, "Softplus": None, "Softsign": 1.0}
KINKED = {"Relu": None, "Abs": None, "Floor": None, "Sign": 1.0, "Round": None}
KINKED_BY_REFERENCE = {"LeakyRelu": None, "Elu": None, "HardSigmoid": 1.0, "Selu": None, "ThresholdedRelu": None}
POSITIVE = {"Sqrt": math.sqrt, "Log": lambda bound: 1 + math.log(bound), "Reciprocal": lambda bound: 2.0}


@step
def smooth(p: Program, x: Value) -> Value:
    known = SMOOTH | SMOOTH_BY_REFERENCE if p.by_reference and x.rank else SMOOTH  # onnx.reference fails on scalars
    op = p.pick(list(known))
    return p.add(op, [x], x.shape, known[op] or x.bound + 1)


@step
def kinked(p: Program, x: Value) -> Value:
    known = KINKED | KINKED_BY_REFERENCE if p.by_reference and x.rank else KINKED
    op = p.pick(list(known))
    return p.add(op, [x], x.shape, known[op] or 2 * x.bound + 2)


@step
def of_positive(p: Program, x: Value) -> Value:
    op = p.pick(list(POSITIVE))
    x = p.positive(x)
    return p.add(op, [x], x.shape, max(1.0, POSITIVE[op](x.bound)))


@step
def exponential(p: Program, x: Value) -> Value:
    return p.add("Exp", [p.narrow(x)], x.shape, 3.0)


@step
def clip(p: Program, x: Value) -> Value:
    x = p.add("Mul", [x, p.const(0.9, np.float64)], x.shape, x.bound)  # onnxruntime can't fuse Relu and Clip of float64
    low, high = p.const(-1.03, np.float64), p.const(0.97, np.float64)
    bounds = p.pick([[low, high], [low], ["", high]])
    return p.add("Clip", [x, *bounds], x.shape, x.bound if len(bounds) == 1 or not bounds[0] else 1.03)


@step
def power(p: Program, x: Value) -> Value:
    exponent = p.pick([2.0, 3.0, 1.0, 0.0])
    return p.add("Pow", [x, p.const(exponent, np.float64)], x.shape, max(1.0, x.bound**exponent))


# -- two operands, broadcast -----------------------------------------------------------------------------


def _broadcasts(a: Value, b: Value) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return max(a.rank, b.rank) < 6 and all(m == n or 1 in (m, n) for m, n in pairs)


def _partner(p: Program, x: Value) -> Value:
    """Return a value that broadcasts with `x`: an existing one, perhaps `x` itself, or a new leaf.

    The leaf may have fewer axes than `x`, or axes of size 1.
    """
    if p.number(0, 2):
        found = p.some(lambda value: _broadcasts(x, value))
        assert found is not None
        return found
    shape = [p.pick([size, 1]) for size in x.shape][p.number(0, x.rank) :]
    if x.rank < 3 and p.number(0, 3) == 3:
        shape = [p.number(1, 3), *([1] * (x.rank - len(shape))), *shape]
    return p.leaf(shape)


def _both(p: Program, x: Value) -> tuple[list[Value], tuple[int, ...]]:
    y = _partner(p, x)
    return ([x, y] if p.number(0, 1) else [y, x]), np.broadcast_shapes(x.shape, y.shape)


@step
def arithmetic(p: Program, x: Value) -> Value:
    op = p.pick(["Add", "Mul", "Sub"])
    (a, b), shape = _both(p, x)
    return p.add(op, [a, b], shape, a.bound * b.bound if op == "Mul" else a.bound + b.bound)


@step
def quotient(p: Program, x: Value) -> Value:
    y = p.positive(_partner(p, x))
    if p.number(0, 3) == 3:
        exponent = p.narrow(x)
        return p.add("Pow", [y, exponent], np.broadcast_shapes(x.shape, y.shape), max(2.0, y.bound))
    return p.add("Div", [x, y], np.broadcast_shapes(x.shape, y.shape), 2 * x.bound)


@step
def extreme(p: Program, x: Value) -> Value:
    (a, b), shape = _both(p, x)
    op = p.pick(["Sum", "Max", "Min"])
    return p.add(op, [a, b], shape, a.bound + b.bound)


@step
def choice(p: Program, x: Value) -> Value:
    """Add a Where with a comparison as its condition, which has no derivative."""
    (a, b), shape = _both(p, x)
    (condition,) = p.emit(p.pick(["Greater", "LessOrEqual"]), [a, p.const(0.1, np.float64)])
    return p.add("Where", [condition, a, b], shape, max(a.bound, b.bound))


# -- reductions and normalizations -------------------------------------------------------------------------

REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceMax", "ReduceMin", "ReduceLogSumExp", "ReduceProd")
OF_POSITIVE = ("ReduceL1", "ReduceL2", "ReduceLogSum")


@step
def reduction(p: Program, x: Value) -> Value:
    op = p.pick([*REDUCTIONS, *OF_POSITIVE])
    if op in OF_POSITIVE or op == "ReduceProd":
        x = p.positive(x) if op in OF_POSITIVE else p.narrow(x)
    axes = sorted({p.number(0, x.rank - 1) for _ in range(p.number(0, x.rank))}) if x.rank else []
    keep, gone = p.number(0, 1), axes or range(x.rank)
    count = math.prod(x.shape[axis] for axis in gone)
    shape = [1 if axis in gone else size for axis, size in enumerate(x.shape) if keep or axis not in gone]
    bound = {"ReduceSumSquare": count * x.bound**2, "ReduceProd": 1.0}.get(op, count * x.bound + 10)
    signed = [axis - x.rank if p.number(0, 1) else axis for axis in axes]
    if op == "ReduceSum" or p.opset >= 18:
        return p.add(op, [x, p.const(signed)] if axes else [x], shape, bound, keepdims=keep)
    return p.add(op, [x], shape, bound, keepdims=keep, **({"axes": signed} if axes else {}))


@step
def softmax(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    op = p.pick(["Softmax", "LogSoftmax"])
    return p.add(op, [x], x.shape, 1.0 if op == "Softmax" else 2 * x.bound + 3, axis=p.number(-x.rank, x.rank - 1))


@step
def layer_norm(p: Program, x: Value) -> Value | None:
    if not x.rank or p.opset < 17 or math.prod(x.shape[-1:]) < 2:
        return None
    axis = p.number(0, x.rank - 1)
    scale, bias = p.fitting(x.shape[axis:]), p.fitting(x.shape[axis:])
    size = math.sqrt(math.prod(x.shape[axis:]))
    bound = size * scale.bound + bias.bound
    return p.add("LayerNormalization", [x, scale, bias], x.shape, bound, axis=axis - x.rank, epsilon=0.1)


@step
def batch_norm(p: Program, x: Value) -> Value | None:
    if x.rank < 2:
        return None
    scale, bias, mean, raw = (p.fitting(x.shape[1:2]) for _ in range(4))
    variance = p.positive(raw)
    bound = 2 * scale.bound * (x.bound + mean.bound) + bias.bound
    return p.add("BatchNormalization", [x, scale, bias, mean, variance], x.shape, bound)


@step
def running(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    axis, flags = p.number(-x.rank, x.rank - 1), {"exclusive": p.number(0, 1), "reverse": p.number(0, 1)}
    return p.add("CumSum", [x, p.const(axis)], x.shape, x.bound * x.shape[axis], **flags)


# -- products ----------------------------------------------------------------------------------------------


@step
def matmul(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    inner, batch = x.shape[-1], x.shape[:-2]
    tails = [(inner, p.number(1, 4)), (*batch, inner, p.number(1, 3)), (1, inner, 2)]
    if not p.transposed(x):  # onnxruntime 1.31 fuses MatMul with Transpose wrongly: it ignores the transposition
        tails.append((inner,))
    y = p.fitting(p.pick(tails))
    shape = np.matmul(np.zeros(x.shape), np.zeros(y.shape)).shape
    return p.add("MatMul", [x, y], shape, inner * x.bound * y.bound)


@step
def gemm(p: Program, x: Value) -> Value | None:
    if x.rank != 2:
        return None
    trans_a, trans_b, columns = p.number(0, 1), p.number(0, 1), p.number(1, 4)
    rows, inner = reversed(x.shape) if trans_a else x.shape
    y = p.fitting((columns, inner) if trans_b else (inner, columns))
    inputs = [x, y]
    if p.number(0, 1):
        inputs.append(p.fitting(p.pick([(columns,), (rows, columns), (1,), (rows, 1)])))
    bound = inner * x.bound * y.bound + 2
    return p.add("Gemm", inputs, (rows, columns), bound, alpha=0.5, beta=1.5, transA=trans_a, transB=trans_b)


@step
def einsum(p: Program, x: Value) -> Value | None:
    if x.rank != 2:
        return None
    a, b = x.shape
    c = p.number(1, 3)
    equation, left, shape = p.pick(
        [("ij,jk->ik", (b, c), (a, c)), ("ij,kj->ki", (c, b), (c, a)), ("ij,ij->i", (a, b), (a,))]
    )
    y = p.fitting(left)
    return p.add("Einsum", [x, y], shape, b * x.bound * y.bound, equation=equation)


@step
def convolution(p: Program, x: Value) -> Value | None:
    if x.rank != 3 or x.shape[2] < 2 or not p.by_reference:
        return None
    channels, taps, stride = p.number(1, 3), p.number(1, 2), p.number(1, 2)
    before, after = p.number(0, 1), p.number(0, 1)
    w = p.fitting((channels, x.shape[1], taps))
    length = (x.shape[2] + before + after - taps) // stride + 1
    bound = x.shape[1] * taps * x.bound * w.bound
    shape = (x.shape[0], channels, length)
    return p.add("Conv", [x, w], shape, bound, kernel_shape=[taps], strides=[stride], pads=[before, after])


@step
def pooling(p: Program, x: Value) -> Value | None:
    if x.rank != 3 or x.shape[2] < 2:
        return None
    op = "AveragePool" if p.by_reference else "MaxPool"  # onnx.reference computes the latter in float32
    stride = p.number(1, 2)
    shape = (*x.shape[:2], (x.shape[2] - 2) // stride + 1)
    return p.add(op, [x], shape, x.bound, kernel_shape=[2], strides=[stride])


# -- shapes and places -------------------------------------------------------------------------------------


@step
def transpose(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    perm = p.draw(st.permutations(range(x.rank)))
    return p.add("Transpose", [x], [x.shape[axis] for axis in perm], x.bound, perm=perm)


@step
def reshape(p: Program, x: Value) -> Value:
    """Add a Reshape to constant sizes, to sizes with a -1, or to sizes computed from the shape at run time."""
    size = math.prod(x.shape)
    first = p.pick([n for n in range(1, size + 1) if size % n == 0])
    shape = (first, size // first)
    way = p.number(0, 3)
    if way == 3 and x.rank:
        (dims,) = p.emit("Shape", [x])
        (head,) = p.emit("Gather", [dims, p.const([0])])
        (target,) = p.emit("Concat", [head, p.const([-1])], axis=0)
        return p.add("Reshape", [x, target], (x.shape[0], size // x.shape[0]), x.bound)
    if way == 2 and x.rank:
        return p.add("Flatten", [x], (x.shape[0], size // x.shape[0]), x.bound)
    return p.add("Reshape", [x, p.const([first, -1] if way else shape)], shape, x.bound)


@step
def axes_of_one(p: Program, x: Value) -> Value | None:
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    if ones and p.number(0, 1):
        axis = p.pick(ones)
        return p.add("Squeeze", [x, p.const([axis])], [*x.shape[:axis], *x.shape[axis + 1 :]], x.bound)
    if x.rank > 3:
        return None
    axis = p.number(0, x.rank)
    return p.add("Unsqueeze", [x, p.const([axis])], [*x.shape[:axis], 1, *x.shape[axis:]], x.bound)


@step
def concat(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    axis = p.number(0, x.rank - 1)
    y = p.some(
        lambda v: (
            v.rank == x.rank and all(m == n or a == axis for a, (m, n) in enumerate(zip(v.shape, x.shape, strict=True)))
        )
    )
    assert y is not None
    shape = [x.shape[a] + y.shape[a] if a == axis else size for a, size in enumerate(x.shape)]
    return p.add("Concat", [x, y], shape, max(x.bound, y.bound), axis=axis - (x.rank if p.number(0, 1) else 0))


@step
def split(p: Program, x: Value) -> Value | None:
    axes = [axis for axis, size in enumerate(x.shape) if size > 1]
    if not axes:
        return None
    axis = p.pick(axes)
    left = p.number(1, x.shape[axis] - 1)
    sizes = [left, x.shape[axis] - left]
    names = p.emit("Split", [x, p.const(sizes)], outputs=2, axis=axis)
    first, second = (
        Value(name, (*x.shape[:axis], size, *x.shape[axis + 1 :]), x.bound)
        for name, size in zip(names, sizes, strict=True)
    )
    p.values += [second, first] if p.number(0, 1) else [first]
    return first


@step
def slices(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    axis, way = p.number(0, x.rank - 1), p.pick([1, -1, 2])
    size = x.shape[axis]
    start, end = (size - 1, -size - 1) if way < 0 else (p.number(0, size - 1), 2**31)
    shape = [
        len(range(size)[start : None if way < 0 else end : way]) if a == axis else s for a, s in enumerate(x.shape)
    ]
    return p.add("Slice", [x, p.const([start]), p.const([end]), p.const([axis]), p.const([way])], shape, x.bound)


@step
def gather(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    axis = p.number(0, x.rank - 1)
    rows = [p.number(-x.shape[axis], x.shape[axis] - 1) for _ in range(p.number(1, 3))]
    if len(rows) == 1 and p.number(0, 1):
        return p.add("Gather", [x, p.const(rows[0])], [*x.shape[:axis], *x.shape[axis + 1 :]], x.bound, axis=axis)
    return p.add("Gather", [x, p.const(rows)], [*x.shape[:axis], len(rows), *x.shape[axis + 1 :]], x.bound, axis=axis)


@step
def gather_elements(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    axis, rng = p.number(0, x.rank - 1), np.random.default_rng(p.number(0, 99))
    indices = rng.integers(0, x.shape[axis], x.shape)
    return p.add("GatherElements", [x, p.const(indices)], x.shape, x.bound, axis=axis)


@step
def scatter_elements(p: Program, x: Value) -> Value | None:
    if not x.rank or p.opset < 16:
        return None
    axis, rng = p.number(0, x.rank - 1), np.random.default_rng(p.number(0, 99))
    if p.number(0, 1):
        indices = rng.integers(0, x.shape[axis], x.shape)
        bound = x.bound * (x.shape[axis] + 1)
        return p.add(
            "ScatterElements", [x, p.const(indices), p.fitting(x.shape)], x.shape, bound, axis=axis, reduction="add"
        )
    indices = np.argsort(rng.random(x.shape), axis)  # no index repeats
    return p.add("ScatterElements", [x, p.const(indices), p.fitting(x.shape)], x.shape, max(2.0, x.bound), axis=axis)


@step
def largest(p: Program, x: Value) -> Value | None:
    if not x.rank:
        return None
    axis = p.number(0, x.rank - 1)
    count = p.number(1, x.shape[axis])
    shape = [count if a == axis else size for a, size in enumerate(x.shape)]
    values, _ = p.emit("TopK", [x, p.const([count])], outputs=2, axis=axis, largest=p.number(0, 1))
    return p.keep(values, shape, x.bound)


@step
def grown(p: Program, x: Value) -> Value | None:
    if not x.rank or math.prod(x.shape) > 60:
        return None
    way = p.number(0, 2)
    if way == 0:
        repeats = [p.number(1, 2) for _ in x.shape]
        return p.add("Tile", [x, p.const(repeats)], np.multiply(x.shape, repeats), x.bound)
    if way == 1:
        target = [size if size > 1 else p.number(1, 3) for size in x.shape]
        return p.add("Expand", [x, p.const(target)], target, x.bound)
    pads = [p.number(0, 1) for _ in range(2 * x.rank)]
    shape = [size + pads[axis] + pads[axis + x.rank] for axis, size in enumerate(x.shape)]
    mode = p.pick(["constant", "edge"])
    return p.add("Pad", [x, p.const(pads)], shape, x.bound, mode=mode)


@step
def triangle(p: Program, x: Value) -> Value | None:
    if x.rank < 2 or p.opset < 14:
        return None
    return p.add("Trilu", [x, p.const(p.number(-1, 1))], x.shape, x.bound, upper=p.number(0, 1))


# -- the whole ---------------------------------------------------------------------------------------------


@st.composite
def programs(draw: Any, most: int = 30, opsets: Sequence[int] = OPSETS) -> Program:
    """Draw a program of 3 to about `most` operators, with one to three outputs."""
    p = Program(draw, opsets)
    for _ in range(p.number(1, 3)):
        p.leaf([p.number(1, 5) for _ in range(p.number(0, 4))])
    length = p.number(3, most)
    while len(p.nodes) < length:
        x = p.values[-1] if p.number(0, 3) else p.some()
        assert x is not None
        if math.prod(x.shape) > 400:
            x = p.leaf([p.number(1, 5)])
        p.pick(STEPS)(p, x)
    made = [value for value in p.values if value not in p.leaves]
    others = [p.pick(made) for _ in range(p.number(0, 2))]
    p.outputs = list(dict.fromkeys([made[-1], *others]))
    return p
