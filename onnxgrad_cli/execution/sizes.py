"""Sizes for the symbols of a model's inputs, to be tried in order until the model runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from onnx import ModelProto, numpy_helper

from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.types import SMALL, Shape, is_external, nbytes

SIZES = (8, 16, 32, 5, 64, 224)
"""Sizes that are tried, in order, for symbols that do not lead an input: networks have axes that must be long enough,
or divide by something."""

LONGEST, MOST = 1024, 12
"""Of sizes that are found in a model, the longest and the number that are tried."""

MOST_ELEMENTS = 2**23
"""Of an input, at sizes other than the smallest."""

OF_SQUARES = frozenset({"Inverse", "Det"})
"""Operators on square matrices; of others, onnxruntime's Inverse writes where it must not, and the process may end."""

LEADING = 2
"""The size of symbols that lead an input: of batches."""

ALIKE = (0, 0)
APART = ((1, 1), (1, 0), ALIKE)
"""Whether the sizes of symbols that lead inputs, and of the others, differ from one another."""


def sizes_to_try(shapes: Mapping[str, Shape], model: ModelProto, apart: bool = False) -> Iterator[dict[str, int]]:
    """A size for every symbol in the shapes of inputs, in the order of what is most likely to fit.

    Last come the sizes that constant shapes in the model have: an exporter's example may have left them there.

    Of language models, a symbol may be the sum of others, by an exporter's convention ('past_sequence_length +
    sequence_length', or 'total_sequence_length' beside these two); and what is past may be empty.

    Args:
        shapes: the shapes of inputs, by name.
        model: what is to be run.
        apart: begin with sizes that differ from each other.
    """
    leading = leading_symbols(shapes)
    if any(node.op_type in OF_SQUARES for node in with_bodies(model.graph.node)):
        yield from ({symbol: size for symbol in leading} for size in SIZES[:2])
        return
    first = itertools.product(SIZES, APART if apart else (ALIKE,))
    for size, (small, large) in (*first, *((size, ALIKE) for size in _left_behind(model))):
        batches, others = itertools.count(LEADING, small), itertools.count(size, size * large)
        sizes = {symbol: next(batches if leads else others) for symbol, leads in leading.items()}
        past = {symbol: 0 for symbol in sizes if symbol.startswith("past") and not _terms(symbol, sizes)}
        for found in (summed(sizes), summed(sizes | past))[: 1 + bool(past)]:
            filled = sized(shapes, found).values()
            if size == SIZES[0] or all(math.prod(shape) <= MOST_ELEMENTS for shape in filled):
                yield found


def sized(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """The shapes of inputs with sizes for their symbols; one that has none there is of `LEADING`."""
    return {
        name: [sizes.get(symbol_at(name, axis, dim), LEADING) if isinstance(dim, str) else dim for axis, dim in each]
        for name, each in ((name, enumerate(shape)) for name, shape in shapes.items())
    }


def symbol_at(name: str, axis: int, dim: str) -> str:
    """The symbol of an axis of an input, one of its own where the size has no name."""
    return f"{name}/{axis}" if dim == "?" else dim


def leading_symbols(shapes: Mapping[str, Shape]) -> dict[str, bool]:
    """The symbols in the shapes of inputs, and whether they only lead inputs."""
    leading: dict[str, bool] = {}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape):
            if isinstance(dim, str):
                symbol = symbol_at(name, axis, dim)
                leading[symbol] = leading.get(symbol, True) and axis == 0
    return leading


def _left_behind(model: ModelProto) -> list[int]:
    """The sizes in constant shapes that values are brought to, small ones first."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = {node.input[1] for node in model.graph.node if node.op_type in ("Reshape", "Expand")}
    small = [stored[name] for name in shapes if name in stored and nbytes(stored[name]) <= SMALL]
    sizes = {int(size) for tensor in small if not is_external(tensor) for size in numpy_helper.to_array(tensor).flat}
    return sorted(size for size in sizes - set(SIZES) if 1 < size <= LONGEST)[:MOST]


def summed(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, in which a symbol that is the sum of others is that."""
    return {
        symbol: sum(sizes[term] if term in sizes else int(term) for term in terms)
        if (terms := _terms(symbol, sizes))
        else size
        for symbol, size in sizes.items()
    }


def _terms(symbol: str, sizes: Mapping[str, int]) -> list[str]:
    """The symbols that one is the sum of, if it is."""
    whole = symbol.removeprefix("total_")
    terms = [f"past_{whole}", whole] if whole != symbol else [term.strip() for term in symbol.split("+")]
    return terms if len(terms) > 1 and all(term in sizes or term.isdecimal() for term in terms) else []
