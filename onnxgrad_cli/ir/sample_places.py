"""Track the axis of the batch through a graph, and prove that the samples of a batch do not mix.

A value either depends on no sample, or has the samples along one axis, where each slice depends only on its own sample.
For each supported operator, `FORMS` has a function that returns the axis of the samples in the results. A node is
refused if its operator has no such function, or if it mixes samples.

A reshape may merge the batch axis with other axes, such as the heads of an attention. `SampleAxis` then stores the
sizes of the axes before and after the batch within the merged axis. On request, the module also finds the changes that
let a graph that was exported for one batch size accept any batch size. This is called freeing the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from onnx import numpy_helper

from onnxgrad_cli.errors import Refusal
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import is_random, uses_batch
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of, reads
from onnxgrad_cli.ir.shape_values import Product
from onnxgrad_cli.ir.types import MAX_INT64, Dim, Shape, is_external, known_sizes, shape_of

MAX_BACKTRACKS = 1000
"""Largest number of times that the search returns to an ambiguous reshape or input to try its next possible axis."""

ONE = Product()

ALONG = "it works along the axis of the samples"
CONTRACTED = "it contracts the axis of the samples"
OTHERS = "it may select entries of other samples"


class SampleAxis(NamedTuple):
    """The axis of a value along which the samples lie.

    A reshape may have merged the batch with other axes: the size of the axis is before * batch * after. If a model
    squeezes its batch of 1 away, a value may have no axes. Its samples then count as lying on axis 0, which the value
    gets when `free_batch` makes the batch size dynamic.
    """

    axis: int
    before: Product = ONE
    after: Product = ONE

    @property
    def is_plain(self) -> bool:
        """True if the axis contains only the samples, without other merged axes."""
        return self.before == self.after == ONE

    def size(self, batch: Product) -> Product:
        """Return the size of the axis for a batch size."""
        return self.before * batch * self.after

    def at(self, axis: int) -> SampleAxis:
        """Return a copy with `axis` in place of its axis."""
        return self._replace(axis=axis)

    def without(self, axes: Sequence[int]) -> SampleAxis:
        """Return a copy for a value without the axes `axes`."""
        return self.at(self.axis - sum(axis < self.axis for axis in axes))


class Edit(NamedTuple):
    """A change of one operand of a node that lets the node accept any batch size.

    Attributes:
        node: the name of the node's first output.
        position: the position of the operand.
        kind: the kind of change:

            - 'repeat': the operand, which depends on no sample, gets one copy per sample at `place`.
            - 'multiply': the operand is a shape, and its entry at `entry` is multiplied by the number of samples.
            - 'set': the operand's entry at `entry` becomes `value`.
            - 'axes': the operand becomes the vector `value`.
            - 'reshape': the node becomes a Reshape whose result has the samples on axis `entry`.
            - 'own': the node selects entries along the sample axis. It is changed so that the indices of each sample
              select only entries of that sample. The data have the samples at `place`, the indices on axis `entry`.
        entry: the position of an entry in the operand, or an axis; see `kind`.
        place: the axis of the samples.
        value: the new value; see `kind`.
    """

    node: str
    position: int
    kind: str
    entry: int = 0
    place: SampleAxis | None = None
    value: Any = None


class Mixed(Exception):
    """Raised if a node mixes samples (`certain` is True), or may mix them (`certain` is False)."""

    def __init__(self, why: str, certain: bool) -> None:
        super().__init__(why)
        self.certain = certain


def mixed(why: str, certain: bool = False) -> NoReturn:
    """Raise `Mixed`. Unlike a raise statement, a call can stand where a value is expected."""
    raise Mixed(why, certain)


def check(holds: bool, otherwise: str, certain: bool = False) -> None:
    """Raise `Mixed` unless a condition holds."""
    if not holds:
        mixed(otherwise, certain)


class Tracker:
    """Finds the axis of the samples in the values of a graph.

    Attributes:
        places: value -> the axis of its samples; values that depend on no sample are absent.
        edits: node index -> the changes that let the node accept any batch size; empty if `frees` is False.
        refusals: the nodes that mix samples, or that may mix them.
        mixes: True if one of the refused nodes certainly mixes samples.

    Args:
        graph: a graph with inferred types.
        batch: the size of the batch in the graph, a number or a symbol.
        starts: input -> the possible axes of its samples, the likeliest first. An entry None means that the input has
            no samples.
        frees: True to collect the edits that let the graph accept any batch size. The types in `graph` are those for
            the batch size `batch`.
    """

    def __init__(
        self, graph: Graph, batch: Dim, starts: Mapping[str, Sequence[SampleAxis | None]], frees: bool
    ) -> None:
        self.graph, self.batch, self.frees = graph, batch, frees
        self.batch_size = Product.of(graph, [batch])
        self.places: dict[str, SampleAxis] = {}
        self.edits: dict[int, list[Edit]] = {}
        self.refusals: list[Refusal] = []
        self.mixes = False
        self._starts = list(starts.items())
        self._left: dict[int, list[SampleAxis | None]] = {}
        """Ambiguous node -> the candidate in use, then the untried ones. An input has a negative index as its key."""
        self._preferred: dict[object, int] = {}

    def run(self, outputs: Iterable[str], hint: str) -> None:
        """Find the axis of the samples in all values on which the outputs depend.

        Args:
            outputs: the names of the outputs.
            hint: the hint for the user in refusals.
        """
        graph = self.graph
        needed = graph.ancestors(outputs)
        nodes = [node for node in graph.nodes if not needed.isdisjoint(node.output)]
        makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
        makers |= {name: i - len(self._starts) for i, (name, _) in enumerate(self._starts)}
        first: dict[int, tuple[Refusal, bool]] = {}
        unknown: set[str] = set()
        index = self._begin()
        left = MAX_BACKTRACKS
        while index < len(nodes):
            node = nodes[index]
            if not unknown.isdisjoint(reads(node)):
                unknown.update(node.output)
            elif not self.places.keys().isdisjoint(reads(node)):
                try:
                    self._visit(index, node)
                except Mixed as error:
                    found = Refusal(node.name or node.output[0], node.op_type, str(error), hint)
                    first.setdefault(index, (found, error.certain))
                    again = self._earlier_choice(index, nodes, makers) if left and not self.refusals else None
                    if again is not None:
                        left -= 1
                        index = self._return_to(again, nodes)
                        continue
                    certain = error.certain
                    if not self.refusals:  # report the error for the first candidates, which are the likeliest
                        found, certain = next(iter(first.values()))
                    self.refusals.append(found)
                    self.mixes |= certain
                    unknown.update(node.output)
            elif self.frees and is_random(graph, node):
                text = "it draws random numbers for one batch size"
                self.refusals.append(Refusal(node.name or node.output[0], node.op_type, text, hint))
            index += 1

    def _begin(self) -> int:
        self.places.clear()
        for i, (name, candidates) in enumerate(self._starts):
            place = self._left.setdefault(i - len(self._starts), list(candidates))[0]
            if place is not None:
                self.places[name] = place
        return 0

    def _visit(self, index: int, node: Node) -> None:
        visit = _NodeAxes(node, self, index)
        pairs = zip(node.output, visit.outputs(), strict=False)
        found = {name: place for name, place in pairs if name and place is not None}
        for name, place in found.items():
            self._check_size(name, place)
        self.places |= found
        if self.frees:
            self.edits[index] = visit.edits

    def _check_size(self, name: str, place: SampleAxis) -> None:
        """Check that the axis of the samples in a result has the size that the batch implies. Otherwise raise Mixed.

        If the axis had size 1, its single slice could be broadcast to the batch, and so be mixed with all samples.
        """
        shape = shape_of(self.graph.types.get(name))
        if shape == () and place == SampleAxis(0) and self.frees:
            return
        sizes = [shape[place.axis]] if shape else []
        fits = bool(shape) and Product.of(self.graph, sizes) == place.size(self.batch_size)
        check(fits, f"axis {place.axis} of '{name}' may not have the size of the batch, {self.batch}")

    def choose(self, index: int, candidates: Sequence[SampleAxis], signature: object) -> SampleAxis:
        """Return one of the possible axes for an ambiguous node: the next candidate that was not tried.

        Args:
            index: the index of the node.
            candidates: the possible axes.
            signature: a key that is equal for similar nodes. They start with the candidate that was chosen last for the
                key, because the layers of a model are alike.
        """
        if index not in self._left:
            start = self._preferred.get(signature, 0) % len(candidates)
            self._left[index] = [*candidates[start:], *candidates[:start]]
        chosen = self._left[index][0]
        assert chosen is not None
        self._preferred[signature] = candidates.index(chosen)
        return chosen

    def _earlier_choice(self, index: int, nodes: Sequence[Node], makers: Mapping[str, int]) -> int | None:
        """Return the index of the last ambiguous node or input before a node that has untried candidates."""
        stack, seen = [index], {index}
        while stack:
            at = stack.pop()
            for name in reads(nodes[at]) if at >= 0 else ():
                maker = makers.get(name)
                if maker is not None and maker not in seen and name in self.places:
                    seen.add(maker)
                    stack.append(maker)
        return max((at for at in seen if len(self._left.get(at, ())) > 1), default=None)

    def _return_to(self, at: int, nodes: Sequence[Node]) -> int:
        self._left[at].pop(0)
        self._left = {key: left for key, left in self._left.items() if key <= at}
        self.edits = {key: edits for key, edits in self.edits.items() if key < at}
        if at < 0:
            return self._begin()
        for node in nodes[at:]:
            for name in node.output:
                self.places.pop(name, None)
        return at


class _NodeAxes:
    """A node, with the axis of the samples in each of its operands.

    Attributes:
        places: the axis of the samples in each operand; None if the operand depends on no sample.
        edits: the changes that let the node accept any batch size.
    """

    def __init__(self, node: Node, tracker: Tracker, index: int) -> None:
        self.node, self.graph, self.tracker, self.index = node, tracker.graph, tracker, index
        places = tracker.places
        self.places = [places.get(name) for name in node.input]
        self.given = attributes_of(node)
        self.edits: list[Edit] = []
        check(places.keys().isdisjoint(set(reads(node)) - set(node.input)), "a subgraph of it reads samples")

    def outputs(self) -> Sequence[SampleAxis | None]:
        """Return the axis of the samples in each output."""
        form = FORMS.get(self.node.op_type) if is_standard(self.node.domain) else None
        if form is None:
            mixed("its effect on the axis of the samples is unknown")
        check(not (self.tracker.frees and is_random(self.graph, self.node)), "it draws random numbers")
        for position, place in enumerate(self.places):
            if place is not None and self.shape(position) == () and (form not in WITHOUT_AXES or self.result()):
                mixed("one of its operands no longer has the axis of the samples")
        found = form(self)
        return found if isinstance(found, list) else [found] * len(self.node.output)

    def shape(self, position: int) -> Shape:
        """Return the shape of an operand."""
        shape = shape_of(self.graph.types.get(self.node.input[position]))
        return mixed("the rank of an operand is unknown") if shape is None else shape

    def rank(self, position: int) -> int:
        """Return the number of axes of an operand."""
        return len(self.shape(position))

    def result(self) -> Shape:
        """Return the shape of the first output."""
        shape = shape_of(self.graph.types.get(self.node.output[0]))
        return mixed("the rank of its result is unknown") if shape is None else shape

    def has(self, position: int) -> bool:
        """Return True if the node has an operand at a position."""
        return position < len(self.node.input) and bool(self.node.input[position])

    def only(self, *positions: int) -> None:
        """Raise Mixed if an operand other than those at `positions` depends on samples."""
        others = {place for at, place in enumerate(self.places) if at not in positions}
        check(others <= {None}, "an operand that is shared by all samples depends on them")

    def first(self) -> SampleAxis:
        """Return the axis of the samples in the first operand. Raise Mixed if another operand depends on samples."""
        self.only(0)
        place = self.places[0]
        return mixed("its first operand does not depend on the samples") if place is None else place

    def axis(self, name: str, default: int, rank: int) -> int:
        """Return the attribute `name`, which is an axis, as a non-negative number."""
        return int(self.given.get(name, default)) % max(rank, 1)

    def constant(self, position: int, name: str = "") -> list[int] | None:
        """Return the integers of an operand or, in older opsets, of the attribute `name`. None if both are absent."""
        if name in self.given:
            return list(self.given[name])
        if not self.has(position):
            return None
        array = self.graph.constant(self.node.input[position])
        return mixed("its sizes or axes are computed at run time") if array is None else list(array.ravel().tolist())

    def agreed(self, places: Iterable[SampleAxis | None]) -> SampleAxis:
        """Return the axis of the samples, which must be the same for all operands that have samples, or raise Mixed."""
        (place, *others) = set(places) - {None} or {None}
        if others or place is None:
            plain = place is not None and all(each is not None and each.is_plain for each in (place, *others))
            mixed("its operands have the samples on different axes", certain=plain)
        return place

    def moved(self, position: int, by: int) -> SampleAxis | None:
        """Return the axis of the samples in an operand, plus `by` axes."""
        place = self.places[position]
        return place and place.at(place.axis + by)

    def apart(self, place: SampleAxis, *worked: int, otherwise: str = ALONG) -> SampleAxis:
        """Return `place`, or raise Mixed if its axis is in `worked`, the axes along which the operator works."""
        check(place.axis not in worked, otherwise, certain=True)
        return place

    def edit(self, kind: str, position: int, *change: Any, **value: Any) -> None:
        """Record a change that lets the node accept any batch size.

        Args:
            kind: the kind of change.
            position: the position of the operand to change.
            *change, **value: further fields of `Edit`.
        """
        self.edits.append(Edit(self.node.output[0], position, kind, *change, **value))

    def repeat(self, position: int, place: SampleAxis, broadcasts: bool = False) -> None:
        """Record that an operand without samples needs one copy per sample, if the batch size is made dynamic.

        Args:
            position: the position of the operand.
            place: the axis of the operand that corresponds to the axis of the samples.
            broadcasts: True if the operator broadcasts, so that an operand without this axis, or with size 1 there,
                needs no copies.
        """
        if not self.tracker.frees or not self.has(position) or self.places[position] is not None:
            return
        shape = self.shape(position)
        if broadcasts and (not 0 <= place.axis < len(shape) or shape[place.axis] == 1):
            return
        name, batch = self.node.input[position], self.tracker.batch
        where = f"axis {place.axis} of '{name}'"
        once = Product.of(self.graph, [shape[place.axis]]) == place.size(self.tracker.batch_size)
        check(once, f"it repeats samples along {where}")
        fixed = place.before == ONE or known_sizes(shape) is not None
        check(fixed, f"{where} combines the batch with sizes that may vary")
        alike = batch == 1 or (place.is_plain and self._is_alike(name, place.axis))
        check(alike, f"'{name}' may contain different values for the {batch} samples")
        self.edit("repeat", position, place=place)

    def _is_alike(self, name: str, axis: int) -> bool:
        """Return True if all slices of a value along an axis are provably equal.

        The caller ensures that the value depends on no sample.
        """
        tensor = self.graph.initializers.get(name)
        if tensor is not None:
            values = None if is_external(tensor) else numpy_helper.to_array(tensor)
            return values is not None and bool((values == np.take(values, [0], axis)).all())
        maker = self.graph.producers().get(name)
        if maker is None:
            return False
        if maker.op_type == "ConstantOfShape":
            return True
        inner = shape_of(self.graph.types.get(maker.input[0])) if maker.input else None
        outer = shape_of(self.graph.types.get(name))
        if maker.op_type == "Expand" and inner is not None and outer is not None:
            source = axis + len(inner) - len(outer)
            return source < 0 or inner[source] == 1 or self._is_alike(maker.input[0], source)
        return maker.op_type in ("Cast", "Identity") and self._is_alike(maker.input[0], axis)

    def broadcast(self, positions: Iterable[int], rank: int) -> SampleAxis:
        """Return the axis of the samples in a result of `rank` axes, to which some operands are broadcast.

        Args:
            positions: the positions of the operands.
            rank: the number of axes of the result.
        """
        positions = [at for at in positions if self.has(at)]
        lifted = {at: rank - len(self.shape(at)) for at in positions}
        found = self.agreed(self.moved(at, lifted[at]) for at in positions)
        for at in positions:
            self.repeat(at, found.at(found.axis - lifted[at]), broadcasts=True)
        return found

    def as_reshape(self, place: SampleAxis, otherwise: str) -> SampleAxis:
        """Return the axis of the samples in the result of a node that a Reshape can replace for any batch size.

        If the node can't become a Reshape, raise Mixed with the reason `otherwise`.
        """
        before, after, found = self.shape(0), self.result(), list[SampleAxis]()
        if self.tracker.frees and self.tracker.batch == 1:
            found = self.reshaped(place, before, after) if after else [SampleAxis(0)]
        check(bool(found), f"it {otherwise}")
        chosen = self.tracker.choose(self.index, found, (before, after, place))
        self.edit("reshape", 0, chosen.axis)
        return chosen

    def own_entries(self, data: SampleAxis, indices: SampleAxis | None, shape: Shape, behind: int = 0) -> SampleAxis:
        """Return the axis of the samples in the result of indexing along the axis of the samples.

        This is allowed only if a batch size of 1 is made dynamic. The node is then changed so that the indices of each
        sample select only entries of that sample. In the result, the samples lie along an axis of the indices. If the
        indices depend on no sample, this is an axis of size 1.

        Args:
            data: the axis of the samples in the data.
            indices: the axis of the samples in the indices, or None.
            shape: the shape of the indices.
            behind: the position among the axes of the result at which the axes of the indices begin.
        """
        axes = [axis for axis, size in enumerate(shape) if size == 1] if indices is None else [indices.axis]
        free = self.tracker.frees and self.tracker.batch == 1 and data.before == ONE
        check(free and bool(axes), "it selects entries along the axis of the samples")
        check(indices is None or (indices.is_plain and indices.axis < len(shape)), OTHERS)
        chosen = self.tracker.choose(self.index, [SampleAxis(behind + axis) for axis in axes], (shape, data))
        self.edit("own", 1, chosen.axis - behind, data)
        return chosen

    def reshaped(self, place: SampleAxis, before: Shape, after: Shape) -> list[SampleAxis]:
        """Return the possible axes of the samples after a reshape, the likeliest first."""
        batch = self.tracker.batch_size
        outer = Product.of(self.graph, before[: place.axis]) * place.before
        found: list[SampleAxis] = []
        for axis, size in enumerate(after):
            over = outer.over(Product.of(self.graph, after[:axis]))
            rest = None if over is None else Product.of(self.graph, [size]).over(over * batch)
            if over is not None and rest is not None:
                found.append(SampleAxis(axis, over, rest))
        inner = place.after * Product.of(self.graph, before[place.axis + 1 :])
        found = [p for p in found if p.after * Product.of(self.graph, after[p.axis + 1 :]) == inner] or found
        return sorted(found, key=lambda p: (not p.is_plain, p.axis != place.axis, p.axis))


Form = Callable[[_NodeAxes], Any]
"""A function that returns the axis of the samples in the results of a node: one for all results, or a list."""


def _working_along(axes: Callable[[_NodeAxes, int], Iterable[int]]) -> Form:
    """Return the form of operators that keep the axes of their first operand, and work along some of them.

    `axes(n, rank)` returns these axes for an operand of `rank` axes.
    """

    def form(n: _NodeAxes) -> SampleAxis:
        place, rank = n.first(), n.rank(0)
        return n.apart(place, *(axis % rank for axis in axes(n, rank)))

    return form


def _softmax_axes(n: _NodeAxes, rank: int) -> Iterable[int]:
    """Return the softmax axes: before opset 13, an axis and all after it."""
    old = (n.graph.opset() or 13) < 13
    return range(n.axis("axis", 1, rank), rank) if old else (n.axis("axis", -1, rank),)


def _padded_axes(n: _NodeAxes, rank: int) -> Iterable[int]:
    pads = n.constant(1, "pads") or []
    axes = n.constant(3) or range(rank)
    return [axis for axis, *sides in zip(axes, pads, pads[len(axes) :], strict=False) if any(sides)]


def _scaled_axes(n: _NodeAxes, rank: int) -> Iterable[int]:
    """Quantizers with one scale, or with one scale for each slice along an axis."""
    check(not n.given.get("block_size"), "it may have different scales for each sample")
    return () if n.shape(1) in ((), (1,)) else (n.axis("axis", 1, rank),)


def _elementwise(n: _NodeAxes) -> SampleAxis:
    return n.broadcast(range(len(n.node.input)), len(n.result()))


def _samples(n: _NodeAxes) -> SampleAxis:
    """Return the axis for operators whose operands have the samples on axis 0 and the channels on axis 1."""
    place = n.agreed(n.places)
    check(place.axis == 0 and n.places[0] is not None, "its samples are not on axis 0")
    return place


def _kernel(n: _NodeAxes) -> SampleAxis:
    n.only(0)
    return _samples(n)


def _pooled(n: _NodeAxes) -> SampleAxis:
    check(not (n.tracker.frees and any(n.node.output[1:])), "its indices count across the whole batch")
    return _kernel(n)


def _sampled_at(n: _NodeAxes) -> SampleAxis:
    """GridSample: the operands are X and grid."""
    place = _samples(n)
    n.repeat(1, place)
    return place


def _grid(n: _NodeAxes) -> SampleAxis:
    place = _kernel(n)
    n.edit("multiply", 1, 0, place)
    return place


def _normalized(n: _NodeAxes) -> list[SampleAxis | None]:
    by_batch = uses_batch(n.node, n.graph.opset() or 1)
    check(not by_batch, "in training mode, it computes mean and variance over the samples", certain=True)
    return [_kernel(n), *[None] * (len(n.node.output) - 1)]


def _resized(n: _NodeAxes) -> SampleAxis:
    place = n.first()
    check(n.shape(0)[place.axis] == n.result()[place.axis], "it may resize along the axis of the samples")
    axes = [axis % n.rank(0) for axis in n.given.get("axes", range(n.rank(0)))]
    if n.has(3) and place.axis in axes:
        n.edit("multiply", 3, axes.index(place.axis), place)
    return place


def _reduced(n: _NodeAxes) -> SampleAxis:
    """Reductions, ArgMax and ArgMin."""
    rank, place = n.rank(0), n.first()
    if n.node.op_type.startswith("Arg"):
        axes = [n.given.get("axis", 0)]
    else:
        axes = n.constant(1, "axes") or ([] if n.given.get("noop_with_empty_axes") else list(range(rank)))
    axes = [axis % rank for axis in axes]
    how = ALONG if n.node.op_type.startswith("Arg") else "it reduces along the axis of the samples"
    n.apart(place, *axes, otherwise=how)
    return place if n.given.get("keepdims", 1) else place.without(axes)


def _matmul(n: _NodeAxes) -> SampleAxis:
    (a, b), left, right, rank = n.places[:2], n.rank(0), n.rank(1), len(n.result())
    n.only(0, 1)
    found: list[SampleAxis] = []
    if a is not None:
        n.apart(a, left - 1, otherwise=CONTRACTED)
        found.append(a if right == 1 else a.at(a.axis + rank - left))
    if b is not None:
        n.apart(b, max(right - 2, 0), otherwise=CONTRACTED)
        found.append(b.at(rank - 1 if b.axis == right - 1 else b.axis + rank - right + (left == 1)))
    place = n.agreed(found)
    # an operand without samples may have the axis of the samples among the batch axes of its matrices
    for position, size in ((0, left), (1, right)):
        lifted = place.axis - (rank - size)
        if size > 2 and 0 <= lifted < size - 2:
            n.repeat(position, place.at(lifted), broadcasts=True)
    return place


def _gemm(n: _NodeAxes) -> SampleAxis:
    found: list[SampleAxis | None] = []
    for axis, contracted in enumerate((not n.given.get("transA"), bool(n.given.get("transB")))):
        place = n.places[axis]
        if place is not None:
            found.append(n.apart(place, int(contracted), otherwise=CONTRACTED).at(axis))
    if n.has(2):
        lifted = 2 - n.rank(2)
        found.append(n.moved(2, lifted))
        whole = n.agreed(found)
        n.repeat(2, whole.at(whole.axis - lifted), broadcasts=True)
    return n.agreed(found)


def _transposed(n: _NodeAxes) -> SampleAxis:
    order = list(n.given.get("perm", range(n.rank(0))[::-1]))
    return n.first().at(order.index(n.first().axis))


def _reshaped(n: _NodeAxes) -> SampleAxis:
    """Reshape and Flatten keep the order of elements in memory, so the sizes show where the samples can be."""
    place, before, after = n.first(), n.shape(0), n.result()
    found = n.reshaped(place, before, after)
    if n.node.op_type == "Flatten":
        behind = int(place.axis >= n.axis("axis", 1, len(before) + 1))
        found = [each for each in found if each.axis == behind]
    if not n.tracker.frees:
        found = [each for each in found if each.is_plain]
    check(bool(found), "it may split samples")
    chosen = n.tracker.choose(n.index, found, (before, after, place))
    if n.node.op_type == "Reshape":
        n.edit("multiply", 1, chosen.axis, chosen, place)
    return chosen


def _squeezed(n: _NodeAxes) -> SampleAxis:
    place, shape = n.first(), n.shape(0)
    axes = n.constant(1, "axes")
    gone = [a % len(shape) for a in axes] if axes is not None else [a for a, size in enumerate(shape) if size == 1]
    if place.axis in gone:
        return n.as_reshape(place, "removes the axis of the samples")
    if axes is None:
        n.edit("axes", 1, value=gone)
    return place.without(gone)


def _unsqueezed(n: _NodeAxes) -> SampleAxis:
    """Unsqueeze: an axis that was merged with the samples may become a separate axis again."""
    place, rank = n.first(), len(n.result())
    if not place.is_plain and n.tracker.frees:
        return n.as_reshape(place, "may split samples")
    new = {a % rank for a in n.constant(1, "axes") or ()}
    return place.at([at for at in range(rank) if at not in new][place.axis])


def _expanded(n: _NodeAxes) -> SampleAxis:
    place, rank, target = n.first(), len(n.result()), n.shape(1)[0]
    if not isinstance(target, int):
        mixed("the length of its shape is unknown")
    found = place.at(place.axis + rank - n.rank(0))
    entry = found.axis - (rank - target)
    if entry >= 0:
        n.edit("set", 1, entry, value=1)
    return found


def _joined(n: _NodeAxes) -> SampleAxis:
    place = n.apart(n.agreed(n.places), n.axis("axis", 0, len(n.result())))
    for position in range(len(n.node.input)):
        n.repeat(position, place)
    return place


def _sliced(n: _NodeAxes) -> SampleAxis:
    place, rank = n.first(), n.rank(0)
    axes = n.constant(3, "axes")
    starts = len(n.given["starts"]) if "starts" in n.given else n.shape(1)[0]
    if not isinstance(starts, int):
        mixed("the axes that it slices are unknown")
    cut = list(range(starts)) if axes is None else [a % rank for a in axes]
    if place.axis not in cut:
        return place
    at, size = cut.index(place.axis), n.shape(0)[place.axis]
    first, end = ((n.constant(i, name) or [])[at] for i, name in ((1, "starts"), (2, "ends")))
    step = (n.constant(4) or [1] * starts)[at]
    to_end = end >= 2**31 - 1 or (n.tracker.frees and isinstance(size, int) and end >= size)
    check(first == 0 and step == 1 and to_end, ALONG, certain=True)
    n.edit("set", 2, at, value=MAX_INT64)
    return place


def _gathered(n: _NodeAxes) -> SampleAxis:
    (data, indices), axis = n.places, n.axis("axis", 0, n.rank(0))
    if data is None:
        assert indices is not None
        return indices.at(axis + indices.axis)
    if data.axis == axis and data.is_plain and indices is None and not n.shape(1):
        return n.as_reshape(data, "selects entries along the axis of the samples")
    if data.axis == axis:
        return n.own_entries(data, indices, n.shape(1), axis)
    check(indices is None, OTHERS)
    return data.at(data.axis + (n.rank(1) - 1 if data.axis > axis else 0))


def _gathered_tuples(n: _NodeAxes) -> SampleAxis:
    """GatherND without batch axes."""
    (data, indices), shape = n.places, n.shape(1)
    depth = shape[-1]
    if data is None or n.given.get("batch_dims", 0) or not isinstance(depth, int):
        mixed(OTHERS)
    selected = data.axis < depth
    check(data.is_plain if selected else indices is None, OTHERS)
    return n.own_entries(data, indices, shape[:-1]) if selected else data.at(len(shape) - 1 + data.axis - depth)


def _tiled(n: _NodeAxes) -> SampleAxis:
    place = n.first()
    times = (n.constant(1) or [])[place.axis]
    check(times == 1 or (times > 1 and n.tracker.frees), ALONG, certain=True)
    return place._replace(before=Product(times) * place.before)


def _einsum(n: _NodeAxes) -> SampleAxis:
    equation = n.given["equation"].decode().replace(" ", "")
    check("." not in equation and "->" in equation, "its equation has an implicit output")
    terms, result = equation.split("->")
    written = terms.split(",")
    (letter, *others) = {term[p.axis] for term, p in zip(written, n.places, strict=True) if p is not None}
    apart = not others and letter in result and all(term.count(letter) < 2 for term in written)
    check(apart, "it sums over samples or combines them", certain=True)
    place = n.agreed(p and p.at(0) for p in n.places)
    for position, term in enumerate(written):
        if letter in term:
            n.repeat(position, place.at(term.index(letter)))
    return place.at(result.index(letter))


def _one_hot(n: _NodeAxes) -> SampleAxis:
    place = n.first()
    return place.at(place.axis + (n.axis("axis", -1, len(n.result())) <= place.axis))


def _recurrent(n: _NodeAxes) -> list[SampleAxis | None]:
    """GRU, LSTM, RNN: X [time, batch, in], Y [time, directions, batch, hidden], states [directions, batch, hidden]."""
    expected: dict[int, int] = {0: 1, 4: 0, 5: 1, 6: 1}
    fits = all(p is None or expected.get(i) == p.axis for i, p in enumerate(n.places))
    check(fits and not n.given.get("layout"), "the samples are not on its batch axis")
    place = n.agreed(p and p.at(1) for p in n.places)
    for position, axis in expected.items():
        n.repeat(position, place.at(axis))
    places: list[SampleAxis | None] = [place.at(axis) for axis in (2, 1, 1)]
    return places[: len(n.node.output)]


def _attended(n: _NodeAxes) -> SampleAxis:
    first = all(p is None or p.axis == 0 for p in n.places) and None not in n.places[:3]
    check(first, "its samples are not on axis 0 of query, key and value")
    place = n.agreed(n.places)
    if n.has(3):
        check(n.places[3] is None or n.rank(3) == 4, "its mask has no separate axis of samples")
        if n.rank(3) == 4:
            n.repeat(3, place, broadcasts=True)
    for position in (4, 5, 6):
        n.repeat(position, place)
    return place


WITHOUT_AXES = (_elementwise, _NodeAxes.first)
"""Functions of `FORMS` that also accept operands without axes, whose samples count as lying on axis 0."""

_FORMS: Mapping[str, Form] = {
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast "
    "Ceil Celu Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity "
    "IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu "
    "Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu "
    "Where Xor": _elementwise,
    "CastLike Clip Dropout": _NodeAxes.first,
    "AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GroupNormalization InstanceNormalization LRN LpPool QLinearConv SpaceToDepth": _kernel,
    "MaxPool": _pooled,
    "AffineGrid": _grid,
    "GridSample": _sampled_at,
    "BatchNormalization": _normalized,
    "Resize Upsample": _resized,
    "Hardmax LogSoftmax Softmax LpNormalization": _working_along(_softmax_axes),
    "LayerNormalization RMSNormalization SimplifiedLayerNormalization": _working_along(
        lambda n, rank: range(n.axis("axis", -1, rank), rank)
    ),
    "MeanVarianceNormalization": _working_along(lambda n, rank: n.given.get("axes", (0, 2, 3))),
    "CumSum": _working_along(lambda n, rank: n.constant(1) or ()),
    "Split": _working_along(lambda n, rank: (n.axis("axis", 0, rank),)),
    "TopK": _working_along(lambda n, rank: (n.axis("axis", -1, rank),)),
    "Trilu": _working_along(lambda n, rank: (rank - 1, rank - 2)),
    "Pad": _working_along(_padded_axes),
    "DequantizeLinear QuantizeLinear": _working_along(_scaled_axes),
    "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare": _reduced,
    "MatMul MatMulInteger": _matmul,
    "Gemm": _gemm,
    "Transpose": _transposed,
    "Flatten Reshape": _reshaped,
    "Squeeze": _squeezed,
    "Unsqueeze": _unsqueezed,
    "Expand": _expanded,
    "Concat GatherElements ScatterElements": _joined,
    "Slice": _sliced,
    "Gather": _gathered,
    "GatherND": _gathered_tuples,
    "Tile": _tiled,
    "Einsum": _einsum,
    "OneHot": _one_hot,
    "GRU LSTM RNN": _recurrent,
    "Attention": _attended,
    # their results depend on no sample; when `free_batch` makes the batch size dynamic, they stay those of the old size
    "Shape Size": lambda n: [None] * len(n.node.output),
}
FORMS = {operator: form for operators, form in _FORMS.items() for operator in operators.split()}
"""Operator -> a function that returns the axis of the samples in its results."""
