"""Find the integers from which a model computes shapes, as far as they are known before it runs.

onnx's shape inference also propagates such integers (data propagation). But it follows fewer operators, and different
operators at each opset. If it mistakes another vector for a shape, it gives up on the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import MAX_INT64, MAX_SHAPE_BYTES, Dim, Shape, is_float, known_sizes

Entries = np.ndarray
"""An array of objects. An entry is an integer, a symbol (str), or None if it is unknown."""

Sizes = list[Dim | None]

SAME_RANK = frozenset(
    "CenterCropPad Conv ConvInteger ConvTranspose DeformConv MaxUnpool Pad QLinearConv Resize Slice Tile "
    "Upsample".split()
)
"""Operators whose result has the rank of their first input, whatever the values of the other inputs."""

FIXED_RANK = {"BlackmanWindow": 1, "HammingWindow": 1, "HannWindow": 1, "MelWeightMatrix": 2, "STFT": 4}
"""Operator -> the rank of its result, for operators whose result always has the same rank."""

DEEPEST = 200
"""Largest number of nodes on a path that is followed back from a shape."""


@dataclass(frozen=True)
class Product:
    """A size, or a product of sizes, as an integer factor and symbols."""

    number: int = 1
    symbols: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: Graph, sizes: Iterable[Dim]) -> Product:
        """Return the product of sizes. A symbol that stands for a multiple of another symbol is split into the two."""
        number, symbols = 1, list[str]()
        for size in sizes:
            factor, symbol = (size, None) if isinstance(size, int) else graph.multiples.get(size, (1, size))
            number *= factor
            symbols += [symbol] if symbol is not None else []
        return cls(number, tuple(sorted(symbols)))

    def __mul__(self, other: Product) -> Product:
        return Product(self.number * other.number, tuple(sorted((*self.symbols, *other.symbols))))

    def over(self, other: Product) -> Product | None:
        """Return this product divided by another, or None if the quotient is no product of an integer and symbols."""
        rest = Counter(self.symbols)
        rest.subtract(other.symbols)
        if min(rest.values(), default=0) < 0 or other.number == 0 or self.number % other.number:
            return None
        return Product(self.number // other.number, tuple(rest.elements()))


class NotKnown(ValueError):
    """Raised if the entries or the shape of a value are unknown before the model runs."""


class ShapeValues:
    """Finds the entries of integer values, such as shapes, from the nodes that compute them."""

    def __init__(self, graph: Graph, makers: Mapping[str, Node]) -> None:
        self.graph = graph
        self._makers = makers
        self._known: dict[str, Entries | None] = {}
        self._depth = 0

    def entries(self, name: str) -> Entries | None:
        """Return the entries of a value, or None if not even the number of its entries is known."""
        if name not in self._known:
            self._known[name] = None  # ends the recursion if the value depends on itself
            self._depth += 1
            self._known[name] = self._found(name) if self._depth < DEEPEST else None
            self._depth -= 1
        return self._known[name]

    def shape(self, name: str) -> Sizes | None:
        """Return the shape of a value with None for unnamed sizes, or None if the rank is unknown."""
        shape = self.graph.shape(name)
        return None if shape is None else [None if size == "?" else size for size in shape]

    def known(self, name: str, *ranks: int) -> Entries:
        """Return the entries of a value, or raise `NotKnown` if they are unknown or their rank is not in `ranks`."""
        found = self.entries(name)
        if found is None or (ranks and found.ndim not in ranks):
            raise NotKnown(name)
        return found

    def sizes(self, name: str) -> Sizes:
        """Return the shape of a value as `shape` does, or raise `NotKnown` if the rank is unknown."""
        found = self.shape(name)
        if found is None:
            raise NotKnown(name)
        return found

    def _found(self, name: str) -> Entries | None:
        constant = self.graph.constant(name)
        if constant is not None:
            return constant.astype(object) if constant.dtype.kind in "iu" else None
        node = self._makers.get(name)
        step = STEPS.get(node.op_type) if node is not None and is_standard(node.domain) else None
        if node is None or step is None:
            return self._of_known_length(name)
        try:
            found = step(self, node)
        except (IndexError, TypeError, ValueError):  # unknown, or invalid entries, which onnx reports
            found = None
        if found is None or found.size > MAX_SHAPE_BYTES // 8:
            return self._of_known_length(name)
        return _each(_if_a_size, found)

    def _of_known_length(self, name: str) -> Entries | None:
        """Return an array of unknown entries (None) if the number of entries is known; otherwise None."""
        shape = known_sizes(self.shape(name))
        if shape is None or len(shape) > 1 or max(shape, default=0) > MAX_SHAPE_BYTES:
            return None
        return np.full(shape, None, object)

    def product(self, sizes: Sequence[Dim | None], by: Sequence[Dim | None] = ()) -> Dim | None:
        """Return the product of `sizes`, divided by the product of `by`.

        Returns:
            A number, a symbol or a multiple of one symbol; None if the result is anything else or unknown.
        """
        if None in sizes or None in by:
            return None
        found = Product.of(self.graph, sizes).over(Product.of(self.graph, by))  # type: ignore[arg-type]
        if found is None or len(found.symbols) > 1:
            return None
        return self._multiple(found.number, *found.symbols) if found.symbols else _if_a_size(found.number)

    def _multiple(self, factor: int, symbol: str) -> Dim | None:
        """Return a symbol that stands for `factor` times another symbol. Equal multiples get the same symbol."""
        if factor in (0, 1):
            return symbol if factor else 0
        if _if_a_size(factor) is None:
            return None
        name = f"{factor}*{symbol}"
        if name in self.graph.multiples:
            return name
        if any(name in (self.graph.shape(each) or ()) for each in self.graph.input_names):
            return None  # an input of the model uses this symbol
        self.graph.multiples[name] = (factor, symbol)
        return name


def computed_shape(values: ShapeValues, node: Node) -> Sizes | None:
    """Return the shape of a node's first output, even if onnx infers no rank for it; None if nothing is known."""
    if node.op_type in FIXED_RANK and is_standard(node.domain):
        return [None] * FIXED_RANK[node.op_type]
    follow = RESULTS.get(node.op_type) if is_standard(node.domain) else None
    if follow is None or not node.input:
        return None
    with suppress(NotKnown):
        if (found := follow(values, node)) is not None:
            return found
    shape = values.shape(node.input[0]) if node.op_type in SAME_RANK else None
    return None if shape is None else [None] * len(shape)


# -- the known entries of the results of nodes -------------------------------------------------------------------


def _if_a_size(entry: Dim | None) -> Dim | None:
    """Return an entry, or None if it is an integer outside of int64.

    Without this limit, a chain of products could create integers that fill the memory.
    """
    return None if isinstance(entry, int) and abs(entry) > MAX_INT64 else entry


def _plain(array: object) -> Entries:
    return np.asarray(array, object)


def _shape(values: ShapeValues, node: Node) -> Entries:
    shape, given = values.sizes(node.input[0]), attributes_of(node)
    return _plain(shape)[given.get("start", 0) : given.get("end", len(shape))]


def _gather(values: ShapeValues, node: Node) -> Entries:
    entries, at = values.known(node.input[0], 1), values.known(node.input[1])
    alike = entries[0] if entries.size and all(entry == entries[0] for entry in entries) else None
    return _each(lambda i: alike if i is None else entries[i], at)


def _slice(values: ShapeValues, node: Node) -> Entries:
    starts, ends, steps = (*node.input[1:3], node.input[4] if len(node.input) > 4 else "")
    numbers = [values.known(name, 1).item() if name else 1 for name in (starts, ends, steps)]
    if not all(isinstance(number, int) for number in numbers):
        raise NotKnown(starts)
    return values.known(node.input[0], 1)[slice(*numbers)]


def _reshape(values: ShapeValues, node: Node) -> Entries:
    """Return the result of a Reshape if both its input and its result are scalars or vectors."""
    entries, shape = values.known(node.input[0], 0, 1), values.sizes(node.output[0])
    return entries.reshape([-1] * len(shape))


def _arithmetic(values: ShapeValues, node: Node) -> Entries:
    left, right = np.broadcast_arrays(*map(values.known, node.input))
    found = np.empty(left.shape, object)
    floats = is_float(values.graph.types.get(node.input[0]))
    pairs = zip(left.flat, right.flat, strict=True)
    found.reshape(-1)[:] = [_combined(values, node.op_type, a, b, floats) for a, b in pairs]
    return found


def _combined(values: ShapeValues, op_type: str, a: Dim | None, b: Dim | None, floats: bool) -> Dim | None:
    """Return the sum, difference, product, quotient, minimum or maximum of two entries.

    Returns:
        None if the result is unknown, or is a quotient of floats that is not an integer.
    """
    if op_type == "Mul":
        return values.product([a, b]) if a != -1 != b else None
    if op_type == "Div":
        if isinstance(a, int) and isinstance(b, int):
            return a // b if a >= 0 < b and not (floats and a % b) else None
        return values.product([a], [b]) if b not in (0, -1) and a != -1 else None
    if (op_type in ("Add", "Sub") and b == 0) or (op_type in ("Max", "Min") and a == b):
        return a
    if op_type == "Add" and a == 0:
        return b
    if not isinstance(a, int) or not isinstance(b, int):
        return None
    return {"Add": a + b, "Sub": a - b, "Max": max(a, b), "Min": min(a, b)}[op_type]


def _product(values: ShapeValues, node: Node) -> Entries | None:
    entries = values.known(node.input[0])
    if -1 in entries.tolist():
        return None
    result = _plain(values.product(entries.tolist()))
    return result.reshape(1) if attributes_of(node).get("keepdims", 1) else result


def _each(function: Callable[[Any], Any], entries: Entries) -> Entries:
    found = np.empty(entries.shape, object)
    found.reshape(-1)[:] = [function(entry) for entry in entries.flat]
    return found


STEPS: dict[str, Callable[[ShapeValues, Node], Entries | None]] = {
    "Shape": _shape,
    "Size": lambda values, node: _plain(values.product(values.sizes(node.input[0]))),
    "Identity": lambda values, node: values.known(node.input[0]),
    # entries are exact integers in every type but bool
    "Cast": lambda values, node: values.known(node.input[0]) if attributes_of(node)["to"] != TensorProto.BOOL else None,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda values, node: np.concatenate(list(map(values.known, node.input))),
    "Unsqueeze": lambda values, node: values.known(node.input[0], 0).reshape(1),
    "Squeeze": lambda values, node: values.known(node.input[0], 1).reshape(()),
    "Reshape": _reshape,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min"), _arithmetic),
    "ReduceProd": _product,
}
"""Operator -> a function that returns the entries of its result, or raises an error if they are unknown."""


# -- the known shapes of the results of nodes ---------------------------------------------------------------------


def _reshaped(values: ShapeValues, node: Node) -> Sizes | None:
    """Return the shape of a Reshape. Source: https://onnx.ai/onnx/operators/onnx__Reshape.html"""
    sizes, shape = values.known(node.input[1], 1).tolist(), values.shape(node.input[0])
    if not attributes_of(node).get("allowzero", 0):
        kept = shape or [None] * len(sizes)
        sizes = [kept[i] if size == 0 and i < len(kept) else size for i, size in enumerate(sizes)]
    if sizes.count(-1) == 1:
        others = [size for size in sizes if size != -1]
        rest = None if shape is None else values.product(shape, others)
        sizes = [rest if size == -1 else size for size in sizes]
    return [None if size == -1 else size for size in sizes]


def _expanded(values: ShapeValues, node: Node) -> Sizes | None:
    target, shape = values.known(node.input[1], 1), values.sizes(node.input[0])
    rank = max(len(shape), target.size)
    left, right = ([1] * (rank - len(sizes)) + sizes for sizes in (shape, target.tolist()))
    return [_broadcast(a, b) for a, b in zip(left, right, strict=True)]


def _broadcast(a: Dim | None, b: Dim | None) -> Dim | None:
    """Return the size that two sizes broadcast to, or None if it is unknown."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    return next((size for size in (a, b) if isinstance(size, int)), None)


def _tiled(values: ShapeValues, node: Node) -> Sizes | None:
    shape, repeats = values.sizes(node.input[0]), values.known(node.input[1], 1)
    return list(map(values.product, zip(shape, repeats, strict=True))) if repeats.size == len(shape) else None


def _ranged(values: ShapeValues, node: Node) -> Sizes | None:
    start, limit, step = (values.entries(name) for name in node.input)
    counts = start is not None and step is not None and start.tolist() == 0 and step.tolist() == 1
    return [limit.item()] if counts and limit is not None else [None]


def _resized(values: ShapeValues, node: Node) -> Sizes | None:
    given = attributes_of(node)
    if len(node.input) < 4 or not node.input[3] or "axes" in given:
        return None
    sizes, shape = values.known(node.input[3], 1).tolist(), values.sizes(node.input[0])
    stretched = given.get("keep_aspect_ratio_policy", b"stretch") == b"stretch"
    return sizes if stretched and len(sizes) == len(shape) else None


def _sampled(values: ShapeValues, node: Node) -> Sizes | None:
    """Return the shape of an AffineGrid, whose points have one coordinate per row of theta."""
    theta = values.shape(node.input[0])
    rows = theta[1] if theta and len(theta) == 3 else None
    return [theta[0], *[None] * rows, rows] if theta and isinstance(rows, int) else None


def _without_axes(values: ShapeValues, node: Node) -> Sizes | None:
    """Return the shape of a Squeeze whose axes are an input.

    If only the number of axes is known, all sizes of the result are None.
    """
    shape, axes = values.sizes(node.input[0]), _axes(values, node)
    if len(axes) > len(shape):
        return None
    if not all(isinstance(axis, int) for axis in axes):
        return [None] * (len(shape) - len(axes))
    gone = {axis % len(shape) for axis in axes}
    return [size for at, size in enumerate(shape) if at not in gone]


def _with_axes(values: ShapeValues, node: Node) -> Sizes | None:
    """Return the shape of an Unsqueeze whose axes are an input.

    If only the number of axes is known, all sizes of the result are None.
    """
    shape, axes = values.sizes(node.input[0]), _axes(values, node)
    rank = len(shape) + len(axes)
    if not all(isinstance(axis, int) for axis in axes):
        return [None] * rank
    added, sizes = {axis % rank for axis in axes}, iter(shape)
    return [1 if at in added else next(sizes, None) for at in range(rank)]


def _axes(values: ShapeValues, node: Node) -> list[Any]:
    """Return the axes in the second input of a node.

    Raises:
        NotKnown: the input is missing, or their number is unknown.
    """
    return values.known(node.input[1] if len(node.input) > 1 else "", 0, 1).reshape(-1).tolist()


RESULTS: dict[str, Callable[[ShapeValues, Node], Sizes | None]] = {
    **dict.fromkeys(SAME_RANK, lambda values, node: None),
    "Reshape": _reshaped,
    "Expand": _expanded,
    "ConstantOfShape": lambda values, node: values.known(node.input[0], 1).tolist(),
    "Tile": _tiled,
    "Range": _ranged,
    "Resize": _resized,
    "AffineGrid": _sampled,
    "Squeeze": _without_axes,
    "Unsqueeze": _with_axes,
}


def better(values: ShapeValues, inferred: Shape | None, computed: Sizes | None, borne: set[Dim]) -> Sizes | None:
    """Combine the shape that onnx inferred with the shape that was computed here.

    Args:
        values: the values from which the sizes were computed.
        inferred: the shape that onnx inferred.
        computed: the shape that `computed_shape` returns.
        borne: the symbols in the shapes of the model's inputs. They are preferred to other symbols, because users know
            them.

    Returns:
        None if the combined shape adds nothing to the inferred one, or if the two have different ranks.
    """
    if inferred is None or computed is None or len(inferred) != len(computed):
        return computed if inferred is None else None
    meaning = borne | values.graph.multiples.keys()
    pairs = zip(inferred, computed, strict=True)
    sizes: Sizes = [
        b if not isinstance(a, int) and a not in borne and (isinstance(b, int) or b in meaning) else a for a, b in pairs
    ]
    return None if sizes == list(inferred) else sizes
