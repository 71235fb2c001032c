"""Float initializers that are constants by the role they play: settings, epsilons, scales, tables of frequencies.

A file does not say which of its initializers were parameters: the role follows from where each is read.
"""

from __future__ import annotations

import math
import re

import numpy as np
from onnx import NodeProto, numpy_helper

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import subgraphs, with_bodies
from onnxgrad_cli.ir.types import SMALL, is_external, nbytes

SETTINGS: dict[tuple[str, int], str] = {
    ("BatchNormalization", 3): "running mean of a BatchNormalization",
    ("BatchNormalization", 4): "running variance of a BatchNormalization",
    ("Clip", 1): "bound of a Clip",
    ("Clip", 2): "bound of a Clip",
    ("Dropout", 1): "ratio of a Dropout",
    ("Pad", 2): "fill value of a Pad",
    ("Resize", 1): "region of a Resize",
    ("Resize", 2): "scales of a Resize",
    ("Upsample", 1): "scales of an Upsample",
    ("OneHot", 2): "values of a OneHot",
    ("QuantizeLinear", 1): "quantization scale",
    ("DequantizeLinear", 1): "quantization scale",
    **{(op, i): "quantization scale" for op in ("QLinearConv", "QLinearMatMul") for i in (1, 4, 6)},
    ("LSTM", 5): "initial state",
    ("LSTM", 6): "initial state",
    ("GRU", 5): "initial state",
    ("RNN", 5): "initial state",
}
"""Operand positions that hold a setting, never a parameter."""

SCALAR_FACTORS = frozenset("Add Sub Mul Div Pow Max Min Where Mod Equal Greater Less Expand".split())
"""Operators whose one-element operands are plain constants: epsilons, scales, exponents, bounds."""

PRODUCTS = frozenset("MatMul Gemm Conv ConvTranspose Einsum".split())
GENERATED = re.compile(r"^(val_\d+|onnx::.*|.*Constant(_\d+)?(_output_0)?)$")


def _within(name: str, node: NodeProto, position: int) -> list[tuple[NodeProto, int]]:
    """The nodes that read a value, and at which input; of a node that captures it, those in its bodies."""
    if position >= 0:
        return [(node, position)]
    inner = [each for body in subgraphs(node) for each in with_bodies(body.node)]
    return [(each, at) for each in inner for at, read in enumerate(each.input) if read == name]


class ConstantRoles:
    """The role each initializer plays, by where it is read."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses = graph.uses()
        self.producers = graph.producers()

    def reason(self, name: str) -> str:
        """Why `name` is a constant by role, or "" where it is a weight."""
        reasons = [self._at(name, *use) for each in self.uses[name] for use in _within(name, *each)]
        return reasons[0] if reasons and all(reasons) else ""

    def _at(self, name: str, node: NodeProto, position: int) -> str:
        """Why the initializer is a constant where `node` reads it as its input `position`, or ""."""
        op_type = node.op_type
        if (op_type, position) in SETTINGS:
            return SETTINGS[op_type, position]
        tensor = self.graph.initializers[name]
        size = math.prod(tensor.dims)
        if not tensor.dims and op_type != "PRelu":
            return f"a scalar constant of {op_type} (name it with `train` to train it)"
        if size == 1 and op_type in SCALAR_FACTORS and not self._is_bias(node, position):
            return f"a one-element constant of {op_type} (name it with `train` to train it)"
        if op_type in ("Mul", "Div") and self._is_frequency(node):
            return "a table of frequencies before Sin or Cos (name it with `train` to train it)"
        if op_type == "InstanceNormalization" and GENERATED.match(name) and self._is_identity(name, position):
            return "the identity scale or shift of an InstanceNormalization without parameters"
        return ""

    def _is_bias(self, node: NodeProto, position: int) -> bool:
        """Whether a one-element operand of Add or Sub is the bias of the matrix product before it."""
        if node.op_type not in ("Add", "Sub"):
            return False
        other = self.producers.get(node.input[1 - position])
        return other is not None and other.op_type in PRODUCTS

    def _is_frequency(self, node: NodeProto, depth: int = 3) -> bool:
        """Whether the product goes straight to Sin or Cos, but for constant factors and views."""
        for reader, _ in self.uses.get(node.output[0], ()):
            if reader.op_type in ("Sin", "Cos"):
                return True
            views = ("Mul", "Concat", "Unsqueeze", "Reshape", "Slice", "Transpose")
            if depth and reader.op_type in views and self._is_frequency(reader, depth - 1):
                return True
        return False

    def _is_identity(self, name: str, position: int) -> bool:
        tensor = self.graph.initializers[name]
        if is_external(tensor) or nbytes(tensor) > 64 * SMALL:
            return False
        return bool(np.all(numpy_helper.to_array(tensor) == (1.0 if position == 1 else 0.0)))
