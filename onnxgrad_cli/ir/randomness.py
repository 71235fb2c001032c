"""Operators that return different values in each run."""

from __future__ import annotations

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node

RANDOM = frozenset(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""Operators that return different values in each run, so equal nodes must not be merged."""


def is_random(graph: Graph, node: Node) -> bool:
    """Return True if a node may draw random numbers. A Dropout does so only in training mode."""
    if node.op_type not in RANDOM:
        return False
    if node.op_type != "Dropout":
        return True
    if len(node.input) < 3 or not node.input[2]:
        return False
    mode = graph.constant(node.input[2])
    return mode is None or bool(mode)
