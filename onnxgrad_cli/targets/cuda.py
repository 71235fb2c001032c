"""The target that is onnxruntime's CUDA provider: forms with fast kernels there, and none that the processor must run.

What each costs was measured, see benchmarks/CUDA.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.ir.types import FLOATS, HALVES, dtype_of, shape_of
from onnxgrad_cli.targets.standing_in import op_for

FORMS = {
    ("Conv", "input gradient"): "transposed convolution",  # cuDNN has a kernel for it
    ("LSTM", "gates"): "recomputed",  # as it has for the operator itself, while a Scan starts its kernels at each step
}
"""The form that suits cuDNN, by the operator and the name of the gradient that has several."""


def cuda_form(op: Op, name: str, default: str) -> str | None:
    """The form of a gradient that cuDNN has a kernel for; None where the default is one."""
    return FORMS.get((op.node.op_type, name)) if op.node is not None else None


def fit(graph: Graph) -> None:
    """Write sums per channel in two steps, and transposed convolutions with pads that are the same at both ends."""
    nodes: list[Node] = []
    for node in graph.nodes:
        form = REWRITTEN.get(node.op_type) if is_standard(node.domain) else None
        nodes += (form(graph, node) if form else []) or [node]
    graph.set_nodes(nodes)


# -- sums over the first axes and the last -----------------------------------------------------------------------------


def _in_two_steps(graph: Graph, node: Node) -> list[Node]:
    """A sum or mean over the first axes and the last, as one over the last and one over the first; else none.

    Over either alone onnxruntime has a kernel that reads a matrix once; over both it calls cuDNN's reduction of any
    axes, which took 30 of the 65 ms of a ResNet-50's kernels. What is rounded between
    the two stays one: a mean of integers, and sums in 16 bits, which may be too large on their way.
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
    """Axes as those that begin the shape and those that end it, with one gap between; both empty where they are not."""
    gaps = [i for i, (a, b) in enumerate(pairwise(axes), 1) if b > a + 1]
    if len(gaps) != 1 or axes[0] != 0 or axes[-1] != rank - 1:
        return [], []
    return list(axes[: gaps[0]]), list(axes[gaps[0] :])


# -- transposed convolutions -------------------------------------------------------------------------------------------


def _evenly_padded(graph: Graph, node: Node) -> list[Node]:
    """A transposed convolution whose pads differ, as one whose pads do not; none where it is no such one.

    The provider leaves those to the processor, with copies there and back: three of them took more than half of the
    137 ms of a ResNet-50's step. A pad at the end that is smaller is the same pad and an output that is longer, by
    `output_padding`, as far as that goes; the rest is cut off.
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
"""An end that no axis reaches."""

REWRITTEN = {"ConvTranspose": _evenly_padded, "ReduceMean": _in_two_steps, "ReduceSum": _in_two_steps}
"""What is written otherwise, by its operator."""
