"""Remove unused nodes, fold constants, and replace nodes by faster ones.

Unused nodes exist because differentiation rules also write gradients of operands that need no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import declare
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.cleanup.backward_constants import compute_constants, divide_at_once
from onnxgrad_cli.passes.cleanup.faster_forms import convolve_channels, turn_products
from onnxgrad_cli.passes.cleanup.narrow_kernels import compute_in_float32
from onnxgrad_cli.passes.cleanup.optimizer_faults import concatenate_zeros, keep_cubic_layout, separate_views
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.passes.roles import embed
from onnxgrad_cli.record import Training
from onnxgrad_cli.targets import find_target


def _run(graph: Graph, options: Options, training: Training) -> bool:
    changed = compute_constants(graph)
    changed = turn_products(graph) or changed
    if find_target(options.target).fuses_convolutions and not options.as_gradient_op:  # a Gradient is expanded later
        changed = convolve_channels(graph) or changed
    if graph.runs_bfloat16 and find_target(options.target).on_processor:
        changed = compute_in_float32(graph) or changed
    changed = tidy(graph) or changed
    if training.inner or training.evaluated:
        embed(graph, options, training)
    return changed


def tidy(graph: Graph, keep: Iterable[str] = ()) -> bool:
    """Remove unused nodes except those that compute `keep`, and avoid faults of onnxruntime's optimizer.

    Return True if the graph changed.
    """
    keep = set(keep)
    removed = graph.remove_unused(keep) > 0
    changed = divide_at_once(graph, keep) or removed
    changed = separate_views(graph) or changed
    if any(node.op_type == "Resize" for node in graph.nodes):
        changed = keep_cubic_layout(graph) or changed
    changed = concatenate_zeros(graph) or changed
    declare(graph)
    return changed


CLEANUP = Pass(
    "cleanup",
    "removes unused nodes, folds constants, fuses transposes into products, writes scaled channels as convolutions",
    _run,
    ("outputs",),
)
