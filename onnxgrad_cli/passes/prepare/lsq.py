"""Train the scales of quantizers together with the weights (learned step size quantization, LSQ).

A scale is trained if the integers are not inputs or outputs of the model. If a value is quantized, moved, and quantized
again with an equal scale, both are trained as one scale, because only then can runtimes compute with the integers.

The gradient of a scale is a sum over all elements that it quantizes. Relative to the scale, it would be far larger than
the gradient of a weight relative to the weight. So it is divided by sqrt(N Q). N is the number of elements that share
the scale (for activations, those of one sample). Q is the largest integer of the quantized type.

Source: S. Esser et al., Learned Step Size Quantization, ICLR 2020; section 2.2 balances the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.rules.quantize import RANGES
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import no_data
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import source_of
from onnxgrad_cli.ir.types import dtype_of, is_float, known_sizes
from onnxgrad_cli.passes.prepare.fake_quantizers import factor_names
from onnxgrad_cli.passes.prepare.quantized_operators import MOVES
from onnxgrad_cli.passes.stored_integers import QUANTIZERS, stored_array
from onnxgrad_cli.record import ParameterRecord

MOVED = MOVES | frozenset("DepthToSpace Expand Gather Slice SpaceToDepth Split".split())
"""Operators that move, repeat or select elements without changing them."""


def learn_scales(graph: Graph, training: ParameterRecord) -> None:
    """Choose the quantizer scales to train, and merge equal scales of the same value.

    Args:
        graph: the graph after `put_fake_quantizers`; changed in place.
        training: receives the scales to train, and the merged ones.

    Raises:
        UsageError: no scale can be trained.
    """
    training.copies = _join(graph)
    as_they_are = training.copies.get
    training.integer_weights = [
        replace(
            weight,
            scale=as_they_are(weight.scale, weight.scale),
            factors=tuple(as_they_are(name, name) for name in weight.factors),
        )
        for weight in training.integer_weights
    ]
    held = _held(graph, training) | _of_ports(graph)
    training.learned_scales = [name for name in _scales(graph) if name not in held]
    if not training.learned_scales:
        raise no_data(
            "`quantization='lsq'`: the model has no quantizer with a scale that can be trained",
            "use `quantization='ste'`; `quantization='lsq'` trains only quantizers of "
            "onnxruntime.quantization.quantize_static",
        )


def _scales(graph: Graph) -> list[str]:
    """Return the stored scales of QuantizeLinear nodes that nothing uses except as scales."""
    uses = graph.uses()
    found = []
    for name in graph.initializers:
        readers = uses.get(name, ())
        kinds = {node.op_type for node, _ in readers}
        alone = kinds <= QUANTIZERS and all(at == 1 for _, at in readers) and name not in graph.output_names
        if "QuantizeLinear" in kinds and alone and is_float(graph.types[name]) and not graph.added(name):
            found.append(name)
    return found


def _held(graph: Graph, training: ParameterRecord) -> set[str]:
    """Return the scales that must not change, because the scale of an integer bias can't change with them.

    Kernels add the bias to the product as integers, so the scale of the bias has to remain the product of the two
    scales.
    """
    makers, types = graph.producers(), graph.types
    biases = {weight.weight: weight for weight in training.integer_weights}
    own: dict[str, set[tuple[str, ...]]] = {}
    for weight in training.integer_weights:
        own.setdefault(weight.scale, set()).add(weight.factors)
    shared = {scale for scale, ways in own.items() if scale and len(ways) > 1}
    held = {name for scale in shared for factors in own[scale] for name in (scale, *factors)}
    for node in graph.nodes:
        pair = factor_names(node, makers) if len(node.input) > 2 else ()
        maker = makers.get(node.input[2]) if pair else None
        bias = biases.get(node.input[2]) if pair else None
        integers = maker is not None and dtype_of(types.get(maker.input[0])) == TensorProto.INT32
        if integers or (bias is not None and bias.factors != pair):
            held.update(pair, bias.factors if bias is not None else ())
    return held


def _of_ports(graph: Graph) -> set[str]:
    """Return the scales of integer inputs and outputs of the model, whose callers use the original scale."""
    ports = {*graph.input_names, *graph.output_names} - graph.initializers.keys()
    found = [node for node in graph.nodes if node.op_type in QUANTIZERS]
    return {n.input[1] for n in found if (n.output if n.op_type == "QuantizeLinear" else n.input)[0] in ports}


def _join(graph: Graph) -> dict[str, str]:
    """Merge equal scales that are stored separately for one value. Return a map: duplicate -> the scale to use."""
    makers = graph.producers()
    ones: dict[str, str] = {}

    def one(name: str) -> str:
        while name in ones:
            name = ones[name]
        return name

    for node in graph.nodes:
        other = _before(makers, node)
        if other is not None and _equal(graph, node, other):
            mine, its = one(node.input[1]), one(other.input[1])
            if mine != its:
                ones[mine] = its
    ones = {name: one(name) for name in ones}
    for node in graph.nodes:
        if node.op_type in QUANTIZERS and node.input[1] in ones:
            node.input[1] = ones[node.input[1]]
    graph.drop_unread(ones)
    return ones


def _before(makers: Mapping[str, Node], node: Node) -> Node | None:
    """Return the QuantizeLinear before a DequantizeLinear (or the reverse). Nodes that move elements are skipped."""
    if node.op_type not in QUANTIZERS:
        return None
    maker = source_of(node.input[0], makers, MOVED)
    return maker if maker is not None and maker.op_type in QUANTIZERS - {node.op_type} else None


def _equal(graph: Graph, node: Node, other: Node) -> bool:
    """Return True if the scales and zero points of two quantizers are equal but stored separately."""
    if node.input[1] == other.input[1] or {node.input[1], other.input[1]} - graph.initializers.keys():
        return False
    pairs = zip([*node.input[1:], ""][:2], [*other.input[1:], ""][:2], strict=True)
    return all(mine == its or _same(stored_array(graph, mine), stored_array(graph, its)) for mine, its in pairs)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and np.array_equal(one, other)


def balanced(op: Op, cotangents: Mapping[str, Val | None], scales: Collection[str]) -> dict[str, Val]:
    """Return the gradients of scales, each divided by sqrt(N Q).

    Args:
        op: the emitter; its graph holds the quantizers.
        cotangents: map from a scale to its gradient, as differentiation returned it.
        scales: the names of the scales that are trained.
    """
    quantizers: dict[str, list[Node]] = {}
    for node in op.graph.nodes:
        if node.op_type == "QuantizeLinear":
            quantizers.setdefault(node.input[1], []).append(node)
    found: dict[str, Val] = {}
    for name in scales:
        gradient = cotangents.get(name)
        if gradient is not None:
            op.forward, op.scope = "", f"grad/{name}"
            found[name] = _balanced(op, gradient, quantizers[name])
    return found


def _balanced(op: Op, gradient: Val, quantizers: list[Node]) -> Val:
    greatest = max(RANGES[dtype_of(op.graph.types[node.output[0]])][1] for node in quantizers)
    known, varying = 0, list[Val]()
    for node in quantizers:
        x = op.val(node.input[0])
        stored = node.input[0] in op.graph.initializers
        axes = range(0 if stored else 1, x.rank)
        sizes = known_sizes(x.shape[axis] for axis in axes)
        if sizes is not None:
            known += math.prod(sizes)
        else:
            varying.append(op.count(x, axes, TensorProto.FLOAT))
    wide = op.wide(gradient)
    scales = math.prod(size for size in gradient.shape if isinstance(size, int))
    if not varying:
        return op.cast(wide / math.sqrt(max(known, 1) * greatest / scales), gradient)
    count = sum(varying[1:], varying[0])
    return op.cast(wide / op.cast(op.Sqrt((count + float(known)) * (greatest / scales)), wide), gradient)
