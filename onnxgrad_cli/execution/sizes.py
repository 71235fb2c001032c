"""Sizes for the symbols of a model's inputs, to be tried in order until the model runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial

from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, numpy_helper

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.types import SMALL, Shape, dtype_of, is_external, nbytes, shape_of

SIZES = (8, 16, 32, 5, 64)
"""Small sizes for symbols that do not lead an input, in the order in which they are tried: networks have axes that must
be long enough, or divide by something."""

OF_IMAGES = (128, 224)
"""Large sizes, which are tried after all small ones."""

OF_SIGNALS, OF_A_SIGNAL = (512, 1024), 2**16
"""Sizes that are tried last, as for audio, and of how many elements an input may be then."""

LONGEST, MOST = 1024, 12
"""Of sizes that are found in a model, the longest and the number that are tried."""

MOST_ELEMENTS = 2**23
"""Of an input, at sizes other than the smallest."""

OF_SQUARES = frozenset({"Inverse", "Det"})
"""Operators on square matrices; of others, onnxruntime's Inverse writes where it must not, and the process may end."""

OF_SPECTRA = frozenset({"DFT", "STFT"})
"""Operators on windows of a signal. A signal shorter than a window has none, and then onnxruntime's DFT divides by zero
and ends the process."""

ENTRY_BY_ENTRY = frozenset({"Add", "Div", "Mul", "PRelu", "Pow", "Sub", "Where"})
"""Operators of which an input may be a vector along the last axis."""

LEADING = 2
"""The size of symbols that lead an input: of batches."""

ALIKE = (0, 0)
APART = ((1, 1), (1, 0), ALIKE)
"""Whether the sizes of symbols that lead inputs, and of the others, differ from one another."""


def sizes_to_try(
    shapes: Mapping[str, Shape], model: ModelProto, apart: bool = False, ones: bool = True
) -> Iterator[dict[str, int]]:
    """Yield sizes for the symbols in the shapes of inputs, cheap ones first, each once.

    1. Batches of 2 with other sizes from `SIZES`, then with small sizes that the model stores: an exporter's example
       may have left them in a shape, or a stored vector or matrix demands them.
    2. One size for all symbols. Then as 1 with batches of 1, then 1 for each symbol alone and for all: broadcasting
       hides faults there.
    3. Large sizes, from the model or from `OF_IMAGES`, in the order of the number of elements of the inputs; each with
       batches of 2, then of 1.
    4. Sizes of signals; in models with operators of `OF_SPECTRA` they come first.

    A symbol is a batch if it is called so, or if it leads an input. So may be one that leads an input and stands
    elsewhere in another, as in the states of a recurrent network, or one that is the only open size of an input. All
    readings are tried.

    Of language models, a symbol may be the sum of others, by an exporter's convention ('past_sequence_length +
    sequence_length', or 'total_sequence_length' beside these two); and what is past may be empty.

    Args:
        shapes: the shapes of inputs, by name.
        model: the model to run.
        apart: begin with sizes that differ from each other.
        ones: include the sizes of step 2.
    """
    leading = leading_symbols(shapes)
    if any(node.op_type in OF_SQUARES for node in with_bodies(model.graph.node)):
        yield from ({symbol: size for symbol in leading} for size in SIZES[:2])
        return
    tried: list[dict[str, int]] = []
    for sizes, most in _in_order(shapes, model, apart, ones):
        for found in _with_pasts(sizes):
            if found not in tried and elements(shapes, found) <= most:
                tried.append(found)
                yield found


def elements(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> int:
    """Return the number of elements of the largest input."""
    return max((math.prod(shape) for shape in sized(shapes, sizes).values()), default=0)


def _in_order(
    shapes: Mapping[str, Shape], model: ModelProto, apart: bool, ones: bool
) -> Iterator[tuple[dict[str, int], float]]:
    """Yield sizes for the symbols, and the most elements that an input may have then."""
    readings = _batches(shapes)

    def filled(size: int, batch: int = LEADING, differ: tuple[int, int] = ALIKE) -> Iterator[dict[str, int]]:
        for leads in readings:
            batches, others = itertools.count(batch, differ[0]), itertools.count(size, size * differ[1])
            yield {symbol: next(batches if leads[symbol] else others) for symbol in leads}

    stored = [*_left_behind(model), *_demanded(model)]
    few = [size for size in stored if size <= max(SIZES)]
    spectral = any(node.op_type in OF_SPECTRA for node in with_bodies(model.graph.node))
    smallest = (*OF_SIGNALS, *SIZES) if spectral else SIZES
    for size, differ in itertools.product(smallest, APART if apart else (ALIKE,)):
        most = math.inf if size == SIZES[0] else MOST_ELEMENTS
        yield from ((sizes, most) for sizes in filled(size, differ=differ))
    for size in few:
        yield from ((sizes, MOST_ELEMENTS) for sizes in filled(size))
    if ones:
        vectors = any(len(shape) == 1 and isinstance(shape[0], str) for shape in shapes.values())
        alike = (*SIZES, *few) if vectors or len(readings[0]) > 1 else ()
        yield from ((dict.fromkeys(readings[0], size), MOST_ELEMENTS) for size in alike)
        for size in (*SIZES, *few):
            yield from ((sizes, MOST_ELEMENTS) for sizes in filled(size, batch=1))
        for usual in (*filled(SIZES[0]), *filled(SIZES[0], batch=1)):
            yield from (({**usual, symbol: 1}, MOST_ELEMENTS) for symbol in usual)
            yield dict.fromkeys(usual, 1), MOST_ELEMENTS
    large = [size for size in stored if size > max(SIZES)]
    for sizes in sorted((x for size in (*OF_IMAGES, *large) for x in filled(size)), key=partial(elements, shapes)):
        yield sizes, MOST_ELEMENTS
        if ones:
            yield {symbol: 1 if size == LEADING else size for symbol, size in sizes.items()}, MOST_ELEMENTS
    for size in OF_SIGNALS:
        yield from ((sizes, OF_A_SIGNAL) for sizes in filled(size))


def _batches(shapes: Mapping[str, Shape]) -> list[dict[str, bool]]:
    """Return the readings of which symbols are batches, the likeliest first."""
    leading = leading_symbols(shapes)
    symbols = [[symbol_at(name, i, s) for i, s in enumerate(x) if isinstance(s, str)] for name, x in shapes.items()]
    first = {symbol_at(name, 0, str(shape[0])) for name, shape in shapes.items() if shape}
    once = {symbol for symbol in leading if all(own.count(symbol) <= 1 for own in symbols)}
    alone = {own[0] for own in symbols if len(own) == 1}
    named = {symbol for symbol in leading if "batch" in symbol.lower()}
    readings = [
        *([{symbol: symbol in named for symbol in leading}] if named else []),
        {symbol: leads or symbol in first & once for symbol, leads in leading.items()},
        leading,
        {symbol: leads or symbol in alone for symbol, leads in leading.items()},
    ]
    return [each for at, each in enumerate(readings) if each not in readings[:at]]


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
