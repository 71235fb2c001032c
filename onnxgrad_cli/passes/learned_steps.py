"""The gradients of learned scales, balanced with those of weights.

A scale gathers the gradients of all that it quantizes, so that its own would be far larger, relative to it, than that
of a weight. It is divided by sqrt(N Q): N is how many numbers share the scale, of data those of one sample, and Q the
greatest integer that they are quantized to.

Source: S. Esser et al., Learned Step Size Quantization, ICLR 2020, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from onnx import TensorProto

from onnxgrad_cli.autodiff.rules.quantize import RANGES
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import dtype_of


def balanced(op: Op, cotangents: Mapping[str, Val | None], scales: Collection[str]) -> dict[str, Val]:
    """The gradients of scales, each divided by sqrt(N Q).

    Args:
        op: where the nodes are written; its graph holds the quantizers.
        cotangents: the gradients, by name.
        scales: those of quantizers.
    """
    quantizers: dict[str, list[Node]] = {}
    for node in op.graph.nodes if scales else ():
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
        sizes = [x.shape[axis] for axis in axes]
        if all(isinstance(size, int) for size in sizes):
            known += math.prod(size for size in sizes if isinstance(size, int))
        else:
            varying.append(op.count(x, axes, TensorProto.FLOAT))
    wide = op.wide(gradient)
    scales = math.prod(size for size in gradient.shape if isinstance(size, int))
    if not varying:
        return op.cast(wide / math.sqrt(max(known, 1) * greatest / scales), gradient)
    count = varying[0]
    for each in varying[1:]:
        count = count + each
    return op.cast(wide / op.cast(op.Sqrt((count + float(known)) * (greatest / scales)), wide), gradient)
