"""Set shapes of inputs and sizes of symbolic dimensions as the user requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.errors import suggest, unknown_name, wrong_shape, wrong_value
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import Shape, dtype_of, known_sizes, shape_of
from onnxgrad_cli.options import ShapeOptions


def fix_shapes(graph: Graph, options: ShapeOptions) -> None:
    """Give inputs and symbols the requested sizes.

    Raises:
        UsageError: the input or symbol does not exist, its declared shape contradicts the request, or it must not be
            empty.
    """
    inputs = {value.name: value.type for value in graph.proto.graph.input}
    declared = {name: shape_of(value_type) or () for name, value_type in inputs.items()}
    sizes = dict(options.dims)
    for name, shape in options.shapes.items():
        if name not in inputs:
            raise unknown_name(f"`shapes`: the model has no input '{name}'", suggest(name, inputs, "inputs"))
        sizes |= _sizes_of_symbols(name, shape_of(inputs[name]), shape)
        inputs[name].CopyFrom(onnx.helper.make_tensor_type_proto(dtype_of(inputs[name]), shape))
    _refuse_unknown_symbols(options.dims, inputs.values())
    if sizes:
        values = graph.proto.graph
        for value in (*values.input, *values.output, *values.value_info):
            _set_dims(value.type, sizes)
    _refuse_empty(graph, options, declared)


def fixed_sizes(options: ShapeOptions) -> dict[str, tuple[int, ...]]:
    """Return a map from each symbol or input that the options fix to its sizes. Partly fixed inputs are left out."""
    whole = {name: sizes for name, shape in options.shapes.items() if (sizes := known_sizes(shape)) is not None}
    return {**{symbol: (size,) for symbol, size in options.dims.items()}, **whole}


def _sizes_of_symbols(name: str, declared: Shape | None, asked: Shape) -> dict[str, int]:
    """Return a map from the symbols of an input's declared shape to the sizes they get if its shape becomes `asked`.

    The other sizes of the two shapes are equal here, because `free_batch` has made them agree or refused them.

    Raises:
        UsageError: the two shapes have different ranks.
    """
    if declared is None:
        return {}
    if len(declared) != len(asked):
        raise wrong_shape(f"`shapes`: '{name}' has {len(declared)} dimensions, but {len(asked)} are given")
    pairs = zip(declared, asked, strict=True)
    return {old: new for old, new in pairs if isinstance(old, str) and old != "?" and isinstance(new, int)}


def _refuse_unknown_symbols(asked: Iterable[str], inputs: Iterable[TypeProto]) -> None:
    symbols = {dim for value_type in inputs for dim in shape_of(value_type) or () if isinstance(dim, str)}
    for symbol in asked:
        if symbol not in symbols:
            named = symbols - {"?"}
            raise unknown_name(f"`dims`: no input has a dimension '{symbol}'", suggest(symbol, named, "symbols"))


def _set_dims(value_type: TypeProto, sizes: Mapping[str, int]) -> None:
    for dim in value_type.tensor_type.shape.dim:
        known = rest_of(dim.dim_param, sizes)
        if isinstance(known, int):
            dim.dim_value = known
        elif known:
            dim.dim_param = known


def settle_sums(model: ModelProto, sizes: Mapping[str, int]) -> None:
    """If the symbol of an input's axis is a sum, such as 'past + sequence', replace the terms in `sizes` by numbers."""
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            rest = rest_of(dim.dim_param, sizes)
            if isinstance(rest, str) and rest != dim.dim_param:
                dim.dim_param = rest


def rest_of(symbol: str, sizes: Mapping[str, int]) -> int | str:
    """Return the size of a symbol, which may be a sum. If terms have no size, return a sum such as '3 + sequence'."""
    terms = [term.strip() for term in symbol.split("+")]
    rest = [term for term in terms if term not in sizes]
    total = sum(sizes[term] for term in terms if term in sizes)
    return " + ".join([str(total)] * bool(total) + rest) if rest else total


GROWS = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})
"""Operators that append keys and values to a KV cache. The past keys and values are inputs after the first three."""


def _refuse_empty(graph: Graph, options: ShapeOptions, declared: Mapping[str, Shape]) -> None:
    """Refuse inputs that the user makes empty, because some kernels crash on them. Only a decoder's past may be empty.

    An axis counts as the length of a past if its symbol begins with 'past', or if the model appends to the input along
    this axis.
    """
    now = {value.name: shape_of(value.type) or () for value in graph.proto.graph.input}
    emptied = [(name, axis) for name, shape in now.items() for axis, size in enumerate(shape) if size == 0]
    uses = graph.uses() if emptied else {}
    for name, axis in emptied:
        old = declared[name][axis] if declared[name] else ""
        grows = str(old).startswith("past") or all(_appends(node, at, axis) for node, at in uses.get(name, ()))
        if old != 0 and not (axis and grows):
            option = "`dims`" if old in options.dims else "`shapes`"
            why = (
                "the model does not append to this axis, as a decoder does to its past"
                if axis
                else "it is the batch axis"
            )
            raise wrong_value(f"{option}: axis {axis} of '{name}' can't be empty: {why}", "choose a size of 1 or more")


def _appends(node: Node, position: int, axis: int) -> bool:
    """Return True if a node appends to the value at `position` along an axis, or reads only the value's shape."""
    if node.op_type == "Concat":
        return any(a.name == "axis" and a.i == axis for a in node.attribute)
    return node.op_type == "Shape" or (node.op_type in GROWS and position > 2)
