"""The pass that tidies a training model: it removes unused nodes and rewrites others in better forms.

Unused nodes exist because differentiation rules also write gradients of operands that need no gradient.

- `backward_constants`: folds constants of the backward part.
- `faster_forms`: turns a transposed product into the product of the transposed factors, and scaling and shifting of
  channels into a convolution.
- `narrow_kernels`: computes in float32 where onnxruntime has no kernel for bfloat16.
- `optimizer_faults`: rewrites patterns that onnxruntime's optimizer would break.
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
from onnxgrad_cli.passes.tensor_roles import write_roles
from onnxgrad_cli.record import Training
from onnxgrad_cli.targets import find_target


def clean_up(graph: Graph, options: Options, training: Training) -> None:
    """Remove unused nodes, fold constants, fuse transposes into products, and write scaled channels as convolutions."""
    compute_constants(graph)
    turn_products(graph)
    target = find_target(options.target)
    if target.fuses_convolutions and not options.as_gradient_op:  # a Gradient is expanded later
        convolve_channels(graph)
    if graph.runs_bfloat16 and target.on_processor:
        compute_in_float32(graph)
    tidy(graph)
    if training.inner or training.evaluated:
        write_roles(graph, options, training)


def tidy(graph: Graph, keep: Iterable[str] = ()) -> None:
    """Remove unused nodes except those that compute `keep`, and avoid faults of onnxruntime's optimizer."""
    keep = set(keep)
    graph.remove_unused(keep)
    divide_at_once(graph, keep)
    separate_views(graph)
    keep_cubic_layout(graph)
    concatenate_zeros(graph)
    declare(graph)
