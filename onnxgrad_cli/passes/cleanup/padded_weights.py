"""Write the zeros around a convolution's weight without a Pad.

onnxruntime's optimizer merges a Pad into the convolution that reads it and does not check at which input: a Pad on the
weight is taken for one on the images, and the model does not load (1.31 and 1.32: "Node input ... is not a graph
input"). It removes pairs of transposes first, and other views, so the Pad may stand before those. A Concat of zeros
stays.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.targets.standing_in import op_for

REMOVABLE = frozenset("Cast Identity Reshape Squeeze Transpose Unsqueeze".split())
"""Operators between a Pad and a convolution that the optimizer removes, or moves away, where they change nothing."""


def concatenate_zeros(graph: Graph) -> bool:
    """Replace each Pad with zeros that a convolution's weight comes from; return True if there was one."""
    makers = graph.producers() if any(node.op_type == "Pad" for node in graph.nodes) else {}
    pads = [_pad_of(makers, node.input[1]) for node in graph.nodes if makers and _is_convolution(node)]
    replaced = {pad.output[0]: pads_of for pad in pads if pad and (pads_of := _mergeable(graph, pad))}
    if not replaced:
        return False
    nodes: list[Node] = []
    for node in graph.nodes:
        amounts = replaced.get(node.output[0]) if node.op_type == "Pad" else None
        nodes += [node] if amounts is None else _concatenated(graph, node, amounts)
    graph.nodes = nodes
    return True


def _is_convolution(node: Node) -> bool:
    return node.op_type == "Conv" and is_standard(node.domain)


def _pad_of(makers: Mapping[str, Node], name: str) -> Node | None:
    """Return the Pad that a value comes from by nothing but operators the optimizer may remove."""
    maker = makers.get(name)
    while maker and maker.op_type in REMOVABLE and is_standard(maker.domain):
        maker = makers.get(maker.input[0])
    return maker if maker and maker.op_type == "Pad" and is_standard(maker.domain) else None


def _mergeable(graph: Graph, pad: Node) -> list[tuple[int, int]] | None:
    """Return the zeros before and after each axis, or None where the optimizer leaves the Pad alone."""
    if attributes_of(pad).get("mode", b"constant") != b"constant" or len(pad.input) > 3:
        return None
    pads = graph.constant(pad.input[1])
    value = graph.constant(pad.input[2]) if len(pad.input) > 2 and pad.input[2] else np.zeros(())
    if pads is None or value is None or (pads < 0).any() or np.any(value):
        return None
    before, after = np.split(pads, 2)
    return list(zip(before.tolist(), after.tolist(), strict=True))


def _concatenated(graph: Graph, pad: Node, amounts: list[tuple[int, int]]) -> list[Node]:
    op = op_for(graph, pad)
    x = op.val(pad.input[0])
    for axis, (before, after) in enumerate(amounts):
        if before or after:
            parts = [_zeros(op, x, axis, before), x, _zeros(op, x, axis, after)]
            x = op.Concat(*[part for part in parts if part], axis=axis)
    op.rename_all({pad.output[0]: x})
    return op.nodes


def _zeros(op: Op, x: Val, axis: int, count: int) -> Val | None:
    """Return zeros in the shape of `x`, but `count` of them along one axis; None for no zeros."""
    return op.zeros([count if i == axis else op.size(x, i) for i in range(len(x.shape))], x) if count else None
