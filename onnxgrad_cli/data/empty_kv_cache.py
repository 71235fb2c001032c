"""Use an empty KV cache for decoders that take past keys and values as inputs, unless the data contain a cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto, TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.prepare import make_differentiable
from onnxgrad_cli.passes.prepare.validate_input import validate_input
from onnxgrad_cli.record import Training

PAST = "past"
"""The prefix of the symbol that exporters give to the number of past tokens, such as `past_sequence_length`."""


def with_empty_pasts(
    model: ModelProto, options: Options, held: Callable[[], Collection[str] | None], tell: Tell
) -> Options:
    """Set the length of a decoder's KV cache to 0, unless the options set its sizes or the data contain a cache.

    Args:
        model: the inference model.
        options: the user's options.
        held: returns the names of the arrays in the data, or None if the data have no names. It is called only if the
            model has a cache.
        tell: receives log messages.

    Returns:
        The options, with the new sizes if any.
    """
    pasts = dict(_pasts(model))
    symbols = list(dict.fromkeys(pasts.values()))
    if not pasts or not options.dims.keys().isdisjoint(symbols) or not options.shapes.keys().isdisjoint(pasts):
        return options
    found = held()
    if found is None or not pasts.keys().isdisjoint(found):
        return options
    tell(f"the data have no KV cache: using 0 for {', '.join(symbols)}", 0)
    return replace(options, dims={**options.dims, **dict.fromkeys(symbols, 0)})


def _pasts(model: ModelProto) -> Iterator[tuple[str, str]]:
    """Yield (input, symbol) for each KV cache input: an input of floats with a symbolic number of past tokens."""
    for value in model.graph.input:
        for dim in (shape_of(value.type) or ())[1:]:
            if isinstance(dim, str) and dim.startswith(PAST) and "+" not in dim and is_float(value.type):
                yield value.name, dim


def fed_types(model: ModelProto, path: Path | None, options: Options) -> dict[str, TypeProto]:
    """Return the types of an inference model's inputs, with the sizes that the options set.

    Inputs with an initializer are left out.

    Args:
        model: the inference model; not changed.
        path: the file that the model was read from; external data are relative to it.
        options: the user's options. Its `dims` and `shapes` set sizes of inputs.
    """
    graph = Graph(copied(model), path)
    if options.dims or options.shapes:
        validate_input(graph, options)
        make_differentiable(graph, options, Training())
    inputs = graph.proto.graph.input
    return with_sizes_of_pasts({v.name: v.type for v in inputs if v.name not in graph.initializers}, graph)


def with_sizes_of_pasts(inputs: Mapping[str, TypeProto], graph: Graph) -> dict[str, TypeProto]:
    """Return the types of inputs. In types with a dimension of 0, replace symbols by the sizes that the graph requires.

    onnxruntime-genai declares the head size of the KV cache as a symbol. The size follows from the node that reads the
    cache.

    Args:
        inputs: input -> its type.
        graph: the graph, with inferred types.

    Returns:
        Input -> its type. The types of inputs without a dimension of 0 are unchanged.
    """
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.input:
            if name in inputs and 0 in (shape_of(inputs[name]) or ()):
                sizes.update(_met(graph, node, name, inputs[name]))
    return {name: _sized(value_type, sizes) for name, value_type in inputs.items()}


def _met(graph: Graph, node: Node, name: str, value_type: TypeProto) -> Iterator[tuple[str, int]]:
    """Yield (symbol, size) for each symbolic dimension of an input whose size follows from `node`, which reads it."""
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
