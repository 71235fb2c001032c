"""Check the sizes of a node's operands, for operators whose sizes onnx's shape inference does not check fully.

Shape inference does not check the bias of an LSTM, nor a Gemm that has an operand of unknown shape. It also does not
check that the number of groups divides the number of channels. A rule would then compute with impossible sizes.

Source: https://onnx.ai/onnx/operators/, the operators in `CHECKS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of

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
    "DeformConv": ("group", 1, {0: (1,), 1: (0,)}),
    "DepthToSpace": ("blocksize", 2, {0: (1,)}),
    "GroupNormalization": ("num_groups", 1, {0: (1,)}),
    "SpaceToDepth": ("blocksize", 1, {0: (2, 3)}),
}
"""Map from an operator to (attribute, exponent, {operand: axes}). attribute ** exponent must divide the axes' sizes.

Operands are given by their position.
"""


def first_misfit(graph: Graph) -> str:
    """Describe the first node whose sizes or attributes contradict the definition of its operator.

    Args:
        graph: the graph with the types of the values; unknown sizes are accepted.

    Returns:
        A sentence, or "" if all nodes may fit.
    """
    for node in graph.nodes:
        for fault in CHECKS[node.op_type](graph, node) if node.op_type in CHECKS and not node.domain else ():
            return f"node '{node.name or node.output[0]}' ({node.op_type}): {fault}"
    return ""


def _division(graph: Graph, node: Node) -> Iterator[str]:
    name, power, operands = DIVISORS[node.op_type]
    parts = attributes_of(node).get(name, 1)
    if parts < 1:
        yield f"its {name} is {parts}"
    for position, axes in operands.items():
        shape = graph.shape(node.input[position]) or ()
        for axis in axes:
            size = shape[axis] if axis < len(shape) else None
            if isinstance(size, int) and size % parts**power:
                what = f"axis {axis} of '{node.input[position]}', which has {size} elements"
                yield f"its {name} {parts} does not divide {what}" + (" into blocks" if power > 1 else "")


def _convolution(graph: Graph, node: Node) -> Iterator[str]:
    yield from _division(graph, node)
    given, (x, w) = attributes_of(node), (graph.shape(name) for name in node.input[:2])
    if x is None or w is None:
        return
    inputs = w[0] if node.op_type == "ConvTranspose" else w[1]  # of one group, or of all
    groups = 1 if node.op_type == "ConvTranspose" else given.get("group", 1)
    if isinstance(x[1], int) and isinstance(inputs, int) and x[1] != inputs * groups:
        yield f"'{node.input[0]}' has {x[1]} channels, but its weight '{node.input[1]}' is for {inputs * groups}"
    own = w[2:]
    kernel = given.get("kernel_shape", own)
    if len(kernel) != len(own) or any(isinstance(b, int) and a != b for a, b in zip(kernel, own, strict=True)):
        yield f"its kernel_shape is {list(kernel)}, but its weight has the kernel shape {list(own)}"


def _split(graph: Graph, node: Node) -> Iterator[str]:
    parts = attributes_of(node).get("num_outputs", len(node.output))
    if parts != len(node.output):
        yield f"its num_outputs is {parts}, but it has {len(node.output)} outputs"


def _axes(graph: Graph, node: Node) -> Iterator[str]:
    """Describe the axis of a normalization, or the perm of a Transpose, that does not fit the rank."""
    rank = len(graph.shape(node.input[0]) or ())
    for name, value in attributes_of(node).items() if rank else ():
        if (name == "axis" and not -rank <= value < rank) or (name == "perm" and len(value) != rank):
            yield f"its {name} is {value}, but '{node.input[0]}' has {rank} axes"


def _reshape(graph: Graph, node: Node) -> Iterator[str]:
    shapes = [graph.shape(name) for name in (node.input[0], node.output[0])]
    counts = [math.prod(s) for s in shapes if s is not None and all(isinstance(size, int) for size in s)]
    if len(counts) == 2 and counts[0] != counts[1]:
        yield f"it makes the shape {list(shapes[1] or ())} of {list(shapes[0] or ())}"


def _definition(graph: Graph, node: Node) -> Iterator[str]:
    """Describe the first value whose sizes don't fit the earlier ones, by `DEFINITIONS` or `PRODUCT`."""
    given = attributes_of(node)
    if given.get("layout"):  # time is not the first axis
        return
    axes_of = {"a": "k m" if given.get("transA") else "m k", "b": "n k" if given.get("transB") else "k n"}
    operands, _, results = DEFINITIONS.get(node.op_type, PRODUCT.format(**axes_of)).partition(" -> ")
    sizes: dict[str, int] = {}
    pairs = [*zip(node.input, operands.split(","), strict=False), *zip(node.output, results.split(","), strict=False)]
    for name, axes in pairs:
        shape = graph.shape(name)
        wanted = re.findall(r"(\d*)([a-z])", axes)
        if shape is None or not wanted:
            continue
        fits = len(shape) == len(wanted)
        for size, (times, label) in zip(shape, wanted, strict=False):
            if isinstance(size, int):
                fits &= size == sizes.setdefault(label, size // int(times or 1)) * int(times or 1)
        if not fits:
            known = ", ".join(f"{label} = {sizes[label]}" for _, label in wanted if label in sizes)
            needed = f"its operator's definition requires [{', '.join(axes.split())}] with {known}"
            yield f"'{name}' has the shape [{', '.join(map(str, shape))}], but {needed}"


CHECKS: dict[str, Callable[[Graph, Node], Iterator[str]]] = {
    **dict.fromkeys(DIVISORS, _division),
    **dict.fromkeys(("Conv", "ConvTranspose", "DeformConv"), _convolution),
    **dict.fromkeys((*DEFINITIONS, "Gemm"), _definition),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "Transpose"), _axes),
    "Reshape": _reshape,
    "Split": _split,
}
"""Operator of the standard -> the function that yields a description of each contradiction in a node."""
