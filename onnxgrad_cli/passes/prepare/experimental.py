"""Replace operators that were experimental in the standard until opset 10; onnxruntime still runs models with them.

Core ML's converter wrote them. onnx can't infer the types of their outputs, so they are replaced before types are
inferred.
Source: the versions of https://github.com/onnx/onnx/blob/main/docs/Changelog.md before 1.5; onnxruntime's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.passes.prepare.quantized_operators import NodeWriter


class _ExperimentalWriter(NodeWriter):
    """Writes the nodes that replace an experimental operator. Inputs of a node after the first are constants."""

    def write(self, op_type: str, x: str, *constants: Any, **attributes: Any) -> str:
        """Write a node that reads `x` and then constants, and return its output."""
        names = [self.graph.add_constant(np.asarray(value, np.float32)) for value in constants]
        return self(op_type, x, *names, **attributes)

    def bounded(self, op_type: str, x: str, alpha: float, beta: float) -> None:
        """Write alpha * op_type(beta * x)."""
        self.write("Mul", self.write(op_type, self.write("Mul", x, beta)), alpha)


def _crop(op: _ExperimentalWriter, x: str, border: list[int], scale: list[int] | None = None) -> None:
    """Remove the border [left, top, right, bottom]. With `scale`, keep [rows, columns] behind its left and top part."""
    left, top, right, bottom = border
    ends = [top + scale[0], left + scale[1]] if scale else [-n if n else 1 << 30 for n in (bottom, right)]
    op.write("Slice", x, axes=[2, 3], starts=[top, left], ends=ends)


MEANINGS: dict[str, Callable[..., object]] = {
    "Affine": lambda op, x, alpha=1.0, beta=0.0: op.write("Add", op.write("Mul", x, alpha), beta),
    "Crop": _crop,
    "ImageScaler": lambda op, x, bias, scale: op.write("Add", op.write("Mul", x, scale), np.reshape(bias, [-1, 1, 1])),
    "ParametricSoftplus": lambda op, x, alpha, beta: op.bounded("Softplus", x, alpha, beta),
    "Scale": lambda op, x, scale=1.0: op.write("Mul", x, scale),
    "ScaledTanh": lambda op, x, alpha, beta: op.bounded("Tanh", x, alpha, beta),
}
"""Map from an operator to a function that writes its replacement, from its input and its attributes."""


def write_out_experimental(graph: Graph) -> None:
    """Replace the removed experimental operators by standard ones, in a graph below opset 10."""

    def written_out(node: Node) -> list[Node] | None:
        if not is_standard(node.domain):
            return None
        op = _ExperimentalWriter(graph, node)
        MEANINGS[node.op_type](op, node.input[0], **attributes_of(node))
        op.rename()
        return op.nodes

    graph.rewrite(written_out, MEANINGS)
