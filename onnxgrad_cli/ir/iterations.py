"""The number of iterations of a Loop, and the types of its loop-carried states."""

from __future__ import annotations

import onnx
from onnx import GraphProto, TypeProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import Dim, dtype_of, element_type, shape_of, tensor_type


def fixed_trips(graph: Graph, node: Node, inner: Graph) -> int | None:
    """Return the number of iterations of a Loop, or None if it is known only at run time. `inner` is the typed body."""
    limit, start = (graph.constant(name) if name else None for name in node.input[:2])
    starts = not node.input[1] or (start is not None and bool(start.all()))
    return int(limit.item()) if limit is not None and starts and keeps_going(inner) else None


def keeps_going(inner: Graph) -> bool:
    """Return True if the condition that a Loop body returns can't become false once it was true."""
    made = inner.producers()
    name = inner.output_names[0]
    while name in made and made[name].op_type == "Identity":
        name = made[name].input[0]
    known = inner.constant(name)
    if name in made and made[name].op_type == "Constant":
        known = onnx.numpy_helper.to_array(made[name].attribute[0].t)
    return name == inner.input_names[1] or (known is not None and bool(known.all()))


def first_elements(graph: Graph, loop: Node, body: GraphProto) -> list[str | None]:
    """Return, for each state of a Loop that starts as an empty sequence, the value that an iteration inserts into it.

    Returns:
        One entry per state, the name of the value in the body. None for a state that does not start as an empty
        sequence, or into which nothing is inserted.
    """
    empty = {name for made in graph.nodes if made.op_type == "SequenceEmpty" for name in made.output}
    inserted = {made.input[0]: made.input[1] for made in body.node if made.op_type == "SequenceInsert"}
    pairs = zip(loop.input[2:], body.input[2:], strict=True)
    return [inserted.get(value.name) if name in empty else None for name, value in pairs]


def meet(graph: Graph, before: TypeProto, after: TypeProto, varying: set[str]) -> TypeProto:
    """Return a type that fits the state of a Loop both before and after an iteration.

    Args:
        graph: the graph that provides new symbols.
        before: the type before the iteration.
        after: the type after the iteration.
        varying: symbols of sizes that may change in an iteration. New ones are added.
    """
    if before.HasField("optional_type") and after.HasField("sequence_type"):  # the optional is filled and stays filled
        return onnx.helper.make_optional_type_proto(of_any_element(after))
    if not before.HasField("tensor_type"):
        return of_any_element(after)  # onnx has already merged the types of the elements
    old, new = shape_of(before), shape_of(after)
    if old is None or new is None or len(old) != len(new):
        return tensor_type(dtype_of(before), None)
    shape: list[Dim] = []
    for was, now in zip(old, new, strict=True):
        if was != now and was not in varying:
            was = graph.fresh_symbol()
            varying.add(was)
        shape.append(was)
    return tensor_type(dtype_of(before), shape)


def of_any_element(value_type: TypeProto) -> TypeProto:
    """Return a sequence type in which all symbolic sizes of the elements are unnamed, so that elements may differ."""
    element = element_type(value_type)
    shape = shape_of(element)
    if element is None or shape is None:
        return value_type
    sizes = [size if isinstance(size, int) else None for size in shape]
    return onnx.helper.make_sequence_type_proto(tensor_type(dtype_of(element), sizes))


def with_fresh(graph: Graph, value_type: TypeProto, varying: set[str]) -> TypeProto:
    """Return the type of a state after the last iteration. Each size in `varying` gets a new symbol."""
    shape = shape_of(value_type)
    if shape is None:
        return value_type
    return tensor_type(dtype_of(value_type), [graph.fresh_symbol() if dim in varying else dim for dim in shape])


def stacked(value_type: TypeProto, length: Dim) -> TypeProto:
    """Return the type of `length` tensors that are stacked along a new first axis."""
    shape = shape_of(value_type)
    return tensor_type(dtype_of(value_type), None if shape is None else [length, *shape])
