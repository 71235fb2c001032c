"""Rewrite patterns that onnxruntime's optimizer turns into a model that fails to load or computes wrong results.

- Views of a DequantizeLinear's output: the optimizer inserts a QuantizeLinear of a wrong type after them. From opset 21
  on, onnxruntime 1.31 can't load the result; older versions of onnxruntime set negative numbers to zero.
- A cubic Resize between transposes: the optimizer moves a Transpose past the Resize. It then has no kernel for a cubic
  Resize that shrinks an axis (1.32: "'Cubic' mode only supports ..."). In an inference model such a Resize mostly reads
  a weight, such as a position embedding, and is folded into a constant. In a training model the weight is an input. A
  Reshape to the same shape after the Resize prevents this. It moves no data.
- A Pad of a convolution's weight: the optimizer merges a Pad into the convolution that reads it without checking at
  which input. The model then fails to load (1.31 and 1.32: "Node input ... is not a graph input"). The optimizer first
  removes pairs of transposes and other views, so there may be such nodes between the Pad and the convolution. A Concat
  of zeros is not affected.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, make_node, metadata_of
from onnxgrad_cli.ir.node_values import attributes_of, source_of
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.targets.standard import op_for

VIEWS = frozenset("Expand Flatten Identity MaxPool Reshape Slice Squeeze Transpose Unsqueeze".split())
"""Operators past which onnxruntime moves a DequantizeLinear, or which it removes before it does so."""


def separate_views(graph: Graph) -> None:
    """Insert a copy (a one-operand Sum) between a DequantizeLinear and its views in the backward part."""
    computed = set(graph.made())  # the optimizer skips computed scales
    quantized = (node for node in graph.nodes if node.op_type == "DequantizeLinear")
    made = {node.output[0]: node for node in quantized if node.input[1] not in computed}
    copies: dict[str, str] = {}

    def separate(node: Node) -> list[Node] | None:
        backward = metadata_of(node, ROLE) == "backward"
        name = node.input[0] if node.input else ""
        if not backward or name not in made or _stays(graph, node, made[name]):
            return None
        if name in copies:
            node.input[0] = copies[name]
            return None
        node.input[0] = copies[name] = graph.fresh(f"{name}_copy")
        graph.types[copies[name]] = graph.types[name]
        copy = make_node("Sum", [name], [copies[name]], name=graph.fresh(f"{node.name}/Sum"))
        copy.metadata = node.metadata
        return [copy, node]

    if made:
        graph.rewrite(separate, VIEWS)


def _stays(graph: Graph, view: Node, dequantizer: Node) -> bool:
    """Return True if the optimizer leaves a view where it is: a Reshape, if there is one scale per index of an axis."""
    scales = shape_of(graph.types.get(dequantizer.input[1])) or ()
    return view.op_type == "Reshape" and len(scales) == 1 and isinstance(scales[0], int) and scales[0] > 1


def keep_cubic_layout(graph: Graph) -> None:
    """Insert a Reshape after each cubic Resize of a value that was transposed before."""
    moved = {node.output[0] for node in graph.nodes if node.op_type == "Resize" and _may_move(graph, node)}

    def kept(node: Node) -> list[Node] | None:
        name = node.output[0]
        if name not in moved:
            return None
        sizes = graph.add_constant(np.zeros(len(shape_of(graph.types[name]) or ()), np.int64))
        node.output[0] = graph.fresh(f"{name}_resized")
        graph.types[node.output[0]] = graph.types[name]
        view = make_node("Reshape", [node.output[0], sizes], [name], graph.fresh(f"{name}/view"))
        view.metadata = node.metadata
        return [node, view]

    graph.rewrite(kept, {"Resize"})


def _may_move(graph: Graph, node: Node) -> bool:
    """Return True if a Resize is cubic, reads a value that was transposed, and is not followed by a Reshape yet."""
    if attributes_of(node).get("mode") != b"cubic" or not shape_of(graph.types.get(node.output[0])):
        return False
    before = graph.ancestors(node.input[:1])
    if not any(made.op_type == "Transpose" and made.output[0] in before for made in graph.nodes):
        return False
    readers = [reader for reader in graph.nodes if node.output[0] in reader.input[:1]]
    sizes = graph.constant(readers[0].input[1]) if [reader.op_type for reader in readers] == ["Reshape"] else None
    return sizes is None or bool(np.any(sizes))


REMOVABLE = frozenset("Cast Identity Reshape Squeeze Transpose Unsqueeze".split())
"""Operators between a Pad and a convolution that onnxruntime's optimizer may remove or move away."""


def concatenate_zeros(graph: Graph) -> None:
    """Replace each Pad that computes a convolution's weight by a Concat with zeros."""
    makers = graph.producers() if any(node.op_type == "Pad" for node in graph.nodes) else {}
    convolutions = (node for node in graph.nodes if node.op_type == "Conv" and is_standard(node.domain))
    sources = [source_of(node.input[1], makers, REMOVABLE) for node in convolutions] if makers else []
    pads = (node for node in sources if node is not None and node.op_type == "Pad" and is_standard(node.domain))
    replaced = {pad.output[0]: amounts for pad in pads if (amounts := _mergeable(graph, pad))}

    def concatenated(node: Node) -> list[Node] | None:
        amounts = replaced.get(node.output[0])
        return None if amounts is None else _concatenated(graph, node, amounts)

    if replaced:
        graph.rewrite(concatenated, {"Pad"})


def _mergeable(graph: Graph, pad: Node) -> list[tuple[int, int]] | None:
    """Return the number of zeros before and after each axis, or None if the optimizer would not merge the Pad."""
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
    """Return zeros in the shape of `x`, except that their size along `axis` is `count`; None if `count` is 0."""
    return op.zeros([count if i == axis else op.size(x, i) for i in range(len(x.shape))], x) if count else None
