"""Decoders that are deployed with a cache of past keys and values: a training has no past, so the cache is empty."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto, TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.admit import admit
from onnxgrad_cli.passes.prepare.prepare import make_differentiable
from onnxgrad_cli.record import Training

PAST = "past"
"""How exporters begin the symbol of the axis of what is past."""


def with_empty_pasts(
    model: ModelProto, options: Options, held: Callable[[], Collection[str] | None], tell: Tell
) -> Options:
    """The options with a size of 0 for what is past, where nobody has said otherwise and data hold none.

    Args:
        model: the inference model.
        options: what was asked for.
        held: says what the data hold, None where names don't tell; called only where there is a past.
        tell: takes what is narrated.
    """
    pasts = dict(_pasts(model))
    symbols = list(dict.fromkeys(pasts.values()))
    if not pasts or not options.dims.keys().isdisjoint(symbols) or not options.shapes.keys().isdisjoint(pasts):
        return options
    found = held()
    if found is None or not pasts.keys().isdisjoint(found):
        return options
    tell(f"the data hold nothing past: {', '.join(symbols)} is 0", 0)
    return replace(options, dims={**options.dims, **dict.fromkeys(symbols, 0)})


def _pasts(model: ModelProto) -> Iterator[tuple[str, str]]:
    """The inputs of numbers with a fraction that have an axis of what is past, and its symbol."""
    for value in model.graph.input:
        for dim in (shape_of(value.type) or ())[1:]:
            if isinstance(dim, str) and dim.startswith(PAST) and "+" not in dim and is_float(value.type):
                yield value.name, dim


def fed_types(model: ModelProto, path: Path | None, options: Options) -> dict[str, TypeProto]:
    """Return the types of what must be fed to an inference model, with the sizes that options fix.

    Args:
        model: the inference model; not changed.
        path: where it was read from; external data are relative to it.
        options: sizes and shapes; see `with_empty_pasts`.
    """
    graph = Graph(copied(model), path)
    if options.dims or options.shapes:
        admit(graph, options)
        make_differentiable(graph, options, Training())
    inputs = graph.proto.graph.input
    return with_sizes_of_pasts({v.name: v.type for v in inputs if v.name not in graph.initializers}, graph)


def with_sizes_of_pasts(inputs: Mapping[str, TypeProto], graph: Graph) -> dict[str, TypeProto]:
    """The types of inputs, of which empty ones get the sizes that their other axes must have in `graph`.

    onnxruntime-genai gives the size of a head a symbol of its own; what a past is joined with knows it.
    """
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.input:
            if name in inputs and 0 in (shape_of(inputs[name]) or ()):
                sizes.update(_met(graph, node, name, inputs[name]))
    return {name: _sized(value_type, sizes) for name, value_type in inputs.items()}


def _met(graph: Graph, node: Node, name: str, value_type: TypeProto) -> Iterator[tuple[str, int]]:
    """The sizes that a node asks of the symbols of an input."""
    shape = shape_of(value_type) or ()
    if node.op_type == "GroupQueryAttention" and isinstance(shape[-1], str):
        counts = {a.name: a.i for a in node.attribute}
        groups = counts["num_heads"] + (0 if node.input[1] else 2 * counts["kv_num_heads"])
        width = (shape_of(graph.types.get(node.input[0])) or ("?",))[-1]
        if isinstance(width, int):
            yield shape[-1], width // groups
    if node.op_type == "Concat":
        axis = next(a.i for a in node.attribute if a.name == "axis") % len(shape)
        for other in (shape_of(graph.types.get(each)) or () for each in node.input if each != name):
            for at, (own, size) in enumerate(zip(shape, other, strict=False)):
                if at != axis and isinstance(own, str) and isinstance(size, int):
                    yield own, size


def _sized(value_type: TypeProto, sizes: Mapping[str, int]) -> TypeProto:
    shape = shape_of(value_type) or ()
    if 0 not in shape:
        return value_type
    return tensor_type(dtype_of(value_type), [sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in shape])
