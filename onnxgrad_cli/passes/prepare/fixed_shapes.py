"""Sizes and shapes of inputs that the user fixes."""

from __future__ import annotations

import onnx
from onnx import TypeProto

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.options import ShapeOptions


def fix_shapes(graph: Graph, options: ShapeOptions) -> None:
    """Give inputs and symbols the sizes that were asked for.

    Raises:
        UsageError: there is no such input or symbol, or its declared shape says otherwise.
    """
    inputs = {value.name: value for value in graph.proto.graph.input}
    sizes: dict[str, int] = dict(options.dims)
    for name, shape in options.shapes.items():
        if name not in inputs:
            raise UsageError(f"`shapes`: the model has no input '{name}'", suggest(name, inputs, "inputs"))
        declared = shape_of(inputs[name].type)
        if declared is not None and len(declared) != len(shape):
            raise UsageError(f"`shapes`: '{name}' has {len(declared)} dimensions, {len(shape)} were given")
        for old, new in zip(declared or (), shape, strict=False):
            if isinstance(old, int) and old != new:
                raise UsageError(f"`shapes`: '{name}' has size {old} where {new} was given")
            if isinstance(old, str) and old != "?" and isinstance(new, int):
                sizes[old] = new
        inputs[name].type.CopyFrom(onnx.helper.make_tensor_type_proto(dtype_of(inputs[name].type), shape))
    symbols = {dim for value in inputs.values() for dim in shape_of(value.type) or () if isinstance(dim, str)}
    for symbol in options.dims:
        if symbol not in symbols:
            raise UsageError(
                f"`dims`: no input has a dimension '{symbol}'", suggest(symbol, symbols - {"?"}, "symbols")
            )
    if sizes:
        values = graph.proto.graph
        for value in (*values.input, *values.output, *values.value_info):
            _set_dims(value.type, sizes)


def _set_dims(value_type: TypeProto, sizes: dict[str, int]) -> None:
    for dim in value_type.tensor_type.shape.dim:
        if dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]
