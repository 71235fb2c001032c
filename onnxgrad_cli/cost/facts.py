"""What is known of a model's values before it runs: their shapes in numbers, their types and their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import follow_shapes
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import dtype_of, is_float, itemsize, shape_of

Sizes = tuple[int, ...]

LARGER = (8, 64, 512, 4096, 32768)
"""What one symbol without a size counts as, or all, where 1 is too short: the first that a network can take."""


class Fact(NamedTuple):
    """What is known of a value: its shape in numbers, how many elements and bytes it has, and of what type."""

    shape: Sizes
    elements: int
    dtype: int
    bytes: int | None
    is_float: bool
    guessed: bool


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


def _input_symbols(graph: Graph) -> list[str]:
    """The symbols in the types of the graph's inputs, each once, in order."""
    distinct = {id(value_type): value_type for value_type in map(graph.types.get, graph.input_names)}
    return list(dict.fromkeys(dim for value_type in distinct.values() for dim in _symbols(value_type)))


def known_bytes(names: Iterable[str], facts: Facts) -> tuple[int, int]:
    """The bytes of values together, and how many of the values have an unknown size."""
    total = unknown = 0
    for name in names:
        try:
            total += facts.bytes(name)
        except LookupError:
            unknown += 1
    return total, unknown


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
