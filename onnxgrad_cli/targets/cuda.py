"""The target `ort-cuda`: write nodes that onnxruntime's CUDA provider has fast kernels for and does not run on the CPU.

benchmarks/CUDA.md lists the measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import FLOATS, HALVES, dtype_of, shape_of
from onnxgrad_cli.targets.standard import op_for

FORMS = {
    ("Conv", "input gradient"): "transposed convolution",  # cuDNN has a kernel for it
    ("LSTM", "gates"): "recomputed",  # cuDNN has a kernel for LSTM; a Scan would launch kernels at each step
}
"""Map from (operator, name of a gradient with several forms) to the form for which cuDNN has a kernel."""


def cuda_form(op: Op, name: str, default: str) -> str | None:
    """Return the form of a gradient for which cuDNN has a kernel, or None for the default form."""
    return FORMS.get((op.node.op_type, name)) if op.node is not None else None


def fit(graph: Graph) -> None:
    """Split sums and means per channel into two nodes, and give transposed convolutions equal pads at both ends."""
    nodes: list[Node] = []
    for node in graph.nodes:
        form = REWRITTEN.get(node.op_type) if is_standard(node.domain) else None
        nodes += (form(graph, node) if form else []) or [node]
    graph.set_nodes(nodes)


# -- sums over the first axes and the last -----------------------------------------------------------------------------


def _in_two_steps(graph: Graph, node: Node) -> list[Node]:
    """Split a sum or mean over the first and the last axes into two: over the last axes, then over the first axes.

    For the first axes alone and for the last axes alone, onnxruntime has a kernel that reads a matrix once. For both
    together it calls cuDNN's general reduction, which took 30 of the 65 ms of all kernels in a step of a ResNet-50. The
    intermediate result is rounded. Therefore means of integers are not split. Sums of 16-bit floats are not split
    either, because the intermediate result may overflow.

    Returns:
        The two nodes, or [] for any other node.
    """
    given = attributes_of(node)
    named = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else given.get("axes")
    dtype, shape = dtype_of(graph.types.get(node.input[0])), shape_of(graph.types.get(node.input[0]))
    rounded = dtype in HALVES or (node.op_type == "ReduceMean" and dtype not in FLOATS)
    if named is None or shape is None or rounded:
        return []
    first, last = _ends(sorted(int(axis) % len(shape) for axis in named), len(shape))
    if not first or not last:
        return []
    op = op_for(graph, node)
    keepdims = bool(given.get("keepdims", 1))
    rows = op.reduce(node.op_type, op.val(node.input[0]), last, keepdims)
    op.rename_all({node.output[0]: op.reduce(node.op_type, rows, first, keepdims)})
    return op.nodes


def _ends(axes: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """Split sorted axes into leading and trailing axes with one gap between them, or return ([], []) if impossible."""
    gaps = [i for i, (a, b) in enumerate(pairwise(axes), 1) if b > a + 1]
    if len(gaps) != 1 or axes[0] != 0 or axes[-1] != rank - 1:
        return [], []
    return list(axes[: gaps[0]]), list(axes[gaps[0] :])


# -- transposed convolutions -------------------------------------------------------------------------------------------


def _evenly_padded(graph: Graph, node: Node) -> list[Node]:
    """Rewrite a transposed convolution whose begin and end pads differ to one whose begin and end pads are equal.

    If the pads differ, the CUDA provider runs the node on the CPU, with copies in both directions. Three such nodes
    took more than half of the 137 ms of a ResNet-50's step. A smaller end pad is equivalent to equal pads with a larger
    `output_padding`, if that stays below the stride. Otherwise, the smaller pad is used at both ends, and the output is
    sliced.

    Returns:
        The new nodes, or [] for any other node.
    """
    given = attributes_of(node)
    pads = list(given.get("pads") or ())
    n = len(pads) // 2
    free = given.get("auto_pad", b"NOTSET") == b"NOTSET" and not given.get("output_shape")
    if not free or pads[:n] == pads[n:]:
        return []
    op = op_for(graph, node)
    strides, more = list(given.get("strides") or [1] * n), list(given.get("output_padding") or [0] * n)
    even, starts, ends = [], [], []
    for i, (begin, end) in enumerate(zip(pads[:n], pads[n:], strict=True)):
        longer = more[i] + begin - end
        within = begin >= end and longer < strides[i]
        pad = begin if within else min(begin, end)
        more[i] = longer if within else more[i]
        even.append(pad)
        starts.append(begin - pad)
        ends.append(0 if within else end - pad)
    given |= {"pads": even * 2, "output_padding": more if any(more) else None}
    result = op.emit(node.op_type, *map(op.val, filter(None, node.input)), **given)
    axes = [i for i in range(n) if starts[i] or ends[i]]
    if axes:
        stops = [-ends[i] or WHOLE for i in axes]
        result = op.Slice(result, op.ints([starts[i] for i in axes]), op.ints(stops), op.ints([2 + i for i in axes]))
    op.rename_all({node.output[0]: result})
    return op.nodes


WHOLE = 2**62
"""The `ends` value of a Slice that reaches to the end of an axis: larger than any size."""

REWRITTEN = {"ConvTranspose": _evenly_padded, "ReduceMean": _in_two_steps, "ReduceSum": _in_two_steps}
"""Operator -> the function that rewrites its nodes."""
