"""Operators that give other values at each evaluation."""

from __future__ import annotations

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node

RANDOM = frozenset(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""Operators that give other values at each evaluation: two of them are never one."""


def is_random(graph: Graph, node: Node) -> bool:
    """Whether a node draws random numbers; a Dropout does in training mode only."""
    if node.op_type not in RANDOM:
        return False
    if node.op_type != "Dropout":
        return True
    if len(node.input) < 3 or not node.input[2]:
        return False
    mode = graph.constant(node.input[2])
    return mode is None or bool(mode)
