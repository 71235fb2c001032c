"""Operators that the standard tried out and gave up at opset 10, and that onnxruntime still runs in older models.

Core ML's converter wrote them. onnx infers no type behind them, so they are written out before anything is inferred.
Source: the versions of https://github.com/onnx/onnx/blob/main/docs/Changelog.md before 1.5; onnxruntime's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad_cli.ir.dialects import FIRST_WITHOUT
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.nodes import attributes_of


class _Writer:
    """Writes the nodes in place of one."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.nodes: list[Node] = []

    def __call__(self, op_type: str, x: str, *constants: Any, **attributes: Any) -> str:
        names = [self.graph.add_constant(np.asarray(value, np.float32)) for value in constants]
        y = self.graph.fresh(f"{self.node.output[0]}/{op_type}")
        self.nodes.append(make_node(op_type, [x, *names], [y], name=y, **attributes))
        self.nodes[-1].metadata = origin(self.node)
        return y


def _affine(op: _Writer, x: str, alpha: float = 1.0, beta: float = 0.0) -> None:
    op("Add", op("Mul", x, alpha), beta)


def _scale(op: _Writer, x: str, scale: float = 1.0) -> None:
    op("Mul", x, scale)


def _scaled_tanh(op: _Writer, x: str, alpha: float, beta: float) -> None:
    op("Mul", op("Tanh", op("Mul", x, beta)), alpha)


def _parametric_softplus(op: _Writer, x: str, alpha: float, beta: float) -> None:
    op("Mul", op("Softplus", op("Mul", x, beta)), alpha)


def _image_scaler(op: _Writer, x: str, bias: list[float], scale: float) -> None:
    op("Add", op("Mul", x, scale), np.reshape(bias, [-1, 1, 1]))


def _crop(op: _Writer, x: str, border: list[int], scale: list[int] | None = None) -> None:
    """Without the border [left, top, right, bottom], or `scale` rows and columns behind its left and top."""
    left, top, right, bottom = border
    ends = [top + scale[0], left + scale[1]] if scale else [-n if n else 1 << 30 for n in (bottom, right)]
    op("Slice", x, axes=[2, 3], starts=[top, left], ends=ends)


MEANINGS: dict[str, Callable[..., None]] = {
    "Affine": _affine,
    "Crop": _crop,
    "ImageScaler": _image_scaler,
    "ParametricSoftplus": _parametric_softplus,
    "Scale": _scale,
    "ScaledTanh": _scaled_tanh,
}


def write_out_experimental(graph: Graph) -> None:
    """Replace, in a graph below opset 10, what the standard gave up by what it means."""
    if (graph.opset() or FIRST_WITHOUT) >= FIRST_WITHOUT or not any(node.op_type in MEANINGS for node in graph.nodes):
        return
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op_type not in MEANINGS or not is_standard(node.domain):
            nodes.append(node)
            continue
        op = _Writer(graph, node)
        MEANINGS[node.op_type](op, node.input[0], **attributes_of(node))
        op.nodes[-1].output[0], op.nodes[-1].name = node.output[0], node.name
        nodes += op.nodes
    graph.set_nodes(nodes)
