"""Sizes and shapes of inputs that the user fixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.options import ShapeOptions


def fix_shapes(graph: Graph, options: ShapeOptions) -> None:
    """Give inputs and symbols the sizes that were asked for.

    Raises:
        UsageError: there is no such input or symbol, its declared shape says otherwise, or it must not be empty.
    """
    inputs = {value.name: value.type for value in graph.proto.graph.input}
    declared = {name: shape_of(value_type) or () for name, value_type in inputs.items()}
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
    _refuse_empty(graph, options, declared)


def fixed_sizes(options: ShapeOptions) -> dict[str, tuple[int, ...]]:
    """The symbols and the inputs that were given a size or a shape of numbers alone, with these."""
    shapes = {name: tuple(size for size in shape if isinstance(size, int)) for name, shape in options.shapes.items()}
    whole = {name: sizes for name, sizes in shapes.items() if len(sizes) == len(options.shapes[name])}
    return {**{symbol: (size,) for symbol, size in options.dims.items()}, **whole}


def _sizes_of_symbols(name: str, declared: Shape | None, asked: Shape) -> dict[str, int]:
    """The sizes that the symbols of an input's declared shape get where its shape is fixed to `asked`.

    Other sizes are equal: `free_batch` has made the shapes agree, or refused.

    Raises:
        UsageError: the two shapes have different ranks.
    """
    if declared is None:
        return {}
    if len(declared) != len(asked):
        raise UsageError(f"`shapes`: '{name}' has {len(declared)} dimensions, {len(asked)} were given")
    pairs = zip(declared, asked, strict=True)
    return {old: new for old, new in pairs if isinstance(old, str) and old != "?" and isinstance(new, int)}


def _refuse_unknown_symbols(asked: Iterable[str], inputs: Iterable[TypeProto]) -> None:
    symbols = {dim for value_type in inputs for dim in shape_of(value_type) or () if isinstance(dim, str)}
    for symbol in asked:
        if symbol not in symbols:
            named = symbols - {"?"}
            raise UsageError(f"`dims`: no input has a dimension '{symbol}'", suggest(symbol, named, "symbols"))


def _set_dims(value_type: TypeProto, sizes: Mapping[str, int]) -> None:
    for dim in value_type.tensor_type.shape.dim:
        known = rest_of(dim.dim_param, sizes)
        if isinstance(known, int):
            dim.dim_value = known
        elif known:
            dim.dim_param = known


def settle_sums(model: ModelProto, sizes: Mapping[str, int]) -> None:
    """Take symbols that have sizes out of sums, as of 'past + sequence', by which inputs name their axes."""
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            rest = rest_of(dim.dim_param, sizes)
            if isinstance(rest, str) and rest != dim.dim_param:
                dim.dim_param = rest


def rest_of(symbol: str, sizes: Mapping[str, int]) -> int | str:
    """What a symbol is where some have sizes: its size, or of a sum what is left, as '3 + sequence'."""
    terms = [term.strip() for term in symbol.split("+")]
    rest = [term for term in terms if term not in sizes]
    total = sum(sizes[term] for term in terms if term in sizes)
    return " + ".join([str(total)] * bool(total) + rest) if rest else total


GROWS = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})
"""Operators that add keys and values of their own to those of the past, inputs behind the first three."""


def _refuse_empty(graph: Graph, options: ShapeOptions, declared: Mapping[str, Shape]) -> None:
    """Refuse inputs that were made empty, of which some kernels end the process, but the past of a decoder.

    A past is called so, or the model appends to it along this axis.
    """
    now = {value.name: shape_of(value.type) or () for value in graph.proto.graph.input}
    emptied = [(name, axis) for name, shape in now.items() for axis, size in enumerate(shape) if size == 0]
    uses = graph.uses() if emptied else {}
    for name, axis in emptied:
        old = declared[name][axis] if declared[name] else ""
        grows = str(old).startswith("past") or all(_appends(node, at, axis) for node, at in uses.get(name, ()))
        if old != 0 and not (axis and grows):
            option = "`dims`" if old in options.dims else "`shapes`"
            why = "nothing is appended to it, as to the past of a decoder" if axis else "it is the batch"
            raise UsageError(f"{option}: axis {axis} of '{name}' can't be empty: {why}", "choose a size of 1 or more")


def _appends(node: Node, position: int, axis: int) -> bool:
    """Whether a node that reads a value adds to it along an axis, or reads its sizes alone."""
    if node.op_type == "Concat":
        return any(a.name == "axis" and a.i == axis for a in node.attribute)
    return node.op_type == "Shape" or (node.op_type in GROWS and position > 2)
