"""Gradients by weights, one for every sample, in a time that is linear in their number.

The cotangents of a batch hold those of each sample. A node in which samples meet weights is written again as it is for
one sample, and its rule gives what that sample adds to the gradient: for all samples at once where the nodes of the
rule can be stacked, or else as the body of a Scan over the samples.

Source: what torch.func's vmap of a gradient computes; for a layer, G. Rochette et al., Efficient Per-Example Gradient
Computations in Convolutional Neural Networks, 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.derivatives.vectorize import split, vectorized
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import Dim, Shape, dtype_of, shape_of, tensor_type


class Meetings:
    """The nodes in which samples meet weights.

    Attributes:
        axes: the axis of the samples, of each value that depends on them: see `sample_axes`.
        nodes: those that can be written for one sample.
        mixed: the weights that some other one reads.
    """

    def __init__(self, graph: Graph, weights: Sequence[str], axes: Mapping[str, int]) -> None:
        """Find them.

        Args:
            weights: what is differentiated by.
            axes: see the attribute.
        """
        self._graph, self.axes = graph, axes
        self._sources: dict[str, frozenset[str]] = {name: frozenset([name]) for name in weights}
        self._makers = graph.producers()
        self.nodes: list[Node] = []
        mixed: set[str] = set()
        for node in graph.nodes:
            behind = frozenset().union(*(self._sources.get(name, ()) for name in reads(node)))
            if not behind:
                continue
            if axes.keys().isdisjoint(node.output):
                self._sources.update(dict.fromkeys(node.output, behind))
            elif self.separable(node):
                self.nodes.append(node)
            else:
                mixed |= behind
        self.mixed = [name for name in weights if name in mixed]

    def separable(self, node: Node) -> bool:
        """Whether each operand without samples is the same for all of them, or repeats itself along their axis."""
        return all(self.operand(node, position) is not None for position, name in enumerate(node.input) if name)

    def operand(self, node: Node, position: int) -> Operand | None:
        """How one sample reads an operand of a node; None where that is not known."""
        name = node.input[position]
        if name in self.axes:
            return Operand(self.axes[name], True)
        shape, result = (shape_of(self._graph.types.get(each)) for each in (name, node.output[0]))
        align = ALIGNED.get(node.op_type) if is_standard(node.domain) else None
        if align is None or shape is None or result is None:
            return None
        axis = self.axes[node.output[0]]
        at = align(Place(node, position, shape, len(result), axis))
        if at is None or shape[at] == 1:
            return Operand()
        if shape[at] != result[axis] or shape[at] == "?":
            return None
        if name not in self._sources:
            return Operand(at, True)
        return Operand(at) if self._repeats(name, at) else None

    def _repeats(self, name: str, axis: int) -> bool:
        """Whether all slices of a value along an axis are one and the same, written by Expand."""
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "Expand":
            return False
        shapes = [shape_of(self._graph.types.get(each)) for each in (maker.input[0], name)]
        if None in shapes:
            return False
        data, whole = shapes
        before = axis - len(whole or ()) + len(data or ())
        return before < 0 or (data or ())[before] == 1


class Operand(NamedTuple):
    """How one sample reads an operand.

    Attributes:
        axis: of the samples; None where it has none, and is read whole.
        own: whether each sample has a slice of its own; else all slices are equal.
    """

    axis: int | None = None
    own: bool = False


def sample_gradients(
    op: Op, seeds: Mapping[str, Val], wanted: Sequence[str], meetings: Meetings, training: Differentiation
) -> dict[str, Val | None]:
    """Emit the gradients that each sample has.

    Args:
        op: where they are written, after the forward part.
        seeds: value -> its cotangent, of the whole batch.
        wanted: by what: values with samples on their axis 0, and weights, none of the mixed ones.
        meetings: where samples meet these weights.
        training: where the rules used are recorded.

    Returns:
        For a value with samples its gradient, in which each has its own; for a weight a value of shape
        [samples, *weight]. None where it is zero by mathematics.
    """
    axes = meetings.axes
    weights = [name for name in wanted if name not in axes]
    made = [name for node in meetings.nodes for name in node.output if name in axes]
    known = differentiate(op.graph, seeds, [*(name for name in wanted if name in axes), *made], op, training)
    if not set(made).isdisjoint(training.partial):
        training.partial += weights
    found = _at_weights(op, {name: known[name] for name in made}, weights, meetings, training)
    return {name: known[name] if name in axes else found[name] for name in wanted}


def _at_weights(
    op: Op,
    cotangents: Mapping[str, Val | None],
    weights: Sequence[str],
    meetings: Meetings,
    training: Differentiation,
) -> dict[str, Val | None]:
    """The gradient by each weight that each sample has, from the cotangents of what the nodes of `meetings` make."""
    graph, one = op.graph, Op(op.graph)
    single = _Single(graph, meetings)
    for node in meetings.nodes:
        single.write(node)
    seeds = {
        made: one.val(single.slice(cotangent.name, meetings.axes[name]))
        for name, made in single.results.items()
        if (cotangent := cotangents.get(name)) is not None
    }
    forward, graph.nodes = graph.nodes, [*graph.nodes, *single.firsts, *single.nodes]
    found = differentiate(graph, seeds, weights, one, training)
    graph.nodes = forward
    names = {weight: value.name for weight in weights if (value := found[weight]) is not None}
    rows = {name: _rows(op, *where) for name, where in single.slices.items()}
    dependent, invariant = split([*single.firsts, *one.nodes], rows)
    op.nodes.extend(invariant)
    stacked = _stacked(op, dependent, rows, list(dict.fromkeys(names.values())))
    return {weight: stacked[names[weight]] if weight in names else None for weight in weights}


class _Single:
    """Nodes as they are for one sample, whose axis has size 1 there.

    Attributes:
        nodes: them; they read `slices` and what the nodes `firsts` make.
        firsts: what takes the first of slices that are all equal.
        results: what a node makes of the batch -> what it makes of one sample.
        slices: value of one sample -> that of all, and the axis on which they are.
    """

    def __init__(self, graph: Graph, meetings: Meetings) -> None:
        self._graph, self._meetings, self._axes = graph, meetings, meetings.axes
        self._known: dict[str, str] = {}
        self.nodes: list[Node] = []
        self.firsts: list[Node] = []
        self.results: dict[str, str] = {}
        self.slices: dict[str, tuple[str, int]] = {}

    def write(self, node: Node) -> None:
        """Write a node of the batch for one sample. What it makes has another name than what others read of it: each
        has the whole cotangent already."""
        copy = copied(node)
        copy.name = self._graph.fresh(f"{node.name or node.op_type}/sample")
        copy.input[:] = [self._read(node, position) if name else "" for position, name in enumerate(node.input)]
        self.results |= {name: self._named(name, self._axes[name]) for name in node.output if name in self._axes}
        copy.output[:] = [self.results.get(name, "") for name in node.output]
        self.nodes.append(copy)

    def slice(self, name: str, axis: int) -> str:
        """What a value of which each sample has a slice is called of one sample."""
        if name not in self._known:
            self._known[name] = self._named(name, axis)
        return self._known[name]

    def _read(self, node: Node, position: int) -> str:
        name = node.input[position]
        operand = self._meetings.operand(node, position)
        assert operand is not None
        if operand.axis is None:
            return name
        if operand.own:
            return self.slice(name, operand.axis)
        op = Op(self._graph)
        first = op.Slice(op.val(name), op.ints([0]), op.ints([1]), op.ints([operand.axis]))
        self.firsts.extend(op.nodes)
        return first.name

    def _named(self, name: str, axis: int) -> str:
        """A new name for a value of one sample, with its type."""
        graph = self._graph
        shape: list[Dim] = list(shape_of(graph.types[name]) or ())
        shape[axis] = 1
        fresh = graph.fresh(f"{name}_sample")
        graph.types[fresh] = graph.named(tensor_type(dtype_of(graph.types[name]), shape))
        self.slices[fresh] = name, axis
        return fresh


def _rows(op: Op, name: str, axis: int) -> Val:
    """A value with the samples on an axis in front, and size 1 where they were."""
    x = op.val(name)
    front = op.transpose(x, [axis, *(other for other in range(x.rank) if other != axis)])
    return op.unsqueeze(front, [axis + 1])


def _stacked(op: Op, nodes: Sequence[Node], rows: Mapping[str, Val], names: Sequence[str]) -> dict[str, Val]:
    """Values that nodes compute of one sample, for all of them on axis 0: at once, or in one Scan for the others."""
    found: dict[str, Val] = {}
    for name in names:
        if stacked := vectorized(op, _behind(nodes, [name]), rows, [name]):
            found[name] = stacked[0]
    looped = [name for name in names if name not in found]
    inside = _behind(nodes, looped)
    read = dict.fromkeys(name for node in inside for name in reads(node) if name in rows)

    def row(inner: Op, states: Sequence[Val], at: Sequence[Val]) -> tuple[list[Val], list[Val]]:
        inner.rename_all(dict(zip(read, at, strict=True)))
        inner.nodes.extend(inside)
        return [], [inner.val(name) for name in looped]

    if looped:
        found |= zip(looped, bodies.scan(op, row, [], [rows[name] for name in read])[1], strict=True)
    return found


def _behind(nodes: Sequence[Node], names: Iterable[str]) -> list[Node]:
    """Those of the nodes, in order, from which values are computed."""
    needed, found = set(names), []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(reads(node))
            found.append(node)
    return found[::-1]


class Place(NamedTuple):
    """An operand without samples, of a node that has them.

    Attributes:
        node: the node.
        position: of the operand.
        shape: of the operand.
        rank: of the first output.
        axis: of the samples in the first output.
    """

    node: Node
    position: int
    shape: Shape
    rank: int
    axis: int


Align = Callable[[Place], int | None]


def _shared(place: Place) -> None:
    return None


def _broadcast(place: Place) -> int | None:
    at = place.axis - place.rank + len(place.shape)
    return at if at >= 0 else None


def _matmul(place: Place) -> int | None:
    return _broadcast(place) if place.axis < place.rank - 2 else None


def _gemm(place: Place) -> int | None:
    return _broadcast(place) if place.position == 2 else None


def _same_axes(place: Place) -> int:
    return place.axis


def _recurrent(place: Place) -> int | None:
    return {4: 0, 5: 1, 6: 1}.get(place.position)


def _einsum(place: Place) -> int | None:
    (equation,) = (entry.s.decode().replace(" ", "") for entry in place.node.attribute if entry.name == "equation")
    terms, result = equation.split("->")
    at = terms.split(",")[place.position].find(result[place.axis])
    return at if at >= 0 else None


def _of(operators: str, align: Align) -> dict[str, Align]:
    return dict.fromkeys(operators.split(), align)


ALIGNED: Mapping[str, Align] = {
    **_of(
        "Add Div LayerNormalization Max Mean Min Mul Pow PRelu RMSNormalization Sub Sum Where",
        _broadcast,
    ),
    **_of("BatchNormalization Conv ConvTranspose Gather GroupNormalization InstanceNormalization", _shared),
    **_of("Concat GatherElements ScatterElements", _same_axes),
    **_of("MatMul", _matmul),
    **_of("Gemm", _gemm),
    **_of("GRU LSTM RNN", _recurrent),
    **_of("Einsum", _einsum),
}
"""The axis of an operand that runs along that of the samples, of operators that read weights beside them."""
