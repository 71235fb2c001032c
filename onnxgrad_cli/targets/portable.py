"""The target that is several runtimes: those of JavaScript, by wasm and WebGPU, and OpenVINO; what all of them have.

What each lacks was found by running; docs/runtimes.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.targets.standing_in import op_for

FORMS = {
    ("MaxPool", "gradient"): "compared",  # WebGPU has no Indices, OpenVINO no MaxUnpool
    ("LSTM", "gates"): "recomputed",  # the operator itself is in all of them, in the place of a Scan
}
"""The form that suits these runtimes, by the operator and the name of the gradient that has several."""


def portable_form(op: Op, name: str, default: str) -> str | None:
    """The form of a gradient that all runtimes have kernels for; None where the default is one.

    A convolution with the samples as its channels is none: OpenVINO has no groups of an unknown number, and WebGPU
    computes some numbers of channels wrongly. Sums whose number of parts is found at run time are untried there.
    """
    if default == "gathered":
        return "sorted" if name == "row sums" else "flat"
    if name == "steps":
        return "unrolled"
    if name == "weight gradient" and default == "convolution":
        return "channels"
    return FORMS.get((op.node.op_type, name)) if op.node is not None else None


STEPS = "fix the number of steps by `dims` or `shapes`, to 256 or fewer, so that they are written out"
INDICES = "it hands out Indices, which onnxruntime-web has not on WebGPU"

ABSENT = {
    "Scan": ("OpenVINO has no Scan that reads values from around it", STEPS),
    "Loop": ("OpenVINO has no Loop that reads values from around it", "unroll it in the model"),
    "If": ("OpenVINO has no If that reads values from around it", "let the model decide before it is exported"),
    "MaxUnpool": ("OpenVINO has no MaxUnpool", ""),
}
"""Operator -> why it is refused, and what to do about it."""

AXES = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
                  "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"})  # fmt: skip
"""Operators whose axes OpenVINO wants to know when it loads a model."""


def fit(graph: Graph) -> None:
    """Write otherwise what one of the runtimes computes wrongly, and refuse what one has not.

    Raises:
        UnsupportedError: there is something; each node is listed with the runtime.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        if not _computed(graph, node):
            nodes += _narrowed(graph, node) or [*_with_more_channels(graph, node), node]
    graph.set_nodes(nodes)
    found = list(_lacking(graph))
    if found:
        raise UnsupportedError(
            f"{len(found)} of {len(graph.nodes)} nodes are none that every runtime of `target='portable'` has:",
            found,
            "; ".join(dict.fromkeys(refusal.hint for refusal in found if refusal.hint))
            or "build it for any runtime, with `target='standard'`",
        )


# -- double precision on WebGPU ----------------------------------------------------------------------------------------


PLAIN = frozenset({"Add", "Cast", "Div", "Mul", "Neg", "Reciprocal", "Sqrt", "Sub"})
"""What exporters write to make a constant of others."""


def _computed(graph: Graph, node: Node) -> bool:
    """Whether a node was computed now, as it is one of constants in float64, and its outputs are constants instead.

    onnxruntime-web has few such kernels beside WebGPU, and does not open a model with the Sqrt that PyTorch's exporter
    writes for the scale of attention: "Provider type for Sqrt node ... is not set".
    """
    values = {name: graph.constant(name) for name in node.input}
    arrays = {name: array for name, array in values.items() if array is not None}
    if node.op_type not in PLAIN or not is_standard(node.domain) or len(arrays) < len(values):
        return False
    if not any(dtype_of(graph.types.get(name)) == TensorProto.DOUBLE for name in (*node.input, *node.output)):
        return False
    from onnx.reference import ReferenceEvaluator  # its import takes longer than a small build

    for name, array in zip(node.output, ReferenceEvaluator(as_message(node)).run(None, arrays), strict=True):
        graph.add_initializer(name, array)
    return True


# -- buffers on WebGPU -------------------------------------------------------------------------------------------------

WIDEST = 7
"""How many pieces a Concat or Split has at most: with the whole they are the eight buffers that WebGPU promises."""


def _narrowed(graph: Graph, node: Node) -> list[Node]:
    """A Concat or Split of many pieces as several of few; none where it is no such node."""
    if not is_standard(node.domain) or max(len(node.input), len(node.output)) <= WIDEST:
        return []
    op = op_for(graph, node)
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    if node.op_type == "Concat":
        parts = [op.val(name) for name in node.input]
        while len(parts) > 1:
            groups = (parts[i : i + WIDEST] for i in range(0, len(parts), WIDEST))
            parts = [op.Concat(*group, axis=axis) if len(group) > 1 else group[0] for group in groups]
        op.rename_all({node.output[0]: parts[0]})
        return op.nodes
    sizes = graph.constant(node.input[1]) if node.op_type == "Split" and len(node.input) > 1 else None
    if sizes is None:
        return []
    parts = _cut(op, op.val(node.input[0]), [int(size) for size in sizes], axis)
    op.rename_all({name: part for name, part in zip(node.output, parts, strict=True) if name})
    return op.nodes


def _cut(op: Op, x: Val, sizes: Sequence[int], axis: int) -> list[Val]:
    """`x` in pieces of these sizes, by Splits of few."""
    if len(sizes) <= WIDEST:
        return list(op.split(x, sizes, axis))
    each = -(-len(sizes) // WIDEST)
    groups = [sizes[i : i + each] for i in range(0, len(sizes), each)]
    parts = op.split(x, [sum(group) for group in groups], axis)
    return [piece for part, group in zip(parts, groups, strict=True) for piece in _cut(op, part, group, axis)]


# -- convolutions on WebGPU --------------------------------------------------------------------------------------------


def _is_wrong(shape: Shape, group: int) -> bool:
    """Whether onnxruntime-web 1.30 computes a convolution wrongly on WebGPU, by its weight's shape.

    It does where the channels that an output reads are a multiple of three and not of four, other than three, and the
    outputs are a multiple of four. Source: microsoft/onnxruntime issue 29651, and docs/runtimes.md.
    """
    outputs, channels = shape[:2]
    if not isinstance(channels, int):
        return True
    odd = channels > 3 and channels % 3 == 0 and channels % 4 != 0
    return odd and (not isinstance(outputs, int) or outputs % 4 == 0 or group > 1)


def _with_more_channels(graph: Graph, node: Node) -> list[Node]:
    """Give a convolution that WebGPU computes wrongly channels of zeros; returns the nodes that come before it."""
    shape = _weight(graph, node)
    if shape is None or not isinstance(shape[1], int) or _group(node) > 1 or not _is_wrong(shape, 1):
        return []
    op = op_for(graph, node)
    more = -shape[1] % 4
    around = op.ints([0] * (len(shape) + 1) + [more] + [0] * (len(shape) - 2))
    for position in (0, 1):
        node.input[position] = op.Pad(op.val(node.input[position]), around).name
    return op.nodes


def _weight(graph: Graph, node: Node) -> Shape | None:
    """The shape of a convolution's weight; None where the node is none, or it is unknown."""
    is_conv = node.op_type == "Conv" and is_standard(node.domain)
    return shape_of(graph.types.get(node.input[1])) if is_conv else None


def _group(node: Node) -> int:
    return next((a.i for a in node.attribute if a.name == "group"), 1)


def _wrong_convolution(graph: Graph, node: Node) -> str:
    """Why a convolution is refused; "" where it is not."""
    shape = _weight(graph, node)
    given = attributes_of(node)
    if shape is not None and _is_wrong(shape, _group(node)):
        return f"onnxruntime-web 1.30 computes a convolution of {shape[1]} channels a group wrongly on WebGPU"
    same = given.get("auto_pad", b"NOTSET").startswith(b"SAME")
    if node.op_type == "Conv" and same and max(given.get("strides") or (1,)) > 1:
        return "onnxruntime-web 1.30 pads a strided convolution with auto_pad wrongly on WebGPU"
    return ""


# -- what is refused ---------------------------------------------------------------------------------------------------


def _lacking(graph: Graph) -> Iterator[Refusal]:
    for node in graph.nodes:
        if not is_standard(node.domain):
            continue
        if node.op_type in ABSENT:
            yield Refusal(node.name, node.op_type, *ABSENT[node.op_type])
        elif node.op_type == "MaxPool" and any(node.output[1:]):
            yield Refusal(node.name, node.op_type, INDICES)
        elif node.op_type == "Split" and len(node.output) > WIDEST:
            why = f"it has {len(node.output)} outputs, and WebGPU has buffers for {WIDEST}"
            yield Refusal(node.name, node.op_type, why, "give it the sizes of its outputs as a constant")
        elif why := _wrong_convolution(graph, node):
            yield Refusal(
                node.name, node.op_type, why, "write its pads out, and its groups so that they have other channels"
            )
        elif node.op_type in AXES and any(node.input[1:2]) and graph.constant(node.input[1]) is None:
            hint = "fix the sizes that are not known by `dims` or `shapes`"
            yield Refusal(node.name, node.op_type, "OpenVINO wants axes that are constants", hint)
        elif any(dtype_of(graph.types.get(name)) == TensorProto.BFLOAT16 for name in node.output):
            yield Refusal(node.name, node.op_type, "JavaScript has no bfloat16", "convert the model to float32")
