"""Facts about the values of a model, known before it runs: shapes as numbers, element types, and sizes in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.type_inference import follow_shapes
from onnxgrad_cli.ir.types import dtype_of, is_float, itemsize, known_sizes as numbers_in, shape_of

Sizes = tuple[int, ...]

LARGER = (8, 64, 512, 4096, 32768)
"""Sizes to try if size 1 is too short for the network: each size for every symbol alone, then for all symbols."""


class Fact(NamedTuple):
    """The facts about a value: its shape in numbers, number of elements, element type and size in bytes.

    Attributes:
        bytes: None if the size of an element is unknown.
        guessed: True if a size in the shape is unknown and counts as 1.
    """

    shape: Sizes
    elements: int
    dtype: int
    bytes: int | None
    is_float: bool
    guessed: bool


def is_known(value_type: TypeProto | None) -> bool:
    """Return True if a type has a shape in which every size is a number."""
    return numbers_in(shape_of(value_type)) is not None


def known_sizes(graph: Graph, sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int], Facts]:
    """Choose a size for each symbol of a graph's inputs and derive the facts about the graph's values.

    Symbols without a given size get size 1. If this makes an input shorter than the kernel of a convolution, the
    inferred size of the result is negative. Then one symbol, or all of them, get the smallest size in `LARGER` that
    avoids this.

    Args:
        graph: the model, typed.
        sizes: symbol -> its size. Symbols that are not in the graph's inputs are ignored.

    Returns:
        1. Symbol of the inputs -> its given size.
        2. Other symbol of the inputs -> its assumed size.
        3. The facts about the values with these sizes.
    """
    distinct = {id(value_type): value_type for value_type in map(graph.types.get, graph.input_names)}
    own = list(dict.fromkeys(dim for value_type in distinct.values() for dim in _symbols(value_type)))
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
    """A dict of value -> the facts about it, which are computed when they are looked up.

    Most shapes are known once `sizes` replaces the symbols of the inputs. The sizes of other symbols are found by shape
    inference with these sizes. A size that inference can't find, such as one that an operator computes, counts as 1.
    Many values share a type, so the facts about each type are computed only once.
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
        """True if a value would have a negative size, because an input is shorter than a kernel."""
        return any(dim.dim_value < 0 for each in self._exact.values() for dim in each.tensor_type.shape.dim)

    def inside(self, body: Graph) -> Facts:
        """Return the facts about the values in a subgraph, with the same sizes of symbols."""
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
        # Inference does not find these types, but the file declares them, and the sizes of their symbols are known.
        bare.graph.value_info.extend(more)
        return self._inferred(graph, bare)

    def _put_sizes(self, value_type: TypeProto) -> bool:
        """Replace symbols in a type by their sizes, and return True if all of its sizes are known then."""
        for dim, size in zip(value_type.tensor_type.shape.dim, shape_of(value_type) or (), strict=False):
            if isinstance(size, str) and size in self._sizes:
                dim.dim_value = self._sizes[size]
        return is_known(value_type)

    def _inferred(self, graph: Graph, bare: ModelProto) -> dict[str, TypeProto]:
        """Infer the types of a model whose inputs have numbers as sizes. Record the sizes of the other symbols."""
        try:
            found = (follow_shapes(graph, bare) or infer_shapes(bare)).graph
        except onnx.shape_inference.InferenceError:  # the model is invalid for these sizes: use the given sizes alone
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
        """Return the facts about a value.

        Raises:
            LookupError: its rank is unknown.
        """
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
        known: list[int | None] = []
        for dim, now in zip(built, exact or built, strict=True):
            candidates = (now, dim, self._sizes.get(str(now)), self._sizes.get(str(dim)))
            known.append(next((size for size in candidates if isinstance(size, int)), None))
        shape = tuple(1 if found is None else found for found in known)
        elements, dtype, size = math.prod(shape), dtype_of(value_type), None
        with suppress(LookupError):  # an unknown type
            size = elements * itemsize(dtype)
        return Fact(shape, elements, dtype, size, is_float(value_type), None in known)

    def known(self, name: str) -> Fact | None:
        """Return the facts about a value, or None if its rank is unknown."""
        try:
            return self[name]
        except LookupError:
            return None

    def bytes(self, name: str) -> int:
        """Return the size of a value in bytes.

        Raises:
            LookupError: its rank or its type is unknown.
        """
        size = self[name].bytes
        if size is None:
            raise LookupError(name)
        return size

    @property
    def guesses(self) -> int:
        """The number of values that were looked up and have an unknown size, which counts as 1."""
        return sum(fact.guessed for fact in self.values()) + sum(body.guesses for body in self._bodies)


def _symbols(value_type: TypeProto | None) -> list[str]:
    return [dim for dim in shape_of(value_type) or () if isinstance(dim, str)]
