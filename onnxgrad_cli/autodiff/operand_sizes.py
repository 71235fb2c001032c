"""Whether the sizes of a node's operands fit each other, by the definitions of operators that onnx does not hold to.

Its inference asks nothing of the bias of an LSTM, nor of a Gemm of which one operand is unknown: what contradicts its
definition comes to light only where a rule computes with it. Nor does it ask whether a number of groups divides the
channels: then a rule computes with sizes that do not exist.

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
"""The axes of the operands and of the results, as for Einsum; `4h` is four times the size of h."""

PRODUCT = "{a}, {b}, -> m n"
"""Of Gemm, whose third operand may be of fewer axes."""

DIVISORS: dict[str, tuple[str, int, dict[int, tuple[int, ...]]]] = {
    "Conv": ("group", 1, {0: (1,), 1: (0,)}),
    "ConvTranspose": ("group", 1, {0: (1,), 1: (0,)}),
    "DepthToSpace": ("blocksize", 2, {0: (1,)}),
    "GroupNormalization": ("num_groups", 1, {0: (1,)}),
    "SpaceToDepth": ("blocksize", 1, {0: (2, 3)}),
}
"""Operator -> an attribute, a power of it, and operand -> the axes whose sizes that power divides."""

CHECKED = DIVISORS.keys() | {"Split"}
"""Operators of which a number of parts is given."""


def misdivision(graph: Graph, node: Node) -> str:
    """Which attribute of a node does not divide the sizes, or count the results, that its definition says it does.

    Args:
        graph: has the types of the values; a size that is unknown passes.
        node: the node.

    Returns:
        A sentence; "" where all fit.
    """
    if node.domain or node.op_type not in CHECKED:
        return ""
    given = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Split" and given.get("num_outputs", len(node.output)) != len(node.output):
        return f"its num_outputs is {given['num_outputs']}, and it has {len(node.output)} outputs"
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
    """What is wrong with the sizes of a node's operands and results by the definition of its operator.

    Args:
        graph: has the types of the values.
        node: the node; recurrent ones lie with time first.

    Returns:
        A sentence with the first value that does not fit those before it; "" where all may fit, or where the operator
        is one that onnx's inference holds to its definition.
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
            return f"'{name}' has the sizes [{given}], its definition asks for [{', '.join(axes.split())}] with {known}"
    return ""


def _definition(node: Node) -> str:
    if node.op_type != "Gemm" or node.domain:
        return DEFINITIONS.get(node.op_type, "") if not node.domain else ""
    given = attributes_of(node)
    return PRODUCT.format(a="k m" if given.get("transA") else "m k", b="n k" if given.get("transB") else "k n")
