"""Remove what nobody reads: backward nodes that a rule wrote for operands without takers; compute constants; turn
products; let convolutions scale channels.

And keep views apart from DequantizeLinear: onnxruntime's optimizer puts a QuantizeLinear behind them, of a wrong type
(1.31 can't load that from opset 21 on, older versions make negative numbers zero).
"""

from __future__ import annotations

from collections.abc import Iterable

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import declare
from onnxgrad_cli.ir.node import ROLE, Node, make_node, metadata_of
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.cleanup.constants import compute_constants, divide_at_once
from onnxgrad_cli.passes.cleanup.cubic_layout import keep_cubic_layout
from onnxgrad_cli.passes.cleanup.narrow_kernels import compute_in_float32
from onnxgrad_cli.passes.cleanup.padded_weights import concatenate_zeros
from onnxgrad_cli.passes.cleanup.scaled_channels import convolve_channels
from onnxgrad_cli.passes.cleanup.transposed_products import turn_products
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.targets import find_target

VIEWS = frozenset("Expand Flatten Identity MaxPool Reshape Slice Squeeze Transpose Unsqueeze".split())
"""Operators past which onnxruntime takes a DequantizeLinear, or which it removes before it looks for those."""


def _run(graph: Graph, options: Options, training: object) -> bool:
    changed = compute_constants(graph)
    changed = turn_products(graph) or changed
    if find_target(options.target).fuses_convolutions and not options.as_gradient_op:  # which is differentiated yet
        changed = convolve_channels(graph) or changed
    if find_target(options.target).on_processor:
        changed = compute_in_float32(graph) or changed
    return tidy(graph) or changed


def tidy(graph: Graph, keep: Iterable[str] = ()) -> bool:
    """Remove what nobody reads but `keep`, and leave what is left in a form that lasts; whether it changed."""
    keep = set(keep)
    removed = graph.remove_unused(keep) > 0
    changed = divide_at_once(graph, keep) or removed
    changed = _separate_views(graph) or changed
    changed = keep_cubic_layout(graph) or changed
    changed = concatenate_zeros(graph) or changed
    declare(graph)
    return changed


def _separate_views(graph: Graph) -> bool:
    """Let backward views read the sum of one operand, which is a copy, instead of a DequantizeLinear's result."""
    computed = set(graph.made())  # a scale that is computed keeps the optimizer away
    quantized = (node for node in graph.nodes if node.op_type == "DequantizeLinear")
    made = {node.output[0]: node for node in quantized if node.input[1] not in computed}
    if not made:
        return False
    copies: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        backward = metadata_of(node, ROLE) == "backward"
        name = node.input[0] if node.input else ""
        if backward and node.op_type in VIEWS and name in made and not _stays(graph, node, made[name]):
            if name not in copies:
                copies[name] = graph.fresh(f"{name}_copy")
                graph.types[copies[name]] = graph.types[name]
                nodes.append(make_node("Sum", [name], [copies[name]], name=graph.fresh(f"{node.name}/Sum")))
                nodes[-1].metadata = node.metadata
            node.input[0] = copies[name]
        nodes.append(node)
    graph.nodes = nodes
    return bool(copies)


def _stays(graph: Graph, view: Node, dequantizer: Node) -> bool:
    """Whether the optimizer leaves both where they are: a Reshape behind several scales moves their axis."""
    scales = shape_of(graph.types.get(dequantizer.input[1])) or ()
    return view.op_type == "Reshape" and len(scales) == 1 and isinstance(scales[0], int) and scales[0] > 1


CLEANUP = Pass(
    "cleanup",
    "nodes nobody reads removed, constants computed, transposed products turned, scaled channels convolved",
    _run,
    ("optimizer",),
)
