"""Replace operators on integers by float operators between quantizers, as their definitions prescribe.

The float operators can be differentiated with the straight-through estimator, and the weights that are stored as
integers can be trained. In dynamic quantization, the scale depends on the data. The scale is differentiated exactly,
and rounding is differentiated like the identity.

Source: https://onnx.ai/onnx/operators; https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from onnx import AttributeProto, TensorProto, numpy_helper

from onnxgrad_cli.ir.domains import full_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import Node, copied, make_node
from onnxgrad_cli.ir.types import is_external

QUANTIZED = "_quantized"
"""Suffix that onnxruntime's quantization tool appends to the names of integer weights."""

FIRST_BY_AXIS = 13
"""The first opset at which QuantizeLinear may have one scale for each index of an axis."""


class _UnknownForm(Exception):
    """Raised if a node has a form that this module can't replace."""


class NodeWriter:
    """Writes the nodes that replace a node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node, self.nodes = graph, node, list[Node]()

    def __call__(self, op_type: str, *inputs: str, kept: Sequence[AttributeProto] = (), **attributes: Any) -> str:
        """Add a node with one output, and return the output. `kept` are further attributes, as messages.

        Absent inputs at the end, which are "", and attributes that are None are left out.
        """
        y = self.graph.fresh(f"{self.node.output[0]}/{op_type}")
        last = max((i for i, name in enumerate(inputs) if name), default=-1)
        self.nodes.append(make_node(op_type, inputs[: last + 1], [y], name=y, **attributes))
        self.nodes[-1].attribute.extend(kept)
        self.nodes[-1].metadata = origin(self.node)
        return y

    def rename(self) -> None:
        """Give the last written node the name and the outputs of the node that is being replaced."""
        self.nodes[-1].output[:], self.nodes[-1].name = self.node.output, self.node.name


class _QuantizedWriter(NodeWriter):
    """Writes the float operators that replace an operator on integers. A call with an operator's name adds a node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        super().__init__(graph, node)
        self.inputs = [*node.input, *[""] * 16]
        self.attributes = {attribute.name: attribute for attribute in node.attribute}

    def floats(self, at: int, axis: int | None = None) -> str:
        """Dequantize the inputs `at` (integers), `at` + 1 (scale) and `at` + 2 (zero point), and return the floats.

        With `axis`, there may be a scale for each index along this axis of the integers.
        """
        values, scale, zero = self.inputs[at : at + 3]
        if axis is None:
            self.single(scale)
        return self.floats_of(values, scale, zero, axis)

    def floats_of(self, values: str, scale: str, zero: str, axis: int | None = None) -> str:
        """Return dequantized values, with one scale and zero point, or one for each index along `axis`."""
        several = self.size(scale) > 1
        if (several and axis is None) or (zero and self.size(zero) != self.size(scale)):
            raise _UnknownForm
        return self("DequantizeLinear", values, scale, zero, axis=axis)

    def size(self, name: str) -> int:
        """Return the number of elements of an initializer; for any other value, return 1."""
        tensor = self.graph.initializers.get(name)
        return 1 if tensor is None else math.prod(tensor.dims)

    def array(self, name: str) -> np.ndarray:
        """Return the value of an initializer."""
        tensor = self.graph.initializers.get(name)
        if tensor is None or is_external(tensor):
            raise _UnknownForm
        return numpy_helper.to_array(tensor)

    def product(self, a: str, b: str, bias: str) -> None:
        """Write a MatMul and, if there is a bias, an Add. The result gets the name of the node's output."""
        y = self("MatMul", a, b)
        if bias:
            self("Add", y, bias)
        self.rename()

    def stored(self, name: str, channels: int) -> np.ndarray:
        """Return the values of an initializer that has one element, or one element per channel."""
        values = self.array(name)
        if values.shape not in ((), (1,), (channels,)):
            raise _UnknownForm
        return values

    def single(self, scale: str) -> None:
        known = self.graph.initializers.get(scale)
        if known is None or list(known.dims) not in ([], [1]):
            raise _UnknownForm

    def sums(self, values: str, *scales: str, factor: float = 1.0) -> str:
        """Dequantize the integer bias of a product. Its scale is the product of `scales` and `factor`."""
        if not values:
            return ""
        product = np.array([factor], np.float32)
        for name in scales:
            product = product * self.array(name).reshape(-1)
        scale = self.graph.add_constant(product[0] if product.size == 1 else product)
        return self("DequantizeLinear", values, scale, axis=None if product.size == 1 else 0)

    def end(self, y: str, scale: str, zero: str) -> None:
        """Quantize the result. The integers get the name of the node's output."""
        self("QuantizeLinear", y, scale, zero)
        self.rename()

    def given(self, *without: str) -> list[AttributeProto]:
        """Return the node's attributes except those in `without`, which must be 0 or absent."""
        if any(self.attributes[name].i for name in without if name in self.attributes):
            raise _UnknownForm
        return [attribute for name, attribute in self.attributes.items() if name not in without]


def _conv(op: _QuantizedWriter) -> None:
    x, w = op.floats(0), op.floats(3, axis=0)
    bias = op.sums(op.inputs[8], op.inputs[1], op.inputs[4])
    op.end(op("Conv", x, w, bias, kept=op.given()), op.inputs[6], op.inputs[7])


def _matmul(op: _QuantizedWriter) -> None:
    op.end(op("MatMul", op.floats(0), op.floats(3, axis=-1)), op.inputs[6], op.inputs[7])


def _gemm(op: _QuantizedWriter) -> None:
    by_rows = "transB" in op.attributes and op.attributes["transB"].i
    alpha = op.attributes["alpha"].f if "alpha" in op.attributes else 1.0
    a, b = op.floats(0), op.floats(3, axis=0 if by_rows else 1)
    c = op.sums(op.inputs[6], op.inputs[1], op.inputs[4], factor=alpha)
    y = op("Gemm", a, b, c, kept=op.given())
    if op.inputs[7]:
        op.end(y, op.inputs[7], op.inputs[8])
    else:
        op.rename()


def _of_two(op_type: str) -> Callable[[_QuantizedWriter], None]:
    def write(op: _QuantizedWriter) -> None:
        op.end(op(op_type, op.floats(0), op.floats(3)), op.inputs[6], op.inputs[7])

    return write


def _of_one(op_type: str, *without: str) -> Callable[[_QuantizedWriter], None]:
    def write(op: _QuantizedWriter) -> None:
        op.end(op(op_type, op.floats(0), kept=op.given(*without)), op.inputs[3], op.inputs[4])

    return write


def _concat(op: _QuantizedWriter) -> None:
    parts = [op.floats(at) for at in range(2, len(op.node.input), 3)]
    op.end(op("Concat", *parts, kept=op.given()), op.inputs[0], op.inputs[1])


def _conv_of_microsoft(op: _QuantizedWriter) -> None:
    op.given("channels_last")
    op.attributes.pop("channels_last", None)
    _conv(op)


def _softmax(op: _QuantizedWriter) -> None:
    """Write a Softmax over one axis or, if the attribute `opset` is below 13, over all axes from that one on."""
    x, axis = op.floats(0), op.attributes["axis"].i if "axis" in op.attributes else -1
    if "opset" in op.attributes and op.attributes["opset"].i >= FIRST_BY_AXIS:
        y = op("Softmax", x, axis=axis)
    else:
        y = op("Reshape", op("Softmax", op("Flatten", x, axis=axis), axis=1), op("Shape", x))
    op.end(y, op.inputs[3], op.inputs[4])


def _where(op: _QuantizedWriter) -> None:
    op.end(op("Where", op.inputs[0], op.floats(1), op.floats(4)), op.inputs[7], op.inputs[8])


def _matmul_to_float(op: _QuantizedWriter) -> None:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = op.inputs[:7]
    op.product(op.floats_of(a, a_scale, a_zero), op.floats_of(b, b_scale, b_zero, -1), bias)


def _dynamic_matmul(op: _QuantizedWriter) -> None:
    """Write a product whose data are quantized by the scale and zero point that DynamicQuantizeLinear computes."""
    a, b, b_scale, b_zero, bias = op.inputs[:5]
    op("DynamicQuantizeLinear", a)
    scale, zero = (op.graph.fresh(f"{op.node.output[0]}/{name}") for name in ("scale", "zero_point"))
    op.nodes[-1].output.extend([scale, zero])
    x = op.floats_of(op("QuantizeLinear", a, scale, zero), scale, zero)
    op.product(x, op.floats_of(b, b_scale, b_zero, -1), bias)


def _attention(op: _QuantizedWriter) -> None:
    x, weights, bias, x_scale, w_scale, mask, x_zero, w_zero, past = op.inputs[:9]
    given = [op.floats_of(x, x_scale, x_zero), op.floats_of(weights, w_scale, w_zero, -1), bias, mask, past]
    op("Attention", *given, domain="com.microsoft", kept=op.given())
    op.rename()


def _embeddings(op: _QuantizedWriter) -> None:
    """Write an EmbedLayerNormalization of dequantized tables and parameters. The segment table may be absent."""
    stored = zip(op.inputs[2:7], op.inputs[8:13], op.inputs[13:18], strict=True)
    given = [*op.inputs[:2], *(op.floats_of(*each) if each[0] else "" for each in stored), op.inputs[7]]
    op("EmbedLayerNormalization", *given, domain="com.microsoft", kept=op.given())
    op.rename()


def _lstm(op: _QuantizedWriter) -> None:
    """Write an LSTM with dequantized weights. (The kernel of DynamicQuantizeLSTM quantizes the other factors too.)"""
    x, w, r, *others, w_scale, w_zero, r_scale, r_zero = op.inputs[:12]
    weights = _of_directions(op, w, w_scale, w_zero), _of_directions(op, r, r_scale, r_zero)
    op("LSTM", x, *weights, *others, kept=op.given())
    op.rename()


def _of_directions(op: _QuantizedWriter, weights: str, scale: str, zero: str) -> str:
    """Dequantize stored weights [directions, n, m], and return them as [directions, m, n].

    There is one scale for each direction, or for each direction and index of m. The weights are stored again as one
    matrix, [n, directions * m], with a scale for each column. With a single scale, onnxruntime 1.32 would move the
    DequantizeLinear after the following nodes, and crash if a body reads the result, as in the backward part of an
    LSTM.
    """
    matrices = op.array(weights)
    directions, rows, columns = matrices.shape
    steps = [op.array(each).reshape(directions, -1) for each in (scale, zero)]
    if any(each.shape[1] not in (1, columns) for each in steps):
        raise _UnknownForm
    name = op.graph.fresh(f"{weights.removesuffix(QUANTIZED)}_side_by_side{QUANTIZED}")
    op.graph.store(name, matrices.transpose(1, 0, 2).reshape(rows, -1))
    scales, zeros = (op.graph.add_constant(np.broadcast_to(step, (directions, columns)).reshape(-1)) for step in steps)
    floats = op.floats_of(name, scales, zeros, axis=1)
    shape = op.graph.add_constant(np.array([rows, directions, columns]))
    return op("Transpose", op("Reshape", floats, shape), perm=[1, 2, 0])


def _dynamic(op: _QuantizedWriter) -> None:
    """Write a QuantizeLinear with equal results for the integers; the original node computes scale and zero point."""
    q, scale, zero = op.node.output
    kept = copied(op.node)
    kept.output[0] = op.graph.fresh(f"{q}_unread")
    op.nodes.append(kept)
    op.nodes.append(make_node("QuantizeLinear", [op.inputs[0], scale, zero], [q], name=op.graph.fresh(q)))


def _product(op_type: str, axis: int) -> Callable[[_QuantizedWriter], None]:
    """Return a function that writes an integer product, (a - a_zero)(w - w_zero), as a product of floats.

    In such models, nodes after the product multiply it by the scales. If the scale of the weight is found there, the
    weight is dequantized with it, otherwise with a scale of 1. The weight may have one scale and zero point, or one for
    each index along its `axis`.
    """

    def write(op: _QuantizedWriter) -> None:
        a, w, a_zero, w_zero = op.inputs[:4]
        y = op.node.output[0]
        readers = [reader.op_type for reader, _ in op.graph.uses().get(y, ())]
        if set(readers) != {"Cast"} or y in op.graph.output_names:
            raise _UnknownForm  # other nodes read the integers
        weight_tensor = op.graph.initializers.get(w)
        channels = weight_tensor.dims[axis] if weight_tensor is not None and len(weight_tensor.dims) > 1 else 1
        scale = _scale_behind(op, channels if axis == -1 else 1)
        one = op.graph.add_constant(np.array(1, np.float32))
        steps = op("DequantizeLinear", a, one, a_zero)
        arrays = [op.stored(name, channels) for name in (w_zero, scale or one) if name][::-1]
        several = channels > 1 and any(each.size == channels for each in arrays)
        if several:
            arrays = [np.broadcast_to(each.reshape(-1), channels) for each in arrays]
        weight = op("DequantizeLinear", w, *map(op.graph.add_constant, arrays), axis=axis if several else None)
        y = op(op_type, steps, weight, kept=op.given())
        if scale:
            op("Div", y, scale)
        op.rename()
        _forget_types(op.graph, {op.node.output[0]})  # now float, not int32

    return write


def _forget_types(graph: Graph, names: Collection[str]) -> None:
    for value in [value for value in graph.proto.graph.value_info if value.name in names]:
        graph.proto.graph.value_info.remove(value)


def _scale_behind(op: _QuantizedWriter, channels: int) -> str:
    """Find the stored scale of the weight of an integer product, and return its name, or "" if it is not found.

    It is the operand `scale` in Mul(Cast(product), Mul(scale of the data, scale)): one number, or one per channel.
    """
    uses, makers = op.graph.uses(), op.graph.producers()
    for cast, _ in uses.get(op.node.output[0], ()):
        readers = uses.get(cast.output[0], ()) if cast.op_type == "Cast" else ()
        behind = [use for reader, _ in readers if reader.op_type == "Add" for use in uses.get(reader.output[0], ())]
        for mul, at in (*readers, *behind):  # a bias may have been added to the product
            factors = makers.get(mul.input[1 - at]) if mul.op_type == "Mul" else None
            for name in factors.input if factors is not None and factors.op_type == "Mul" else ():
                known = op.graph.initializers.get(name)
                if known is not None and list(known.dims) in ([], [1], [channels]):
                    return name
    return ""


MEANINGS: dict[str, Callable[[_QuantizedWriter], None]] = {
    "ai.onnx::ConvInteger": _product("Conv", 0),
    "ai.onnx::DynamicQuantizeLinear": _dynamic,
    "ai.onnx::MatMulInteger": _product("MatMul", -1),
    "ai.onnx::QLinearConv": _conv,
    "ai.onnx::QLinearMatMul": _matmul,
    "com.microsoft::DynamicQuantizeLSTM": _lstm,
    "com.microsoft::DynamicQuantizeMatMul": _dynamic_matmul,
    "com.microsoft::MatMulIntegerToFloat": _matmul_to_float,
    "com.microsoft::QAttention": _attention,
    "com.microsoft::QEmbedLayerNormalization": _embeddings,
    "com.microsoft::QGemm": _gemm,
    "com.microsoft::QLinearAdd": _of_two("Add"),
    "com.microsoft::QLinearAveragePool": _of_one("AveragePool", "channels_last"),
    "com.microsoft::QLinearConcat": _concat,
    "com.microsoft::QLinearConv": _conv_of_microsoft,
    "com.microsoft::QLinearGlobalAveragePool": _of_one("GlobalAveragePool", "channels_last"),
    "com.microsoft::QLinearLeakyRelu": _of_one("LeakyRelu"),
    "com.microsoft::QLinearMul": _of_two("Mul"),
    "com.microsoft::QLinearSigmoid": _of_one("Sigmoid"),
    "com.microsoft::QLinearSoftmax": _softmax,
    "com.microsoft::QLinearWhere": _where,
}


def is_known_quantized(node: Node) -> bool:
    """Return True if a node is an operator on integers that can be replaced by float operators."""
    return full_name(node.op_type, node.domain) in MEANINGS


def write_out_quantized(graph: Graph) -> None:
    """Replace known operators on integers by float operators between quantizers, at opset 13 and newer."""
    if (graph.opset() or 0) < FIRST_BY_AXIS:
        return
    _add_as_floats(graph)
    _rewrite(graph, _write_meaning)
    makers = graph.producers()
    _rewrite(graph, lambda op: _move_floats(op, makers))


def _rewrite(graph: Graph, write: Callable[[_QuantizedWriter], None]) -> None:
    """Replace each node by the nodes that `write` writes for it, if there are any and the node has a known form."""

    def written(node: Node) -> list[Node] | None:
        op = _QuantizedWriter(graph, node)
        with suppress(_UnknownForm):
            write(op)
            return op.nodes or None
        return None

    graph.rewrite(written)


def _write_meaning(op: _QuantizedWriter) -> None:
    if meaning := MEANINGS.get(full_name(op.node.op_type, op.node.domain)):
        meaning(op)


PRODUCTS = frozenset({"ConvInteger", "MatMulInteger"})
ROUNDERS = frozenset({"Ceil", "Floor", "Round"})


def _add_as_floats(graph: Graph) -> None:
    """If a bias is rounded to integers only to add it to a product of integers, add both as floats instead.

    Old quantization tools write Cast(Add(product, Cast(Floor(b / s)))), where s is the scale of the product. This
    becomes Add(Cast(product), b / s + off). As in the straight-through estimator, off = Floor(b / s) - b / s counts as
    a constant.
    """
    readers, makers = _only_readers(graph), graph.producers()
    changed, integers = dict[int, list[Node]](), set[str]()
    for add in graph.nodes:
        found = _rounded_bias(add, readers, makers) if add.op_type == "Add" else None
        if found is None:
            continue
        product, (bias, *moves), rounder, end = found
        exact, whole = rounder.input[0], rounder.output[0]
        off, cast = graph.fresh(f"{whole}_off"), graph.fresh(f"{product.output[0]}_cast")
        graph.held.add(off)
        changed[id(bias)] = [
            make_node("Sub", [whole, exact], [off], name=off),
            make_node("Add", [exact, off], bias.output, name=bias.name),
        ]
        floats = make_node("Cast", product.output, [cast], name=cast, to=TensorProto.FLOAT)
        names = [cast if name == product.output[0] else name for name in add.input]
        changed[id(add)] = [floats, make_node("Add", names, end.output, name=add.name)]
        changed[id(end)] = []
        integers.update(node.output[0] for node in (bias, *moves))
    graph.rewrite(lambda node: changed.get(id(node)))
    _forget_types(graph, integers)


def _only_readers(graph: Graph) -> dict[str, Node]:
    """Return value -> the node that reads it, for values that one node reads once and that are no outputs."""
    outputs = set(graph.output_names)
    return {name: uses[0][0] for name, uses in graph.uses().items() if len(uses) == 1 and name not in outputs}


def _rounded_bias(
    add: Node, readers: Mapping[str, Node], makers: Mapping[str, Node]
) -> tuple[Node, list[Node], Node, Node] | None:
    """Find the pattern of `_add_as_floats` around an Add; None if the Add does not belong to one.

    Returns:
        The product; the Cast of the bias and the nodes that move its result; the node that rounds; the last Cast.
    """
    pair = [makers.get(name) for name in add.input]
    product = next((maker for maker in pair if maker is not None and maker.op_type in PRODUCTS), None)
    bias, last, moves = next((maker for maker in pair if maker is not product), None), add, list[Node]()
    while bias is not None and bias.op_type in MOVES and bias.output[0] in readers:
        moves, last = [bias, *moves], bias
        bias = makers.get(bias.input[0])
    rounder = makers.get(bias.input[0]) if bias is not None and bias.op_type == "Cast" else None
    end = readers.get(add.output[0])
    if product is None or bias is None or rounder is None or end is None:
        return None
    alone = readers.get(product.output[0]) is add and readers.get(bias.output[0]) is last
    if not alone or rounder.op_type not in ROUNDERS or end.op_type != "Cast":
        return None
    return product, [bias, *moves], rounder, end


MOVES = frozenset("Flatten Identity MaxPool Reshape Squeeze Transpose Unsqueeze".split())
"""Operators that only select or move elements, so dequantizing before them gives the same values as after them."""


def _move_floats(op: _QuantizedWriter, makers: Mapping[str, Node]) -> None:
    """Dequantize before nodes that move integers, instead of after them, because only floats have gradients."""
    node, chain = op.node, list[Node]()
    name = node.input[0] if node.op_type == "DequantizeLinear" else ""
    while name in makers and makers[name].op_type in MOVES and not any(makers[name].output[1:]):
        chain.append(makers[name])
        name = chain[-1].input[0]
    if chain:
        op.single(node.input[1])
        value = op("DequantizeLinear", name, *node.input[1:])
        for each in reversed(chain):
            value = op(each.op_type, value, *each.input[1:], kept=each.attribute)
        op.rename()
