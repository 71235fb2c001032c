"""Yield sizes for the symbols in a model's input shapes, in the order in which they are to be tried.

The caller tries the sizes until the model runs. A symbol counts as a batch if it is the first axis of inputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, numpy_helper

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import MAX_SHAPE_BYTES, Shape, dtype_of, is_external, nbytes, shape_of

SIZES = (8, 16, 32, 5, 64)
"""Small sizes for symbols other than batches, in the order in which they are tried.

A network may have axes that must be long enough, or divisible by some number.
"""

OF_IMAGES = (128, 224)
"""Typical sizes of images, which are tried after all small sizes."""

OF_SIGNALS, OF_A_SIGNAL = (512, 1024), 2**16
"""Typical lengths of audio, which are tried last; and the largest number of elements of an input at these lengths."""

MAX_SIZE, MAX_SIZES = 1024, 12
"""The largest size that is taken from constants of a model, and the largest number of such sizes."""

MOST_ELEMENTS = 2**23
"""The largest number of elements of an input, except at the smallest sizes."""

OF_SQUARES = frozenset({"Inverse", "Det"})
"""Operators that require square matrices.

For other matrices, onnxruntime's Inverse writes out of bounds, and the process may crash.
"""

OF_SPECTRA = frozenset({"DFT", "STFT"})
"""Operators that take windows of a signal.

If a signal is shorter than a window, onnxruntime's DFT divides by zero and the process crashes.
"""

ENTRY_BY_ENTRY = frozenset({"Add", "Div", "Mul", "PRelu", "Pow", "Sub", "Where"})
"""Elementwise operators. A stored vector among their inputs shows the size of the last axis."""

LEADING = 2
"""The number of samples in a batch."""

ALIKE = (0, 0)
APART = ((1, 1), (1, 0), ALIKE)
"""Pairs of flags, for batch symbols and for other symbols. 1: all have different sizes. 0: all have the same size."""


def sizes_to_try(
    shapes: Mapping[str, Shape], model: ModelProto, apart: bool = False, ones: bool = True
) -> Iterator[dict[str, int]]:
    """Yield maps from symbol to size, for the symbols in the shapes of inputs. No map is yielded twice.

    The steps are, in this order:

    1. Batches have size 2. All other symbols have the same size: each of `SIZES` in turn.
    2. The same with small sizes from the model's constants: from shapes, which exporters take from their example
       inputs, and from the lengths of stored vectors and matrices.
    3. Batches have the same size as the other symbols: each size of steps 1 and 2 in turn. This step is left out if
       there is only one symbol and no input is a vector.
    4. Steps 1 and 2 with batches of size 1.
    5. Each symbol alone has size 1, then all symbols have. Sizes of 1 come late, because broadcasting hides errors.
    6. Large sizes, from `OF_IMAGES` and the model's constants, with batches of 2 and then of 1. They are sorted by the
       number of elements of the largest input.
    7. Sizes from `OF_SIGNALS`. If the model has operators of `OF_SPECTRA`, these sizes come before step 1 too.

    If the model has operators of `OF_SQUARES`, all symbols have the same size, the first or second of `SIZES`.

    A symbol is a batch if its name contains 'batch', or if it occurs only as the first axis of inputs. It may also be a
    batch if it is the first axis of one input and a later axis of another, as in the states of a recurrent network, or
    if it is the only symbol of an input. All these interpretations are tried.

    In language models, a symbol may be the sum of others by convention: 'past_sequence_length + sequence_length', or
    'total_sequence_length' if both of these exist. A past length of 0 is tried too.

    Args:
        shapes: input -> its shape.
        model: the model to run.
        apart: for each size of step 1, first give each symbol a different size.
        ones: include steps 3 to 5 and the batches of 1 in step 6.
    """
    leading = leading_symbols(shapes)
    if any(node.op_type in OF_SQUARES for node in with_bodies(model.graph.node)):
        yield from ({symbol: size for symbol in leading} for size in SIZES[:2])
        return
    tried: list[dict[str, int]] = []
    for group, most in _in_order(shapes, model, apart, ones):
        for found in itertools.chain.from_iterable(map(_with_pasts, group)):
            if found not in tried and elements(shapes, found) <= most:
                tried.append(found)
                yield found


def elements(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> int:
    """Return the number of elements of the largest input at these sizes."""
    return max((math.prod(shape) for shape in sized(shapes, sizes).values()), default=0)


def _in_order(
    shapes: Mapping[str, Shape], model: ModelProto, apart: bool, ones: bool
) -> Iterator[tuple[Iterable[dict[str, int]], float]]:
    """Yield groups of sizes in the order of trial, each with the largest number of elements that an input may have."""
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
        yield filled(size, differ=differ), math.inf if size == SIZES[0] else MOST_ELEMENTS
    for size in few:
        yield filled(size), MOST_ELEMENTS
    if ones:
        vectors = any(len(shape) == 1 and isinstance(shape[0], str) for shape in shapes.values())
        alike = (*SIZES, *few) if vectors or len(readings[0]) > 1 else ()
        yield [dict.fromkeys(readings[0], size) for size in alike], MOST_ELEMENTS
        for size in (*SIZES, *few):
            yield filled(size, batch=1), MOST_ELEMENTS
        for usual in (*filled(SIZES[0]), *filled(SIZES[0], batch=1)):
            yield [*({**usual, symbol: 1} for symbol in usual), dict.fromkeys(usual, 1)], MOST_ELEMENTS
    large = [size for size in stored if size > max(SIZES)]
    for sizes in sorted((x for size in (*OF_IMAGES, *large) for x in filled(size)), key=partial(elements, shapes)):
        yield [sizes], MOST_ELEMENTS
        if ones:
            yield [{symbol: 1 if size == LEADING else size for symbol, size in sizes.items()}], MOST_ELEMENTS
    for size in OF_SIGNALS:
        yield filled(size), OF_A_SIGNAL


def _batches(shapes: Mapping[str, Shape]) -> list[dict[str, bool]]:
    """Return the possible interpretations of the symbols, the likeliest first. Each maps symbol -> True for a batch."""
    leading = leading_symbols(shapes)
    symbols = [[symbol_at(name, i, s) for i, s in enumerate(x) if isinstance(s, str)] for name, x in shapes.items()]
    first = {symbol_at(name, 0, str(shape[0])) for name, shape in shapes.items() if shape}
    once = {symbol for symbol in leading if all(own.count(symbol) <= 1 for own in symbols)}
    alone = {own[0] for own in symbols if len(own) == 1}
    named = {symbol for symbol in leading if "batch" in symbol.lower()}
    sure = {symbol for symbol in leading if leading[symbol]}
    readings = dict.fromkeys(map(frozenset, [named or sure | first & once, sure | first & once, sure, sure | alone]))
    return [{symbol: symbol in batches for symbol in leading} for batches in readings]


def _with_pasts(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the sizes, with symbols that are sums set to their sums.

    If there are past lengths, yield the sizes again with past lengths of 0.
    """
    yield summed(sizes)
    past = {symbol: 0 for symbol in sizes if symbol.startswith("past") and not _terms(symbol, sizes)}
    if past:
        yield summed({**sizes, **past})


def sized(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return input -> its shape with sizes in place of symbols. A symbol without a size gets `LEADING`."""
    return {
        name: [sizes.get(symbol_at(name, axis, dim), LEADING) if isinstance(dim, str) else dim for axis, dim in each]
        for name, each in ((name, enumerate(shape)) for name, shape in shapes.items())
    }


def symbol_at(name: str, axis: int, dim: str) -> str:
    """Return the symbol of an input's axis. An unnamed dimension ('?') gets a symbol that stands for this axis only."""
    return f"{name}/{axis}" if dim == "?" else dim


def leading_symbols(shapes: Mapping[str, Shape]) -> dict[str, bool]:
    """Return a map for the symbols in the shapes of inputs: symbol -> True if it occurs only as the first axis."""
    leading: dict[str, bool] = {}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape):
            if isinstance(dim, str):
                symbol = symbol_at(name, axis, dim)
                leading[symbol] = leading.get(symbol, True) and axis == 0
    return leading


def _left_behind(model: ModelProto) -> list[int]:
    """Return the sizes in constants that Reshape or Expand take as a shape, or that Concat may join to a shape."""
    stored = {name: tensor for name, tensor in _constants(model) if nbytes(tensor) <= MAX_SHAPE_BYTES}
    nodes = [node for node in model.graph.node if node.op_type in ("Reshape", "Expand", "Concat")]
    read = [name for node in nodes for name in (node.input if node.op_type == "Concat" else node.input[1:2])]
    whole = (stored[name] for name in read if name in stored and stored[name].data_type == TensorProto.INT64)
    return _tried({int(size) for tensor in whole for size in numpy_helper.to_array(tensor).flat})


def switch_values(model: ModelProto) -> dict[str, int]:
    """Return integer input -> the stored integer that an Equal compares it with, such as a supported sample rate.

    Only inputs of one element, and the first such comparison, count.
    """
    stored = {name: tensor for name, tensor in _constants(model) if nbytes(tensor) <= MAX_SHAPE_BYTES}
    numbers = {value.name for value in model.graph.input if _is_integer(value.type)} - stored.keys()
    values: dict[str, int] = {}
    for node in model.graph.node if numbers else ():
        for name, other in (node.input[:], node.input[::-1]) if node.op_type == "Equal" else ():
            if name in numbers and other in stored and math.prod(stored[other].dims) == 1:
                values.setdefault(name, int(numpy_helper.to_array(stored[other]).item()))
    return values


def _is_integer(value_type: TypeProto) -> bool:
    """Return True if a type is an integer tensor with a single element."""
    shape = shape_of(value_type)
    integer = dtype_of(value_type) in (TensorProto.INT32, TensorProto.INT64)
    return integer and shape is not None and all(size == 1 for size in shape)


def _demanded(model: ModelProto) -> list[int]:
    """Return sizes of axes that stored constants require, other than shapes.

    These are the lengths of vectors in elementwise operators, and the inner sizes of products with matrices.
    """
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
    """Yield the constants that are stored in the model itself, as (name of the value, tensor)."""
    yield from ((tensor.name, tensor) for tensor in model.graph.initializer if not is_external(tensor))
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.type == AttributeProto.TENSOR:
                yield node.output[0], attribute.t


def _tried(sizes: set[int]) -> list[int]:
    """Return those sizes found in a model that are worth trying, small ones first."""
    return sorted(size for size in sizes - set(SIZES) if 1 < size <= MAX_SIZE)[:MAX_SIZES]


def summed(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes, with each symbol that is a sum of others set to this sum."""
    return {
        symbol: sum(sizes[term] if term in sizes else number_in(term) or 0 for term in terms)
        if (terms := _terms(symbol, sizes))
        else size
        for symbol, size in sizes.items()
    }


def _terms(symbol: str, sizes: Mapping[str, int]) -> list[str]:
    """Return the terms of a symbol whose name stands for a sum, such as 'a + b'; [] for other symbols."""
    whole = symbol.removeprefix("total_")
    terms = [f"past_{whole}", whole] if whole != symbol else [term.strip() for term in symbol.split("+")]
    return terms if len(terms) > 1 and all(term in sizes or number_in(term) is not None for term in terms) else []
