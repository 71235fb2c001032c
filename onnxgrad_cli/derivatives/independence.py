"""The proof that the samples of a batch do not mix: on which axis of every value they lie, from the inputs on.

A value either has the samples on one axis, each slice computed from that sample alone, or depends on none. What an
operator does with that axis is written for each; one that is not here, or mixes samples, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from onnxgrad_cli.errors import Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of, reads
from onnxgrad_cli.ir.types import Dim, Shape, shape_of

HINT = "leave per-sample derivatives out: the others are right for any model"


def sample_axes(graph: Graph, outputs: Iterable[str]) -> dict[str, int]:
    """The axis on which the samples lie, of every value that depends on them and on which one of `outputs` does.

    The batch is the first axis of the first input that has axes, and of each input whose first axis is of that size.

    Raises:
        UnsupportedError: samples mix on the way to one of `outputs`, or whether they do is not known.
    """
    batch, axes = _batch(graph)
    needed = graph.ancestors(outputs)
    refusals: list[Refusal] = []
    for node in graph.nodes:
        if axes.keys().isdisjoint(reads(node)) or needed.isdisjoint(node.output):
            continue
        try:
            found = _Node(node, graph, axes).outputs()
            _check_sizes(graph, node, found, batch)
        except _Mixed as error:
            refusals.append(Refusal(node.name or node.output[0], node.op_type, str(error), HINT))
            continue  # and what follows is not asked
        axes.update((name, axis) for name, axis in zip(node.output, found, strict=False) if name and axis is not None)
    if refusals:
        raise UnsupportedError("the samples of the batch are not proven to be independent:", refusals)
    return axes


def _batch(graph: Graph) -> tuple[Dim | None, dict[str, int]]:
    """The size of the batch, and the axis of the samples in each input that has it."""
    fed = [name for name in graph.input_names if name not in graph.initializers]
    shapes = {name: shape_of(graph.types.get(name)) or () for name in fed}
    batch = next((shape[0] for shape in shapes.values() if shape), None)
    return batch, {name: 0 for name, shape in shapes.items() if shape and shape[0] == batch}


def _check_sizes(graph: Graph, node: Node, axes: Sequence[int | None], batch: Dim | None) -> None:
    """Make sure that a result has as many slices as there are samples: one of one sample might be broadcast."""
    for name, axis in zip(node.output, axes, strict=False):
        shape = shape_of(graph.types.get(name)) if name and axis is not None else None
        if name and axis is not None and (shape is None or shape[axis] != batch):
            _mixed(f"whether the size of axis {axis} of '{name}' is that of the batch, {batch}, is not known")


class _Mixed(Exception):
    """Samples mix in a node, or whether they do is not known."""


def _mixed(why: str) -> NoReturn:
    raise _Mixed(why)


class _Node:
    """A node, and where the samples lie in what it reads.

    Attributes:
        axes: of each operand; None where it depends on no sample.
    """

    def __init__(self, node: Node, graph: Graph, axes: Mapping[str, int]) -> None:
        self.node, self.graph = node, graph
        self.axes = [axes.get(name) for name in node.input]
        self.given = attributes_of(node)
        if len(set(reads(node))) > len(set(filter(None, node.input))) and not axes.keys().isdisjoint(
            set(reads(node)) - set(node.input)
        ):
            _mixed("a body of it reads samples")

    def outputs(self) -> Sequence[int | None]:
        """Where they lie in each output."""
        form = FORMS.get(self.node.op_type) if is_standard(self.node.domain) else None
        if form is None:
            _mixed("what it does with the axis of the samples is not known")
        found = form(self)
        return found if isinstance(found, (list, tuple)) else [found] * len(self.node.output)

    def shape(self, position: int) -> Shape:
        """The shape of an operand."""
        shape = shape_of(self.graph.types.get(self.node.input[position]))
        return _mixed("the rank of an operand is not known") if shape is None else shape

    def result(self) -> Shape:
        """The shape of the first output."""
        shape = shape_of(self.graph.types.get(self.node.output[0]))
        return _mixed("the rank of its result is not known") if shape is None else shape

    def only(self, *positions: int) -> None:
        """Make sure that other operands than these depend on no sample."""
        if any(axis is not None for at, axis in enumerate(self.axes) if at not in positions):
            _mixed("an operand that applies to all samples depends on them")

    def first(self) -> int:
        """The axis of the first operand, which alone depends on samples."""
        self.only(0)
        axis = self.axes[0]
        return _mixed("its first operand depends on no sample") if axis is None else axis

    def axis(self, name: str, default: int, rank: int) -> int:
        """An attribute that counts axes, from the front."""
        return int(self.given.get(name, default)) % max(rank, 1)

    def constant(self, position: int, name: str = "") -> list[int] | None:
        """The integers of an operand, or of an attribute where it was one; None where it is absent."""
        if name in self.given:
            return list(self.given[name])
        if position >= len(self.node.input) or not self.node.input[position]:
            return None
        array = self.graph.constant(self.node.input[position])
        return _mixed("its sizes or axes are computed at run time") if array is None else list(array.ravel().tolist())

    def agreed(self, found: Iterable[int | None]) -> int:
        """The one axis that all operands with samples give to the result."""
        (axis, *others) = set(found) - {None} or {None}
        return _mixed("its operands have the samples on different axes") if others or axis is None else axis

    def apart(self, axis: int, *worked: int) -> int:
        """The axis, which is not one along which the operator works."""
        return _mixed("it works along the axis of the samples") if axis in worked else axis


Form = Callable[[_Node], Any]


def _elementwise(n: _Node) -> int:
    rank = len(n.result())
    return n.agreed(a if a is None else a + rank - len(n.shape(i)) for i, a in enumerate(n.axes))


def _first_elementwise(n: _Node) -> int:
    return n.first()


def _samples(n: _Node) -> list[int | None]:
    """Axis 0 has samples in every operand, and the second is that of channels."""
    if any(axis not in (0, None) for axis in n.axes) or n.axes[0] is None:
        _mixed("its samples are not on axis 0")
    return [0] * len(n.node.output)


def _kernel(n: _Node) -> list[int | None]:
    n.only(0)
    return _samples(n)


def _normalized(n: _Node) -> list[int | None]:
    if n.given.get("training_mode"):
        _mixed("in training mode it takes mean and variance over the samples")
    return [_kernel(n)[0], *[None] * (len(n.node.output) - 1)]


def _resized(n: _Node) -> list[int | None]:
    if n.shape(0)[:1] != n.result()[:1]:
        _mixed("it may resize the axis of the samples")
    return _kernel(n)


def _along(default: int) -> Form:
    """It works along one axis, before opset 13 along all behind it too."""

    def form(n: _Node) -> int:
        axis = n.first()
        old = (n.graph.opset() or 13) < 13
        worked = n.axis("axis", 1 if old else default, len(n.shape(0)))
        return n.apart(axis, worked, *(range(worked, 1 + axis) if old else ()))

    return form


def _behind(n: _Node) -> int:
    """It works along an axis and all behind it."""
    axis = n.first()
    return n.apart(axis, *range(n.axis("axis", -1, len(n.shape(0))), len(n.shape(0))))


def _cumulated(n: _Node) -> int:
    axes = n.constant(1) or []
    return n.apart(n.first(), *(a % len(n.shape(0)) for a in axes))


def _reduced(n: _Node) -> int:
    axis, rank = n.first(), len(n.shape(0))
    axes = n.constant(1, "axes") or ([] if n.given.get("noop_with_empty_axes") else list(range(rank)))
    axes = [a % rank for a in axes]
    n.apart(axis, *axes)
    return axis if n.given.get("keepdims", 1) else axis - sum(a < axis for a in axes)


def _arg(n: _Node) -> int:
    axis = n.first()
    worked = n.axis("axis", 0, len(n.shape(0)))
    n.apart(axis, worked)
    return axis if n.given.get("keepdims", 1) else axis - (worked < axis)


def _topk(n: _Node) -> int:
    return n.apart(n.first(), n.axis("axis", -1, len(n.shape(0))))


def _matmul(n: _Node) -> int:
    (a, b), (left, right), rank = n.axes, (len(n.shape(0)), len(n.shape(1))), len(n.result())
    found = []
    if a is not None:
        n.apart(a, left - 1)
        found.append(a if right == 1 else a + rank - left)
    if b is not None:
        n.apart(b, max(right - 2, 0))
        found.append(rank - 1 if b == right - 1 else b + rank - right + (left == 1))
    return n.agreed(found)


def _gemm(n: _Node) -> int:
    rows, columns = int(bool(n.given.get("transA"))), 1 - int(bool(n.given.get("transB")))
    found: list[int | None] = []
    for axis, kept, place in ((n.axes[0], rows, 0), (n.axes[1], columns, 1)):
        if axis is not None:
            n.apart(axis, 1 - kept)
            found.append(place)
    if n.axes[2:] and n.axes[2] is not None:
        found.append(n.axes[2] + 2 - len(n.shape(2)))
    return n.agreed(found)


def _transposed(n: _Node) -> int:
    rank = len(n.shape(0))
    return list(n.given.get("perm", range(rank)[::-1])).index(n.first())


def _reshaped(n: _Node) -> int:
    """A shape that begins with the same sizes, up to that of the samples, leaves them where they are."""
    axis = n.first()
    before, after = n.shape(0)[: axis + 1], n.result()[: axis + 1]
    if before == after:
        return axis
    wanted = n.graph.constant(n.node.input[1]) if n.node.op_type == "Reshape" else None
    kept = wanted is not None and not n.given.get("allowzero") and not wanted[: axis + 1].any()
    return axis if kept and wanted is not None and wanted.size > axis else _mixed("it may cut through samples")


def _flattened(n: _Node) -> int:
    if n.first() == 0 and n.axis("axis", 1, len(n.shape(0)) + 1) == 1:
        return 0
    return _mixed("it joins the axis of the samples with others")


def _squeezed(n: _Node) -> int:
    axis, shape = n.first(), n.shape(0)
    axes = n.constant(1, "axes")
    gone = [a % len(shape) for a in axes] if axes is not None else [a for a, size in enumerate(shape) if size == 1]
    return n.apart(axis, *gone) - sum(a < axis for a in gone)


def _unsqueezed(n: _Node) -> int:
    axis, rank = n.first(), len(n.result())
    new = {a % rank for a in n.constant(1, "axes") or ()}
    return [at for at in range(rank) if at not in new][axis]


def _expanded(n: _Node) -> int:
    return n.first() + len(n.result()) - len(n.shape(0))


def _joined(n: _Node) -> int:
    return n.apart(n.agreed(n.axes), n.axis("axis", 0, len(n.shape(0))))


def _cut(n: _Node) -> int:
    return n.apart(n.first(), n.axis("axis", 0, len(n.shape(0))))


def _sliced(n: _Node) -> int:
    axis, rank = n.first(), len(n.shape(0))
    axes = n.constant(3, "axes")
    starts = n.shape(1)[0] if axes is None else 0
    if not isinstance(starts, int):
        _mixed("which axes it cuts is not known")
    return n.apart(axis, *range(starts), *(a % rank for a in axes or ()))


def _gathered(n: _Node) -> int:
    (data, indices), axis = n.axes, n.axis("axis", 0, len(n.shape(0)))
    if data is not None and indices is not None:
        _mixed("it may take entries of other samples")
    if data is None:
        return axis + (indices or 0)
    return n.apart(data, axis) + (len(n.shape(1)) - 1 if data > axis else 0)


def _elements(n: _Node) -> int:
    return n.apart(n.agreed(n.axes), n.axis("axis", 0, len(n.shape(0))))


def _padded(n: _Node) -> int:
    axis, rank = n.first(), len(n.shape(0))
    pads, axes = n.constant(1, "pads") or [], n.constant(3)
    which = [a % rank for a in axes] if axes else list(range(rank))
    return n.apart(axis, *(a for a, *sides in zip(which, pads, pads[len(which) :], strict=False) if any(sides)))


def _tiled(n: _Node) -> int:
    return n.apart(n.first(), *(a for a, times in enumerate(n.constant(1) or ()) if times != 1))


def _einsum(n: _Node) -> int:
    equation = n.given["equation"].decode().replace(" ", "")
    if "." in equation or "->" not in equation:
        _mixed("its equation is written in a short form")
    terms, result = equation.split("->")
    letters = {term[a] for term, a in zip(terms.split(","), n.axes, strict=True) if a is not None}
    (letter, *others) = letters
    if (
        others
        or letter not in result
        or any(
            letter in term
            for term, a in zip(terms.split(","), n.axes, strict=True)
            if a is not None and term[a] != letter
        )
    ):
        _mixed("it sums over samples, or joins them")
    return result.index(letter)


def _one_hot(n: _Node) -> int:
    axis, rank = n.first(), len(n.result())
    return axis + (n.axis("axis", -1, rank) <= axis)


def _recurrent(n: _Node) -> list[int]:
    """Time-major: X is [time, batch, in], Y [time, directions, batch, hidden], states [directions, batch, hidden]."""
    expected: dict[int, int] = {0: 1, 4: 0, 5: 1, 6: 1}
    if n.given.get("layout") or any(a is not None and expected.get(i) != a for i, a in enumerate(n.axes)):
        _mixed("the samples are not on the axis of its batch")
    return [2, 1, 1][: len(n.node.output)]


def _attended(n: _Node) -> list[int | None]:
    if any(a not in (0, None) for a in n.axes) or None in n.axes[:3]:
        _mixed("its samples are not on axis 0 of query, key and value")
    if n.axes[3:4] == [0] and len(n.shape(3)) < 4:
        _mixed("its mask has no axis of samples of its own")
    return [0] * len(n.node.output)


def _triangle(n: _Node) -> int:
    rank = len(n.shape(0))
    return n.apart(n.first(), rank - 1, rank - 2)


def _nothing(n: _Node) -> list[int | None]:
    return [None] * len(n.node.output)


def _of(operators: str, form: Form) -> dict[str, Form]:
    return dict.fromkeys(operators.split(), form)


FORMS: Mapping[str, Form] = {
    **_of(
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast "
        "Ceil Celu Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity "
        "IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu "
        "Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu "
        "Where Xor",
        _elementwise,
    ),
    **_of("CastLike Clip Dropout", _first_elementwise),
    **_of(
        "AveragePool Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization "
        "InstanceNormalization LRN LpPool MaxPool SpaceToDepth",
        _kernel,
    ),
    **_of("AffineGrid GridSample", _samples),
    **_of("BatchNormalization", _normalized),
    **_of("Resize Upsample", _resized),
    **_of("Hardmax LogSoftmax Softmax LpNormalization", _along(-1)),
    **_of("LayerNormalization RMSNormalization", _behind),
    **_of("CumSum", _cumulated),
    **_of(
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare",
        _reduced,
    ),
    **_of("ArgMax ArgMin", _arg),
    **_of("TopK", _topk),
    **_of("MatMul", _matmul),
    **_of("Gemm", _gemm),
    **_of("Transpose", _transposed),
    **_of("Reshape", _reshaped),
    **_of("Flatten", _flattened),
    **_of("Squeeze", _squeezed),
    **_of("Unsqueeze", _unsqueezed),
    **_of("Expand", _expanded),
    **_of("Concat", _joined),
    **_of("Split", _cut),
    **_of("Slice", _sliced),
    **_of("Gather", _gathered),
    **_of("GatherElements ScatterElements", _elements),
    **_of("Pad", _padded),
    **_of("Tile", _tiled),
    **_of("Einsum", _einsum),
    **_of("OneHot", _one_hot),
    **_of("GRU LSTM RNN", _recurrent),
    **_of("Attention", _attended),
    **_of("Trilu", _triangle),
    **_of("Shape Size", _nothing),
}
"""Where each operator leaves the axis of the samples."""
