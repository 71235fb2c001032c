"""Replace weights that are stored as integers by float weights, which are quantized each time they are read.

In this way, a model that was quantized after training can be trained further, with the straight-through estimator. The
float weights are updated, and the forward part computes with their quantized values.

Biases that a file stores as int32 are rounded during training, as they will be when the file is written. A kernel for
integers adds the bias to products of integers, so the scale s of a bias is the product of the scales of the two
factors. No runtime quantizes to int32, so the rounding is written out: q = round(b / s) s. The operator reads b + (q -
b), where the bracket counts as a constant. In floating point this sum is exactly q (P. Sterbenz, Floating-Point
Computation, 1974, section 4.3: the difference of two numbers within a factor of 2 is exact). Its derivative is 1 with
respect to b, as in the straight-through estimator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.node_values import attributes_of, source_of
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import dtype_of, is_external, is_float
from onnxgrad_cli.metadata import IntegerWeight
from onnxgrad_cli.passes.prepare.quantized_operators import MOVES, QUANTIZED
from onnxgrad_cli.passes.stored_integers import Makers, Uses, scale_of, scaling_chain, spread, stored_array
from onnxgrad_cli.record import ParameterRecord

WITH_BIAS = frozenset({"Conv", "ConvTranspose", "Gemm"})
"""Operators whose third input is a bias, which is added to the product of the first two."""

CLOSE = 1e-5
"""Largest relative difference at which the scale of a bias is taken to be the product of two other scales."""


def put_fake_quantizers(graph: Graph, training: ParameterRecord, stored_as: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Store float weights instead of the integers that a DequantizeLinear reads, and insert a QuantizeLinear.

    Integers stored as int32, such as biases, become float weights without a QuantizeLinear, because no runtime
    quantizes to int32. Integers that are read with several scales, or that other operators read too, are not replaced,
    because no single float weight can replace them.

    Args:
        graph: the typed graph. It is changed in place, and its types are inferred again.
        training: receives the integer weights, and a note if there are any.
        stored_as: the result of `put_dequantizers`: map from a scale or zero point that it wrote to the name in the
            model.

    Returns:
        A map from each float weight that the file stores as int32 to its scale, in a shape that broadcasts with the
        weight.
    """
    stored = [node for node in graph.nodes if _is_stored(graph, node)]
    several = _read_otherwise(graph, stored)
    chosen = {id(node) for node in stored if node.input[0] not in several}
    if several:
        text = (
            "integers that are not only dequantized, or are dequantized in several ways, stay integers: "
            f"{', '.join(several)}"
        )
        training.cautions.append(Caution("note", "quantization", text))
    if not chosen:
        return {}
    read = [name for node in stored for name in node.input]
    writer = _Floats(graph, training, stored_as)
    graph.set_nodes([each for node in graph.nodes for each in (writer(node) if id(node) in chosen else [node])])
    rename(graph.nodes, writer.renamed)
    plain = len(writer.steps)
    graph.drop_unread(read)
    infer_types(graph)
    count = len(training.integer_weights) - plain
    text = f"{count} integer weights are stored as floats again, and quantized where they are used"
    text += f"; {plain} int32 weights are stored as floats, and rounded where they are used" if plain else ""
    training.cautions.append(Caution("note", "quantization", text))
    return writer.steps


def put_dequantizers(graph: Graph) -> dict[str, str]:
    """Replace nodes that dequantize stored integers step by step (Cast, Sub, Mul) by DequantizeLinear.

    Quantization tools that are older than this operator write Mul(Cast(q), scale) or Mul(Sub(Cast(q), zero), scale).
    There is one scale, or one for each index of an axis.

    Args:
        graph: the typed graph, of opset 13 or newer. It is changed in place, and typed again if it changed.

    Returns:
        A map from each scale or zero point that was written to the name of the tensor from which it was read.
    """
    uses, makers, kept = graph.uses(), graph.producers(), set(graph.output_names)
    written, gone, read, stored_as = dict[int, Node](), set[int](), list[str](), dict[str, str]()
    for cast in graph.nodes:
        chain = scaling_chain(graph, cast, uses, kept)
        if chain and (node := _dequantizer(graph, chain, makers, stored_as)):
            written[id(chain[-1])] = node
            gone.update(id(each) for each in chain[:-1])
            read += [name for each in chain for name in each.input]
    if written:
        graph.set_nodes([written.get(id(node), node) for node in graph.nodes if id(node) not in gone])
        graph.drop_unread(read)
        infer_types(graph)
    return stored_as


def _dequantizer(graph: Graph, chain: list[Node], makers: Mapping[str, Node], stored_as: dict[str, str]) -> Node | None:
    """Return a DequantizeLinear that is equivalent to a chain of nodes, or None if their scale does not allow that."""
    found = scale_of(graph, chain, makers)
    if found is None:
        return None
    cast, mul, integers = chain[0], chain[-1], graph.initializers[chain[0].input[0]]
    dtype = helper.tensor_dtype_to_np_dtype(integers.data_type)
    sources, scale, zero, axis = found
    shape = [integers.dims[axis]] if axis >= 0 else []
    names = [graph.fresh(f"{cast.input[0]}_{kind}") for kind in ("scale", "zero_point")]
    for name, x in zip(names, (scale, zero.astype(dtype)), strict=True):
        graph.store(name, np.ascontiguousarray(np.broadcast_to(x.reshape(-1), shape)) if shape else x.reshape(()))
    stored_as.update(zip(names, [*sources, ""], strict=False))
    node = make_node("DequantizeLinear", [cast.input[0], *names], [mul.output[0]], name=mul.name, axis=max(axis, 0))
    node.metadata = mul.metadata
    return node


def _is_stored(graph: Graph, node: Node) -> bool:
    """Return True if all inputs of a DequantizeLinear are stored in the model."""
    if node.op_type != "DequantizeLinear" or node.domain or node.output[0] in graph.output_names:
        return False
    names = [name for name in node.input if name]
    stored = all(name in graph.initializers and name not in graph.input_names for name in names)
    if not stored or graph.added(node.input[0]) or not is_float(graph.types.get(node.output[0])):
        return False
    return graph.path is not None or not any(is_external(graph.initializers[name]) for name in names)


def _read_otherwise(graph: Graph, stored: list[Node]) -> list[str]:
    """Return the stored integers that are read with several scales, or also by nodes that don't dequantize them."""
    known, forms = {id(node) for node in stored}, dict[str, set[tuple[object, ...]]]()
    integers = dict.fromkeys(node.input[0] for node in stored)
    for name, uses in graph.uses().items():
        for node, at in uses if name in integers else ():
            way = (*node.input[1:], *sorted((a.name, a.i) for a in node.attribute)) if id(node) in known else ()
            forms.setdefault(name, set()).add(way if at == 0 else ())
    return [name for name in integers if len(forms[name]) > 1 or () in forms[name]]


class _Floats:
    """Writes the nodes that replace each DequantizeLinear of stored integers."""

    def __init__(self, graph: Graph, training: ParameterRecord, stored_as: Mapping[str, str]) -> None:
        self.graph, self.training, self.stored_as = graph, training, stored_as
        self.uses, self.makers = graph.uses(), graph.producers()
        self.written: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.steps: dict[str, np.ndarray] = {}

    def __call__(self, node: Node) -> list[Node]:
        """Make a DequantizeLinear read a quantized float weight. Return the node and, if it is new, its quantizer.

        The DequantizeLinear of an int32 bias is removed, and its readers read the float bias.
        """
        graph, integers = self.graph, node.input[0]
        plain = dtype_of(graph.types[integers]) == TensorProto.INT32
        if integers in self.written and not plain:
            node.input[0] = self.written[integers]
            return [node]
        if integers not in self.written:
            name = integers.removesuffix(QUANTIZED)
            name = self.written[integers] = name if plain and name == node.output[0] else graph.fresh(name)
            factors = _factors(graph, node, self.uses, self.makers) if plain else ((), 1.0)
            graph.store(name, _values(graph, node))
            weight = _described(graph, node, name, *factors)
            scale, zero = (self.stored_as.get(each, each) for each in (weight.scale, weight.zero_point))
            self.training.integer_weights.append(replace(weight, scale=scale, zero_point=zero))
            if plain:
                self.steps[name] = _spread(graph, node, 1)
        if plain:
            self.renamed[node.output[0]] = self.written[integers]
            return []
        return [self._quantizer(node, self.written[integers]), node]

    def _quantizer(self, node: Node, name: str) -> Node:
        graph, integers = self.graph, node.input[0]
        zero = node.input[2] if len(node.input) > 2 else ""
        if not zero:
            dims = list(graph.initializers[node.input[1]].dims)
            dtype = helper.tensor_dtype_to_np_dtype(graph.initializers[integers].data_type)
            zero = graph.add_constant(np.zeros(dims, dtype))
        quantized = self.written[integers] = graph.fresh(f"{name}{QUANTIZED}")
        quantizer = make_node("QuantizeLinear", [name, node.input[1], zero], [quantized], name=quantized)
        quantizer.metadata = origin(node)
        quantizer.attribute.extend(a for a in node.attribute if a.name in ("axis", "block_size"))
        node.input[:] = [quantized, node.input[1], zero]
        return quantizer


def _values(graph: Graph, node: Node) -> np.ndarray:
    """Compute the output of a DequantizeLinear whose inputs are all stored."""
    values = _array(graph, node, 0)
    if any(node.input[2:]):
        values = values - _spread(graph, node, 2)
    return (values * _spread(graph, node, 1)).astype(
        helper.tensor_dtype_to_np_dtype(dtype_of(graph.types[node.output[0]]))
    )


def _array(graph: Graph, node: Node, position: int) -> np.ndarray:
    array = stored_array(graph, node.input[position])
    assert array is not None
    return array.astype(np.float32)


def _spread(graph: Graph, node: Node, position: int) -> np.ndarray:
    """Return the scale or zero point of a DequantizeLinear in a shape that broadcasts with its output."""
    form = {attribute.name: attribute.i for attribute in node.attribute if attribute.name in ("axis", "block_size")}
    return spread(_array(graph, node, position), list(graph.initializers[node.input[0]].dims), **form)


def _described(graph: Graph, node: Node, name: str, factors: tuple[str, ...], times: float) -> IntegerWeight:
    """Return the record with which a weight can later be stored as integers again."""
    scale, zero = ("" if graph.added(each) else each for each in [*node.input[1:], ""][:2])
    given = {attribute.name: attribute.i for attribute in node.attribute}
    axis, block_size = given.get("axis", 1), given.get("block_size", 0)
    return IntegerWeight(name, node.input[0], scale, zero, axis, block_size, factors, times)


def _factors(graph: Graph, bias: Node, uses: Uses, makers: Makers) -> tuple[tuple[str, ...], float]:
    """Return the names of the two scales whose product is the scale of a bias, and a further factor.

    The two are the scales of the data and of the weight that the operator multiplies. The further factor is the alpha
    of a Gemm. If the scale of the bias is not such a product, the result is ((), 1.0).
    """
    own = numpy_helper.to_array(graph.initializers[bias.input[1]]).astype(np.float64).reshape(-1)
    for reader, at in uses.get(bias.output[0], ()):
        pair = factor_names(reader, makers) if at == 2 else ()
        if pair and all(name in graph.initializers for name in pair):
            alpha = attributes_of(reader).get("alpha", 1.0)
            scales = [numpy_helper.to_array(graph.initializers[name]).astype(np.float64).reshape(-1) for name in pair]
            product = math.prod(scales, start=np.array([alpha]))
            if product.size in (1, own.size) and np.allclose(own, product, rtol=CLOSE, atol=0):
                return pair, alpha
    return (), 1.0


def factor_names(node: Node, makers: Mapping[str, Node]) -> tuple[str, ...]:
    """Return the scales of a node's data and weight, or () if it has no bias or its operands aren't quantized."""
    scales: list[str] = []
    for name in node.input[:2] if node.op_type in WITH_BIAS else ():
        maker = source_of(name, makers, MOVES)
        if maker is not None and maker.op_type == "DequantizeLinear":
            scales.append(maker.input[1])
    return tuple(scales) if len(scales) == 2 else ()


def round_biases(graph: Graph, training: ParameterRecord, steps: Mapping[str, np.ndarray]) -> None:
    """Insert nodes that round float biases, so that training computes with the biases that the file will store.

    If neither a bias nor one of the two scales that determine its scale is trained, the bias never changes, and is not
    rounded.

    Args:
        graph: the graph with float biases; changed in place.
        training: holds the integer weights and the names of trained tensors.
        steps: the scale of each bias, in a shape that broadcasts with the bias.
    """
    weights = {weight.weight: weight for weight in training.integer_weights}
    op, rounded, uses, trained = Op(graph), dict[str, str](), graph.uses(), set(training.trained)
    for name, step in steps.items():
        if not trained.isdisjoint((name, *weights[name].factors)):
            op.scope = uses[name][0][0].name
            rounded[name] = _rounded(op, op.val(name), _bias_step(op, weights[name], step, trained)).name
    for node in graph.nodes:
        node.input[:] = [rounded.get(each, each) for each in node.input]
    graph.set_nodes([*op.nodes, *graph.nodes])


def _rounded(op: Op, bias: Val, step: Val) -> Val:
    wide = op.wide(bias)
    off = op.cast(op.Round(wide / step) * step, bias) - bias
    op.graph.held.add(off.name)
    return bias + off


def _bias_step(op: Op, bias: IntegerWeight, stored: np.ndarray, trained: Collection[str]) -> Val:
    """Return the scale of a bias: the stored one, or the product of its two factors if one of these is trained."""
    if not any(name in trained for name in bias.factors):
        return op.const(stored.astype(np.float32), 1)
    first, *others = (op.reshape(op.wide(op.val(name)), [-1]) for name in bias.factors)
    return math.prod(others, start=first if bias.times == 1 else first * bias.times)
