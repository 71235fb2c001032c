"""The types of values that follow from their operator, where onnx infers none, or not as well."""

from __future__ import annotations

from typing import NamedTuple

import onnx
from onnx import TensorProto, TypeProto

from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.einsum import einsum_shape
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of, tensor_type

LIKE_ROWS = frozenset({"Normalizer", "Scaler"})
SCORES = LIKE_ROWS | {"LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"}
"""Operators of ai.onnx.ml that give float32 rows, of which onnx infers no type; some of the shape of what they read."""

Types = dict[str, TypeProto]


class _Operand(NamedTuple):
    name: str
    shape: Shape


def operator_types(graph: Graph, node: Node, makers: dict[str, Node]) -> Types:
    """The types of a node's outputs that follow from its operator; {} where onnx infers them, or nobody.

    Args:
        graph: where the node is; its types as far as they are known.
        node: the node; of a Loop, see `inference.loop_types`.
        makers: value -> the node that makes it.
    """
    if node.op_type == "SequenceAt":
        return _element(graph, node.output[0])
    if node.op_type == "Einsum" and len(node.input) > 1:
        return _einsum(graph, node)
    if node.op_type == "Slice":
        return _cut_to_fit(graph, node, makers)
    if node.op_type in SCORES and node.domain == "ai.onnx.ml":
        return _scores(graph, node)
    if node.op_type == "LabelEncoder" and node.domain == "ai.onnx.ml":
        return _encoded(graph, node)
    if node.op_type == "Attention" and is_standard(node.domain):
        return _caches(graph, node)
    if node.op_type.startswith("Reduce") and len(node.input) > 1 and node.input[1]:
        return _reduced(graph, node)
    if node.op_type == "Compress":
        return _compressed(graph, node)
    return {}


def _compressed(graph: Graph, node: Node) -> Types:
    """As many slices along an axis, or elements, as there are trues; onnx knows that from opset 11 on."""
    (name,) = node.output
    value_type = graph.types.get(node.input[0])
    shape, axis = shape_of(value_type), attributes_of(node).get("axis")
    if shape_of(graph.types.get(name)) is not None or shape is None:
        return {}
    kept = [None] if axis is None else [None if at == axis % len(shape) else size for at, size in enumerate(shape)]
    return {name: graph.named(tensor_type(dtype_of(value_type), kept))}


def _reduced(graph: Graph, node: Node) -> Types:
    """Axes that are known at run time only take away as many as there are numbers; none of them means all, or none.

    Where axes are kept, their number does not matter.
    """
    (name,) = node.output
    x, axes = (shape_of(graph.types.get(each)) for each in node.input)
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if shape_of(graph.types.get(name)) is not None or x is None:
        return {}
    if attributes.get("keepdims", 1):
        gone = 0
    elif axes is None or len(axes) != 1 or not isinstance(axes[0], int):
        return {}  # a number without an axis is none of the standard's
    else:
        gone = axes[0] or len(x) * (not attributes.get("noop_with_empty_axes"))
    return {name: graph.named(tensor_type(dtype_of(graph.types[node.input[0]]), [None] * (len(x) - gone)))}


def _scores(graph: Graph, node: Node) -> Types:
    """Numbers of each sample, in rows."""
    (name,) = node.output
    samples = shape_of(graph.types.get(node.input[0]))
    if dtype_of(graph.types.get(name)):  # found before, and to be stated again
        return {name: graph.types[name]}
    if samples is None:
        return {}
    if node.op_type in LIKE_ROWS:
        return {name: tensor_type(TensorProto.FLOAT, samples)}
    return {name: graph.named(tensor_type(TensorProto.FLOAT, [samples[0] if len(samples) > 1 else 1, None]))}


def _encoded(graph: Graph, node: Node) -> Types:
    """LabelEncoder: one label for each that is read; onnx infers no shape."""
    (name,) = node.output
    dtype, shape = dtype_of(graph.types.get(name)), shape_of(graph.types.get(node.input[0]))
    known = shape_of(graph.types.get(name))
    return {name: tensor_type(dtype, shape)} if dtype and shape is not None and known is None else {}


def _caches(graph: Graph, node: Node) -> Types:
    """Attention: present keys, present values and scores have four axes."""
    found: Types = {}
    for at, name in enumerate(node.output[1:], 1):
        inferred = graph.types.get(name)
        dtype = dtype_of(inferred) or dtype_of(graph.types.get(node.input[at if at < 3 else 0]))
        if name and dtype and shape_of(inferred) is None:
            found[name] = graph.named(tensor_type(dtype, [None] * 4))
    return found


def _element(graph: Graph, name: str) -> Types:
    """onnx gives all elements of a sequence one symbol, be they of different sizes."""
    value_type = graph.types.get(name)
    shape = [size if isinstance(size, int) else None for size in shape_of(value_type) or ()]
    return {name: graph.named(tensor_type(dtype_of(value_type), shape))} if None in shape else {}


def _cut_to_fit(graph: Graph, node: Node, makers: dict[str, Node]) -> Types:
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


def _einsum(graph: Graph, node: Node) -> Types:
    """onnx takes an axis from the first operand that has it; but to a size of 1 nothing can be said against it."""
    (name,) = node.output
    inferred = shape_of(graph.types.get(name))
    shapes = [shape_of(graph.types.get(x)) for x in node.input]
    operands = [_Operand(x, s) for x, s in zip(node.input, shapes, strict=True) if s is not None]
    if len(operands) < len(node.input):
        return {}
    try:
        shape = einsum_shape(onnx.helper.get_node_attr_value(as_message(node), "equation").decode(), operands)
    except Unknown:
        return {}
    if inferred is None or len(inferred) != len(shape):
        return {}
    wider = [a if a == 1 else b for a, b in zip(inferred, shape, strict=True)]
    return {} if wider == list(inferred) else {name: graph.named(tensor_type(dtype_of(graph.types[name]), wider))}
