"""Compute per-sample gradients with respect to weights, in time linear in the number of samples.

`sample_axes` first proves that the samples are independent. Then each slice of the batch's cotangents is the cotangent
of one sample. Each node that reads both samples and weights is copied for a single sample. The differentiation rule,
applied to the copy, gives the contribution of that sample to the gradient. If the nodes that the rule emits can be
vectorized, they compute the contributions of all samples at once. Otherwise they become the body of a Scan over the
samples.

Sources: the result equals torch.func's vmap of a gradient. For layers: G. Rochette et al., Efficient Per-Example
Gradient Computations in Convolutional Neural Networks, 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.derivatives.vectorize import split, table, vectorized
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied
from onnxgrad_cli.ir.node_values import behind, reads
from onnxgrad_cli.ir.sample_places import SampleAxis, Tracker
from onnxgrad_cli.ir.types import Dim, Shape, dtype_of, shape_of, tensor_type

HINT = "leave out per-sample derivatives; the other derivatives are correct for any model"


def sample_axes(graph: Graph, outputs: Iterable[str]) -> dict[str, int]:
    """Return value -> the axis of its samples, for all values before `outputs` that depend on the samples.

    The batch is axis 0 of the first input that has axes, and of every other input whose axis 0 has the same size.

    Raises:
        UnsupportedError: samples depend on each other on the way to `outputs`, or independence can't be proven.
    """
    batch, inputs = _batch(graph)
    if batch is None:
        return {}
    tracker = Tracker(graph, batch, {name: [SampleAxis(0)] for name in inputs}, frees=False)
    tracker.run(outputs, HINT)
    if tracker.refusals:
        raise UnsupportedError(
            "the model may mix the samples of the batch, so it has no per-sample derivatives:", tracker.refusals
        )
    return {name: place.axis for name, place in tracker.places.items()}


def _batch(graph: Graph) -> tuple[Dim | None, list[str]]:
    """Return the size of the batch, and the inputs whose axis 0 has that size."""
    fed = [name for name in graph.input_names if name not in graph.initializers]
    shapes = {name: shape_of(graph.types.get(name)) or () for name in fed}
    batch = next((shape[0] for shape in shapes.values() if shape), None)
    return batch, [name for name, shape in shapes.items() if shape and shape[0] == batch]


class Meetings:
    """The nodes that read both values that depend on samples and values that depend on weights.

    Attributes:
        axes: value that depends on the samples -> the axis of its samples; see `sample_axes`.
        nodes: those of these nodes that can be copied for a single sample.
        mixed: the weights on which the other nodes depend. Their gradients must be computed over the whole batch.
    """

    def __init__(self, graph: Graph, weights: Sequence[str], axes: Mapping[str, int]) -> None:
        """Find the nodes.

        Args:
            graph: the model.
            weights: the weights to differentiate with respect to.
            axes: value that depends on the samples -> the axis of its samples.
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
            elif all(self.operand(node, position) is not None for position, name in enumerate(node.input) if name):
                self.nodes.append(node)
            else:
                mixed |= behind
        self.mixed = [name for name in weights if name in mixed]

    def operand(self, node: Node, position: int) -> SampleOperand | None:
        """Return the part of a node's operand that a single sample reads, or None if it is unknown."""
        name = node.input[position]
        if name in self.axes:
            return SampleOperand(self.axes[name], True)
        shape, result = (shape_of(self._graph.types.get(each)) for each in (name, node.output[0]))
        align = ALIGNED.get(node.op_type) if is_standard(node.domain) else None
        if align is None or shape is None or result is None:
            return None
        axis = self.axes[node.output[0]]
        at = align(SharedOperand(node, position, shape, len(result), axis))
        if at is None or shape[at] == 1:
            return SampleOperand()
        if shape[at] != result[axis] or shape[at] == "?":
            return None
        if name not in self._sources:
            return SampleOperand(at, True)
        return SampleOperand(at) if self._repeats(name, at) else None

    def _repeats(self, name: str, axis: int) -> bool:
        """Return True if all slices of a value along an axis are equal, because an Expand repeats it along the axis."""
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "Expand":
            return False
        data, whole = (shape_of(self._graph.types.get(each)) for each in (maker.input[0], name))
        if data is None or whole is None:
            return False
        before = axis - len(whole) + len(data)
        return before < 0 or data[before] == 1


class SampleOperand(NamedTuple):
    """The part of an operand that a single sample reads.

    Attributes:
        axis: the axis of the samples; None if the operand has no such axis and each sample reads all of it.
        own: True if each sample reads a slice of its own, False if all slices are equal.
    """

    axis: int | None = None
    own: bool = False


def sample_gradients(
    op: Op, seeds: Mapping[str, Val], wanted: Sequence[str], meetings: Meetings, training: Differentiation
) -> dict[str, Val | None]:
    """Emit the per-sample gradients.

    Args:
        op: the emitter for nodes after the forward part.
        seeds: value -> its cotangent for the whole batch.
        wanted: the values to differentiate with respect to: values with samples on axis 0, and weights that are not in
            `meetings.mixed`.
        meetings: the nodes that read both samples and these weights.
        training: the record of the rules used.

    Returns:
        Each value in `wanted` -> its gradient. For a value with samples, the slices of the gradient belong to the
        samples. For a weight, the gradient has the shape [samples, *weight]. None stands for a gradient that is
        mathematically zero.
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
    op: Op, cotangents: Mapping[str, Val | None], weights: Sequence[str], meetings: Meetings, training: Differentiation
) -> dict[str, Val | None]:
    """Emit the per-sample gradient of each weight, given the cotangents of the results of `meetings.nodes`."""
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
    """Copies of nodes for a single sample, whose values have size 1 along the axis of the samples.

    Attributes:
        nodes: the copies. They read `slices` and the results of `firsts`.
        firsts: Slice nodes that take the first slice of a value whose slices are all equal.
        results: result of a node for the batch -> result of its copy for one sample.
        slices: value for one sample -> (the value for the batch, the axis of its samples).
    """

    def __init__(self, graph: Graph, meetings: Meetings) -> None:
        self._graph, self._meetings, self._axes = graph, meetings, meetings.axes
        self._known: dict[str, str] = {}
        self.nodes: list[Node] = []
        self.firsts: list[Node] = []
        self.results: dict[str, str] = {}
        self.slices: dict[str, tuple[str, int]] = {}

    def write(self, node: Node) -> None:
        """Add a copy of a node for one sample.

        The results of the copy get new names, so that copies of later nodes don't read them. The cotangent of each
        result is already complete, so no gradient may reach it a second time through a later node.
        """
        copy = copied(node)
        copy.name = self._graph.fresh(f"{node.name or node.op_type}/sample")
        copy.input[:] = [self._read(node, position) if name else "" for position, name in enumerate(node.input)]
        self.results |= {name: self._named(name, self._axes[name]) for name in node.output if name in self._axes}
        copy.output[:] = [self.results.get(name, "") for name in node.output]
        self.nodes.append(copy)

    def slice(self, name: str, axis: int) -> str:
        """Return the name of one sample's slice of a value."""
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
        """Return a new name for one sample's slice of a value, and record its type and its place in `slices`."""
        graph = self._graph
        shape: list[Dim] = list(shape_of(graph.types[name]) or ())
        shape[axis] = 1
        fresh = graph.fresh(f"{name}_sample")
        graph.types[fresh] = graph.named(tensor_type(dtype_of(graph.types[name]), shape))
        self.slices[fresh] = name, axis
        return fresh


def _rows(op: Op, name: str, axis: int) -> Val:
    """Return a value with the axis of samples moved to the front. An axis of size 1 takes its old place."""
    x = op.val(name)
    front = op.transpose(x, [axis, *(other for other in range(x.rank) if other != axis)])
    return op.unsqueeze(front, [axis + 1])


def _stacked(op: Op, nodes: Sequence[Node], rows: Mapping[str, Val], names: Sequence[str]) -> dict[str, Val]:
    """Compute values for all samples, stacked on axis 0, with nodes that compute them for one sample.

    Values that can't be vectorized are computed in one Scan over the samples.
    """
    found: dict[str, Val] = {}
    for name in names:
        if stacked := vectorized(op, behind(nodes, [name]), rows, [name]):
            found[name] = stacked[0]
    looped = [name for name in names if name not in found]
    inside = behind(nodes, looped)
    read = dict.fromkeys(name for node in inside for name in reads(node) if name in rows)

    def row(inner: Op, states: Sequence[Val], at: Sequence[Val]) -> tuple[list[Val], list[Val]]:
        inner.rename_all(dict(zip(read, at, strict=True)))
        inner.nodes.extend(inside)
        return [], [inner.val(name) for name in looped]

    if looped:
        found |= zip(looped, bodies.scan(op, row, [], [rows[name] for name in read])[1], strict=True)
    return found


class SharedOperand(NamedTuple):
    """An operand that doesn't depend on the samples, of a node whose result does.

    Attributes:
        node: the node.
        position: the position of the operand.
        shape: the shape of the operand.
        rank: the rank of the node's first output.
        axis: the axis of the samples in that output.
    """

    node: Node
    position: int
    shape: Shape
    rank: int
    axis: int


Align = Callable[[SharedOperand], int | None]


def _broadcast(place: SharedOperand) -> int | None:
    at = place.axis - place.rank + len(place.shape)
    return at if at >= 0 else None


def _einsum(place: SharedOperand) -> int | None:
    (equation,) = (entry.s.decode().replace(" ", "") for entry in place.node.attribute if entry.name == "equation")
    terms, result = equation.split("->")
    at = terms.split(",")[place.position].find(result[place.axis])
    return at if at >= 0 else None


ALIGNED: Mapping[str, Align] = {
    **table("Add Div LayerNormalization Max Mean Min Mul Pow PRelu RMSNormalization Sub Sum Where", _broadcast),
    **table("BatchNormalization Conv ConvTranspose Gather GroupNormalization InstanceNormalization", lambda _: None),
    **table("Concat GatherElements ScatterElements", lambda place: place.axis),
    **table("MatMul", lambda place: _broadcast(place) if place.axis < place.rank - 2 else None),
    **table("Gemm", lambda place: _broadcast(place) if place.position == 2 else None),
    **table("GRU LSTM RNN", lambda place: {4: 0, 5: 1, 6: 1}.get(place.position)),
    **table("Einsum", _einsum),
}
"""Operator -> a function that returns the axis of a `SharedOperand` that matches the result's sample axis, or None."""
