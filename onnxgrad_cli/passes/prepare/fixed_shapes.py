"""Sizes and shapes of inputs that the user fixes."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import TypeProto

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.options import ShapeOptions


def fix_shapes(graph: Graph, options: ShapeOptions) -> None:
    """Give inputs and symbols the sizes that were asked for.

    Raises:
        UsageError: there is no such input or symbol, or its declared shape says otherwise.
    """
    inputs = {value.name: value.type for value in graph.proto.graph.input}
    sizes = dict(options.dims)
    for name, shape in options.shapes.items():
        if name not in inputs:
            raise UsageError(f"`shapes`: the model has no input '{name}'", suggest(name, inputs, "inputs"))
        sizes |= _sizes_of_symbols(name, shape_of(inputs[name]), shape)
        inputs[name].CopyFrom(onnx.helper.make_tensor_type_proto(dtype_of(inputs[name]), shape))
    _refuse_unknown_symbols(options.dims, inputs.values())
    if sizes:
        values = graph.proto.graph
        for value in (*values.input, *values.output, *values.value_info):
            _set_dims(value.type, sizes)


def fixed_sizes(options: ShapeOptions) -> dict[str, tuple[int, ...]]:
    """The symbols and the inputs that were given a size or a shape of numbers alone, with these."""
    shapes = {name: tuple(size for size in shape if isinstance(size, int)) for name, shape in options.shapes.items()}
    whole = {name: sizes for name, sizes in shapes.items() if len(sizes) == len(options.shapes[name])}
    return {**{symbol: (size,) for symbol, size in options.dims.items()}, **whole}


def _sizes_of_symbols(name: str, declared: Shape | None, asked: Shape) -> dict[str, int]:
    """The sizes that the symbols of an input's declared shape get where its shape is fixed to `asked`.

    Raises:
        UsageError: the two shapes contradict each other.
    """
    if declared is None:
        return {}
    if len(declared) != len(asked):
        raise UsageError(f"`shapes`: '{name}' has {len(declared)} dimensions, {len(asked)} were given")
    pairs = list(zip(declared, asked, strict=True))
    for old, new in pairs:
        if isinstance(old, int) and old != new:
            raise UsageError(f"`shapes`: '{name}' has size {old} where {new} was given")
    return {old: new for old, new in pairs if isinstance(old, str) and old != "?" and isinstance(new, int)}


def _refuse_unknown_symbols(asked: Iterable[str], inputs: Iterable[TypeProto]) -> None:
    symbols = {dim for value_type in inputs for dim in shape_of(value_type) or () if isinstance(dim, str)}
    for symbol in asked:
        if symbol not in symbols:
            named = symbols - {"?"}
            raise UsageError(f"`dims`: no input has a dimension '{symbol}'", suggest(symbol, named, "symbols"))


def _set_dims(value_type: TypeProto, sizes: dict[str, int]) -> None:
    for dim in value_type.tensor_type.shape.dim:
        if dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]
