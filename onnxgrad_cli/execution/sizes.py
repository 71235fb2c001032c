"""Sizes for the symbols of a model's inputs, to be tried in order until the model runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, numpy_helper

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.types import SMALL, Shape, dtype_of, is_external, nbytes, shape_of

SIZES = (8, 16, 32, 5, 64, 224)
"""Sizes that are tried, in order, for symbols that do not lead an input: networks have axes that must be long enough,
or divide by something."""

OF_SIGNALS, OF_A_SIGNAL = (512, 1024), 2**16
"""Sizes that are tried last, as for audio, and of how many elements an input may be then."""

LONGEST, MOST = 1024, 12
"""Of sizes that are found in a model, the longest and the number that are tried."""

MOST_ELEMENTS = 2**23
"""Of an input, at sizes other than the smallest."""

OF_SQUARES = frozenset({"Inverse", "Det"})
"""Operators on square matrices; of others, onnxruntime's Inverse writes where it must not, and the process may end."""

ENTRY_BY_ENTRY = frozenset({"Add", "Div", "Mul", "PRelu", "Pow", "Sub", "Where"})
"""Operators of which an input may be a vector along the last axis."""

LEADING = 2
"""The size of symbols that lead an input: of batches."""

ALIKE = (0, 0)
APART = ((1, 1), (1, 0), ALIKE)
"""Whether the sizes of symbols that lead inputs, and of the others, differ from one another."""


def sizes_to_try(shapes: Mapping[str, Shape], model: ModelProto, apart: bool = False) -> Iterator[dict[str, int]]:
    """A size for every symbol in the shapes of inputs, in the order of what is most likely to fit.

    Then come the sizes that constant shapes in the model have: an exporter's example may have left them there. Then
    those that stored vectors and matrices demand, and those of signals.

    Where a symbol leads an input and stands elsewhere in another, as a batch does in the states of a recurrent network,
    sizes at which it is small come after all others. Last come those at which the only open size of an input is
    small: the batch in the states of a recurrent network whose sizes have no names.

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
    first = {symbol_at(name, 0, str(shape[0])) for name, shape in shapes.items() if shape}
    somewhere = {symbol: symbol in first for symbol in leading}
    open_sizes = [[symbol_at(name, i, s) for i, s in enumerate(x) if isinstance(s, str)] for name, x in shapes.items()]
    alone = {symbols[0] for symbols in open_sizes if len(symbols) == 1}
    batches_alone = {symbol: symbol in first or symbol in alone for symbol in leading}
    variants = [leading, somewhere, batches_alone, dict.fromkeys(leading, False)]
    for leads in (each for at, each in enumerate(variants) if each not in variants[:at]):
        for size, (small, large), most in _in_order(model, apart):
            batches, others = itertools.count(LEADING, small), itertools.count(size, size * large)
            sizes = {symbol: next(batches if leads[symbol] else others) for symbol in leads}
            for found in _with_pasts(sizes):
                if all(math.prod(shape) <= most for shape in sized(shapes, found).values()):
                    yield found


def _in_order(model: ModelProto, apart: bool) -> Iterator[tuple[int, tuple[int, int], float]]:
    """The sizes of symbols that lead no input, how sizes differ, and of how many elements an input may be then."""
    for size, differ in itertools.product(SIZES, APART if apart else (ALIKE,)):
        yield size, differ, math.inf if size == SIZES[0] else MOST_ELEMENTS
    for size in (*_left_behind(model), *_demanded(model)):
        yield size, ALIKE, MOST_ELEMENTS
    for size in OF_SIGNALS:
        yield size, ALIKE, OF_A_SIGNAL


def _with_pasts(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes, and if some are of what is past, those in which that is empty; sums of others are summed."""
    yield summed(sizes)
    past = {symbol: 0 for symbol in sizes if symbol.startswith("past") and not _terms(symbol, sizes)}
    if past:
        yield summed({**sizes, **past})


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
    """The sizes in constants of which shapes are made that values are brought to."""
    stored = {name: tensor for name, tensor in _constants(model) if nbytes(tensor) <= SMALL}
    read = [
        name
        for node in model.graph.node
        for name in (node.input[1:2] if node.op_type in ("Reshape", "Expand") else node.input)
        if node.op_type in ("Reshape", "Expand", "Concat")
    ]
    whole = (stored[name] for name in read if name in stored and stored[name].data_type == TensorProto.INT64)
    return _tried({int(size) for tensor in whole for size in numpy_helper.to_array(tensor).flat})


def switch_values(model: ModelProto) -> dict[str, int]:
    """Return the integer that each input of one element is compared with, such as a sample rate that selects a branch.

    Only the first comparison with a stored integer counts.
    """
    stored = {name: tensor for name, tensor in _constants(model) if nbytes(tensor) <= SMALL}
    numbers = {value.name for value in model.graph.input if _is_integer(value.type)} - stored.keys()
    values: dict[str, int] = {}
    for node in model.graph.node if numbers else ():
        for name, other in (node.input[:], node.input[::-1]) if node.op_type == "Equal" else ():
            if name in numbers and other in stored and math.prod(stored[other].dims) == 1:
                values.setdefault(name, int(numpy_helper.to_array(stored[other]).item()))
    return values


def _is_integer(value_type: TypeProto) -> bool:
    """Return True if a type is that of one integer."""
    shape = shape_of(value_type)
    integer = dtype_of(value_type) in (TensorProto.INT32, TensorProto.INT64)
    return integer and shape is not None and all(size == 1 for size in shape)


def _demanded(model: ModelProto) -> list[int]:
    """The lengths of stored vectors that values meet entry by entry, and of the rows that stored matrices multiply."""
    dims = {name: tensor.dims for name, tensor in _constants(model)}
    sizes: set[int] = set()
    for node in model.graph.node:
        if node.op_type in ENTRY_BY_ENTRY:
            sizes.update(dims[name][0] for name in node.input if len(dims.get(name, ())) == 1)
        elif node.op_type in ("MatMul", "Gemm") and len(dims.get(node.input[1], ())) == 2:
            transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            sizes.add(dims[node.input[1]][transposed])
    return _tried(sizes)


def _constants(model: ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """What is stored in a model itself, and the name of the value."""
    yield from ((tensor.name, tensor) for tensor in model.graph.initializer if not is_external(tensor))
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.type == AttributeProto.TENSOR:
                yield node.output[0], attribute.t


def _tried(sizes: set[int]) -> list[int]:
    """Of sizes that are found in a model those that are tried, small ones first."""
    return sorted(size for size in sizes - set(SIZES) if 1 < size <= LONGEST)[:MOST]


def summed(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, in which a symbol that is the sum of others is that."""
    return {
        symbol: sum(sizes[term] if term in sizes else number_in(term) or 0 for term in terms)
        if (terms := _terms(symbol, sizes))
        else size
        for symbol, size in sizes.items()
    }


def _terms(symbol: str, sizes: Mapping[str, int]) -> list[str]:
    """The symbols that one is the sum of, if it is."""
    whole = symbol.removeprefix("total_")
    terms = [f"past_{whole}", whole] if whole != symbol else [term.strip() for term in symbol.split("+")]
    return terms if len(terms) > 1 and all(term in sizes or number_in(term) is not None for term in terms) else []
