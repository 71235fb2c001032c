"""The types of a graph's values: onnx infers them, on the model without its weights; here is what it does not know.

Some operators it types not at all, or as in one run of a loop; and its symbols count anew at each inference, so they
get names of ours, lest two sizes should share one.
"""

from __future__ import annotations

import itertools

import onnx
from onnx import ModelProto, NodeProto, TypeProto

from onnxgrad_cli import bodies
from onnxgrad_cli.emit import Op, Unknown
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.graph import Graph, dims_in, dtype_of, reads, shape_of, tensor_type

LIKE_INPUT = frozenset({"Gradient", "GroupNormalization", "Inverse"})
"""Operators for which onnx infers no type; each output has that of the input at its place."""

Types = dict[str, TypeProto]


def infer(graph: Graph) -> None:
    """Infer the type of every value, on the skeleton, and keep what is found in `graph.types`.

    Raises:
        OnnxgradError: the graph contradicts itself (a node's inputs don't fit its operator).
    """
    bare = graph.skeleton()
    for name, tensor in graph.initializers.items():
        graph.types[name] = graph.shared(tensor_type(tensor.data_type, list(tensor.dims)))
    for value in bare.graph.input:  # an unnamed size gets its symbol first, so that it is known again wherever it goes
        graph.named(value.type)
    stated: set[str] = set()
    while True:
        symbols = {dim.dim_param: dim.dim_param for dim in dims_in(bare.graph)}
        inferred, error = _inferred(bare)
        found = inferred.graph
        as_it_is: dict[bytes, TypeProto] = {}  # types whose sizes have no other names with us
        for value in (*found.output, *found.input, *found.value_info):
            if value.name in graph.initializers:
                continue
            given = value.type.SerializeToString()
            value_type = as_it_is.get(given)
            if value_type is None:
                value_type = graph.shared(graph.named(value.type, symbols))
                if value_type.SerializeToString() == given:
                    as_it_is[given] = value_type
            graph.types[value.name] = value_type
        more = _beyond_onnx(graph, stated)  # what follows a value without a type is a contradiction to onnx
        if not more and error:
            raise OnnxgradError(f"the model's shapes contradict each other: {str(error).strip()}") from error
        if not more:
            break
        stated.update(more)
        for value in bare.graph.output:
            if value.name in more:
                value.type.CopyFrom(more.pop(value.name))
        bare.graph.value_info.extend(itertools.starmap(onnx.helper.make_value_info, more.items()))


def declare(graph: Graph) -> None:
    """Write into the model the types whose shape would not be inferred from it again."""
    if graph.stated.isdisjoint(graph.made()):
        return
    again = _inferred(graph.skeleton())[0].graph
    found = {v.name for v in (*again.input, *again.output, *again.value_info) if shape_of(v.type) is not None}
    lost = [name for node in graph.nodes for name in node.output if name and name not in found]
    types = {name: graph.types[name] for name in lost if shape_of(graph.types.get(name)) is not None}
    values = graph.proto.graph.value_info
    kept = [value for value in values if value.name not in types]
    if types:
        del values[:]
        values.extend(kept)
        values.extend(itertools.starmap(onnx.helper.make_value_info, types.items()))


def _inferred(bare: ModelProto) -> tuple[ModelProto, Exception | None]:
    """The model with what types can be inferred, and what contradicts, if anything does."""
    try:
        return onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True), None
    except onnx.shape_inference.InferenceError:
        pass  # data propagation takes some float vectors for shapes, and then refuses valid models
    try:
        return onnx.shape_inference.infer_shapes(bare, strict_mode=True), None
    except onnx.shape_inference.InferenceError as error:
        return onnx.shape_inference.infer_shapes(bare), error


def _beyond_onnx(graph: Graph, stated: set[str]) -> Types:
    """Types that onnx does not infer, or not as well, of the first node of which some have not been `stated`."""
    makers = graph.producers()
    for node in graph.nodes:
        found: Types = {}
        if node.op_type in LIKE_INPUT:
            pairs = zip(node.output, node.input, strict=False)
            found = {made: graph.types[given] for made, given in pairs if given in graph.types}
        elif node.op_type == "Loop" and all(name in graph.types for name in reads(node)):
            found = dict(zip(node.output, bodies.loop_types(graph, node)[1], strict=False))
        elif node.op_type == "SequenceAt":
            found = _element(graph, node.output[0])
        elif node.op_type == "Einsum" and len(node.input) > 1:
            found = _einsum(graph, node)
        elif node.op_type == "Slice":
            found = _cut_to_fit(graph, node, makers)
        found = {name: value_type for name, value_type in found.items() if name and name not in stated}
        if found:
            return found
    return {}


def _element(graph: Graph, name: str) -> Types:
    """onnx gives all elements of a sequence one symbol, be they of different sizes."""
    value_type = graph.types.get(name)
    shape = [size if isinstance(size, int) else None for size in shape_of(value_type) or ()]
    return {name: graph.named(tensor_type(dtype_of(value_type), shape))} if None in shape else {}


def _cut_to_fit(graph: Graph, node: NodeProto, makers: dict[str, NodeProto]) -> Types:
    """A tensor cut to another's shape, which is its own, is whole: so exporters write what is added up by index."""
    if len(node.input) != 3:  # axes or steps, or all of them attributes
        return {}
    data, starts, ends = node.input
    shape, maker = shape_of(graph.types.get(data)), makers.get(ends)
    first = graph.constant(starts) if starts in graph.initializers else None
    if shape is None or first is None or maker is None or maker.op_type != "Shape" or maker.attribute:
        return {}
    fits = first.tolist() == [0] * len(shape) and shape_of(graph.types.get(maker.input[0])) == shape
    whole = fits and "?" not in shape and shape_of(graph.types.get(node.output[0])) != shape
    return {node.output[0]: graph.types[data]} if whole else {}


def _einsum(graph: Graph, node: NodeProto) -> Types:
    """onnx takes an axis from the first operand that has it; but to a size of 1 nothing can be said against it."""
    from onnxgrad_cli.rules.linalg import einsum_shape  # the rules ask passes, which infer types

    op, (name,) = Op(graph), node.output
    inferred = shape_of(graph.types.get(name))
    try:
        shape = einsum_shape(
            onnx.helper.get_node_attr_value(node, "equation").decode(), [op.val(x) for x in node.input]
        )
    except Unknown:
        return {}
    if inferred is None or len(inferred) != len(shape):
        return {}
    wider = [a if a == 1 else b for a, b in zip(inferred, shape, strict=True)]
    return {} if wider == list(inferred) else {name: graph.named(tensor_type(dtype_of(graph.types[name]), wider))}
