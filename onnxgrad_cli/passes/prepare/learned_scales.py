"""Scales of quantizers that are trained with the weights: learned step sizes.

A scale is learned where what it quantizes is the model's own affair. A value that is quantized, moved and quantized
again by equal scales keeps one scale: runtimes compute on its integers only as long as that is so.

Source: S. Esser et al., Learned Step Size Quantization, ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import dtype_of, is_external, is_float
from onnxgrad_cli.passes.prepare.fake_quantizers import factor_names
from onnxgrad_cli.passes.prepare.quantized_operators import MOVES
from onnxgrad_cli.record import ParameterRecord

QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
MOVED = MOVES | frozenset("DepthToSpace Expand Gather Slice SpaceToDepth Split".split())
"""Operators that give of numbers some of the same numbers."""


def learn_scales(graph: Graph, training: ParameterRecord) -> None:
    """Note the scales that are to be trained, and let equal ones of the same value be one.

    Args:
        graph: with float weights; changed in place.
        training: takes the scales, and those that others stand for.

    Raises:
        UsageError: there are none.
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
        raise UsageError(
            "`quantization='lsq'`: the model has no quantizer whose scale could be learned",
            "it trains what onnxruntime.quantization.quantize_static writes; for others there is `quantization='ste'`",
        )


def _scales(graph: Graph) -> list[str]:
    """The stored scales that quantize, and that are read as scales alone."""
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
    """The scales of products with a bias that could not follow them: its integers are added to theirs as they are."""
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
    """The scales of integers that go in or come out: whoever makes or takes them knows the scale as it is."""
    ports = {*graph.input_names, *graph.output_names} - graph.initializers.keys()
    found = [node for node in graph.nodes if node.op_type in QUANTIZERS]
    return {
        node.input[1] for node in found if (node.output if node.op_type == "QuantizeLinear" else node.input)[0] in ports
    }


def _join(graph: Graph) -> dict[str, str]:
    """Let all quantizers read one scale that the model has several times for a value; returns those -> the one."""
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
    """What has quantized the integers that a node dequantizes, or dequantized the floats that it quantizes."""
    if node.op_type not in QUANTIZERS:
        return None
    maker = makers.get(node.input[0])
    while maker is not None and maker.op_type in MOVED:
        maker = makers.get(maker.input[0])
    return maker if maker is not None and maker.op_type in QUANTIZERS - {node.op_type} else None


def _equal(graph: Graph, node: Node, other: Node) -> bool:
    """Whether two quantizers have scales and zero points of the same values, under two names."""
    if node.input[1] == other.input[1] or {node.input[1], other.input[1]} - graph.initializers.keys():
        return False
    pairs = zip([*node.input[1:], ""][:2], [*other.input[1:], ""][:2], strict=True)
    return all(mine == its or _same(graph, mine, its) for mine, its in pairs)


def _same(graph: Graph, one: str, other: str) -> bool:
    tensors = [graph.initializers.get(name) for name in (one, other)]
    if any(tensor is None or is_external(tensor) for tensor in tensors):
        return False
    first, second = (numpy_helper.to_array(tensor) for tensor in tensors if tensor is not None)
    return first.dtype == second.dtype and first.shape == second.shape and np.array_equal(first, second)
