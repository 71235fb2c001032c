"""Check the sizes of a node's operands, for operators whose sizes onnx's shape inference does not check fully.

Shape inference does not check the bias of an LSTM, nor a Gemm that has an operand of unknown shape. Contradictory sizes
would then fail only when a rule computes with them. Shape inference also does not check that the number of groups
divides the number of channels. A rule would then compute with impossible sizes.

Source: https://onnx.ai/onnx/operators/, Conv, ConvTranspose, DepthToSpace, Gemm, GroupNormalization, GRU, LSTM, RNN,
SpaceToDepth and Split.
"""

from __future__ import annotations

import re

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.ir.types import shape_of

DEFINITIONS = {
    "GRU": "t b i, d 3h i, d 3h h, d 6h, b, d b h -> t d b h, d b h",
    "LSTM": "t b i, d 4h i, d 4h h, d 8h, b, d b h, d b h, d 3h -> t d b h, d b h, d b h",
    "RNN": "t b i, d h i, d h h, d 2h, b, d b h -> t d b h, d b h",
}
"""Map from an operator to the axes of its operands and results, as in Einsum; `4h` means a size of 4 times h."""

PRODUCT = "{a}, {b}, -> m n"
"""The axes of a Gemm, as in `DEFINITIONS`. The bias has no entry, so it is not checked: it may have fewer axes."""

DIVISORS: dict[str, tuple[str, int, dict[int, tuple[int, ...]]]] = {
    "Conv": ("group", 1, {0: (1,), 1: (0,)}),
    "ConvTranspose": ("group", 1, {0: (1,), 1: (0,)}),
    "DepthToSpace": ("blocksize", 2, {0: (1,)}),
    "GroupNormalization": ("num_groups", 1, {0: (1,)}),
    "SpaceToDepth": ("blocksize", 1, {0: (2, 3)}),
}
"""Map from an operator to (attribute, exponent, {operand: axes}). attribute ** exponent must divide the axes' sizes.

Operands are given by their position.
"""

CHECKED = DIVISORS.keys() | {"Split"}
"""Operators with an attribute that divides sizes, or that gives the number of outputs (Split)."""


def division_error(graph: Graph, node: Node) -> str:
    """Describe an attribute that does not divide the sizes of a node's operands, or contradicts its number of outputs.

    Args:
        graph: the graph with the types of the values; unknown sizes are accepted.
        node: the node.

    Returns:
        A sentence, or "" if all attributes fit.
    """
    if node.domain or node.op_type not in CHECKED:
        return ""
    given = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Split" and given.get("num_outputs", len(node.output)) != len(node.output):
        return f"its num_outputs is {given['num_outputs']}, but it has {len(node.output)} outputs"
    if node.op_type == "Split":
        return ""
    name, power, operands = DIVISORS[node.op_type]
    parts = given.get(name, 1)
    if parts < 1:
        return f"its {name} is {parts}"
    for position, axes in operands.items():
        shape = shape_of(graph.types.get(node.input[position])) or ()
        for axis in axes:
            size = shape[axis] if axis < len(shape) else None
            if isinstance(size, int) and size % parts**power:
                what = f"axis {axis} of '{node.input[position]}', which has {size} elements"
                return f"its {name} {parts} does not divide {what}" + (" into blocks" if power > 1 else "")
    return ""


def contradiction(graph: Graph, node: Node) -> str:
    """Describe sizes of a node's operands and results that contradict the definition of its operator.

    Args:
        graph: the graph with the types of the values.
        node: the node; a recurrent node must have time as the first axis.

    Returns:
        A sentence about the first value whose sizes contradict those of the values before it. "" if there is none, or
        if `DEFINITIONS` does not contain the operator.
    """
    operands, _, results = _definition(node).partition(" -> ")
    if not operands:
        return ""
    sizes: dict[str, int] = {}
    pairs = [*zip(node.input, operands.split(","), strict=False), *zip(node.output, results.split(","), strict=False)]
    for name, axes in pairs:
        shape = shape_of(graph.types.get(name))
        wanted = re.findall(r"(\d*)([a-z])", axes)
        if shape is None or not wanted:
            continue
        fits = len(shape) == len(wanted)
        for size, (times, label) in zip(shape, wanted, strict=False):
            if isinstance(size, int):
                fits &= size == sizes.setdefault(label, size // int(times or 1)) * int(times or 1)
        if not fits:
            known = ", ".join(f"{label} = {sizes[label]}" for _, label in wanted if label in sizes)
            given = ", ".join(map(str, shape))
            return (
                f"'{name}' has the shape [{given}], but its operator's definition requires "
                f"[{', '.join(axes.split())}] with {known}"
            )
    return ""


def _definition(node: Node) -> str:
    if node.op_type != "Gemm" or node.domain:
        return DEFINITIONS.get(node.op_type, "") if not node.domain else ""
    given = attributes_of(node)
    return PRODUCT.format(a="k m" if given.get("transA") else "m k", b="n k" if given.get("transB") else "k n")
