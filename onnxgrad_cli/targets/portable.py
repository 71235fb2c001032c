"""The target `portable`: operators that the JavaScript runtimes (wasm and WebGPU) and OpenVINO all support.

The unsupported operators were found by running models on each runtime. docs/runtimes.md lists them in a table.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.targets.standard import op_for

FORMS = {
    ("MaxPool", "gradient"): "compared",  # WebGPU has no Indices, OpenVINO no MaxUnpool
    ("LSTM", "gates"): "recomputed",  # uses the LSTM operator, which all runtimes have, instead of a Scan
}
"""Map from (operator, name of a gradient with several forms) to the form that all these runtimes support."""


def portable_form(op: Op, name: str, default: str) -> str | None:
    """Return the form of a gradient that all these runtimes have kernels for, or None for the default form.

    The form "convolution" of a weight gradient is a convolution with the samples as channels. OpenVINO does not support
    an unknown number of groups, and WebGPU returns wrong results for some numbers of channels. The form "gathered" of a
    sum of rows is not used, because it has not been tested on these runtimes.
    """
    if default == "gathered":
        return "sorted" if name == "row sums" else "flat"
    if name == "steps":
        return "unrolled"
    if name == "weight gradient" and default == "convolution":
        return "channels"
    return FORMS.get((op.node.op_type, name)) if op.node is not None else None


STEPS = "set the number of steps to 256 or fewer with `dims` or `shapes`, so that the loop is unrolled"
INDICES = "its output Indices is not supported by onnxruntime-web on WebGPU"

ABSENT = {
    "Scan": ("OpenVINO does not support a Scan that reads values from outside its body", STEPS),
    "Loop": (
        "OpenVINO does not support a Loop that reads values from outside its body",
        "unroll the loop in the model",
    ),
    "If": (
        "OpenVINO does not support an If that reads values from outside its branches",
        "make the decision before the export, so that the model has no If",
    ),
    "MaxUnpool": ("OpenVINO does not support MaxUnpool", ""),
}
"""Map from a refused operator to a pair: the reason, and a hint."""

AXES = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
                  "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"})  # fmt: skip
"""Operators whose axes must be constants for OpenVINO."""


def fit(graph: Graph) -> None:
    """Replace nodes that a runtime computes wrongly, and refuse nodes that a runtime does not support.

    Raises:
        UnsupportedError: a node is not supported; the refusals list each node with the runtime.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        if not _computed(graph, node):
            nodes += _narrowed(graph, node) or [*_with_more_channels(graph, node), node]
    graph.set_nodes(nodes)
    faults = ((node, *_fault(graph, node)) for node in graph.nodes if is_standard(node.domain))
    found = [Refusal(node.name, node.op_type, why, hint) for node, why, hint in faults if why]
    if found:
        raise UnsupportedError(
            f"{len(found)} of {len(graph.nodes)} nodes are not supported by all runtimes of `target='portable'`:",
            found,
            "; ".join(dict.fromkeys(refusal.hint for refusal in found if refusal.hint)) or "use `target='standard'`",
        )


# -- double precision on WebGPU ----------------------------------------------------------------------------------------


PLAIN = frozenset({"Add", "Cast", "Div", "Mul", "Neg", "Reciprocal", "Sqrt", "Sub"})
"""Arithmetic operators with which exporters write constants as computations from other constants."""


def _computed(graph: Graph, node: Node) -> bool:
    """Compute a node now if it reads only constants and some are float64. Store its outputs as constants.

    With WebGPU, onnxruntime-web has few float64 kernels. It does not open a model with the Sqrt that PyTorch's exporter
    writes for the scale of attention: "Provider type for Sqrt node ... is not set".

    Returns:
        True if the node was computed and must be removed.
    """
    values = {name: graph.constant(name) for name in node.input}
    arrays = {name: array for name, array in values.items() if array is not None}
    if node.op_type not in PLAIN or not is_standard(node.domain) or len(arrays) < len(values):
        return False
    if not any(dtype_of(graph.types.get(name)) == TensorProto.DOUBLE for name in (*node.input, *node.output)):
        return False
    from onnx.reference import ReferenceEvaluator  # imported here, as the import takes longer than a small build

    for name, array in zip(node.output, ReferenceEvaluator(as_message(node)).run(None, arrays), strict=True):
        graph.add_initializer(name, array)
    return True


# -- buffers on WebGPU -------------------------------------------------------------------------------------------------

WIDEST = 7
"""Largest number of parts of a Concat or Split. WebGPU guarantees eight buffers: the parts and the whole tensor."""


def _narrowed(graph: Graph, node: Node) -> list[Node]:
    """Return several nodes that replace a Concat or Split with more than `WIDEST` parts; [] for other nodes."""
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
    """Split `x` into parts of the given sizes, with nested Splits of at most `WIDEST` outputs."""
    if len(sizes) <= WIDEST:
        return list(op.split(x, sizes, axis))
    each = -(-len(sizes) // WIDEST)
    groups = [sizes[i : i + each] for i in range(0, len(sizes), each)]
    parts = op.split(x, [sum(group) for group in groups], axis)
    return [piece for part, group in zip(parts, groups, strict=True) for piece in _cut(op, part, group, axis)]


# -- convolutions on WebGPU --------------------------------------------------------------------------------------------


def _is_wrong(shape: Shape, group: int) -> bool:
    """Return True if onnxruntime-web 1.30 may compute a convolution with this weight shape wrongly on WebGPU.

    The result is wrong if two conditions hold. First, the number of input channels per group is a multiple of three,
    above three and not a multiple of four. Second, the number of output channels is a multiple of four. A condition on
    an unknown size is assumed to hold. The second one is also assumed to hold if there are several groups. Source:
    microsoft/onnxruntime issue 29651, and docs/runtimes.md.
    """
    outputs, channels = shape[:2]
    if not isinstance(channels, int):
        return True
    odd = channels > 3 and channels % 3 == 0 and channels % 4 != 0
    return odd and (not isinstance(outputs, int) or outputs % 4 == 0 or group > 1)


def _with_more_channels(graph: Graph, node: Node) -> list[Node]:
    """Add channels of zeros to a convolution that WebGPU would otherwise compute wrongly.

    Returns:
        The nodes to insert before the convolution; [] if it needs no padding.
    """
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
    """Return the shape of a convolution's weight, or None if it is unknown or the node is not a convolution."""
    is_conv = node.op_type == "Conv" and is_standard(node.domain)
    return shape_of(graph.types.get(node.input[1])) if is_conv else None


def _group(node: Node) -> int:
    return next((a.i for a in node.attribute if a.name == "group"), 1)


def _wrong_convolution(graph: Graph, node: Node) -> str:
    """Return the reason why a convolution is refused, or "" if it is supported."""
    shape = _weight(graph, node)
    given = attributes_of(node)
    if shape is not None and _is_wrong(shape, _group(node)):
        return f"onnxruntime-web 1.30 computes a convolution with {shape[1]} channels per group wrongly on WebGPU"
    same = given.get("auto_pad", b"NOTSET").startswith(b"SAME")
    if node.op_type == "Conv" and same and max(given.get("strides") or (1,)) > 1:
        return "onnxruntime-web 1.30 pads a strided convolution with auto_pad wrongly on WebGPU"
    return ""


# -- refused nodes -----------------------------------------------------------------------------------------------------


def _fault(graph: Graph, node: Node) -> tuple[str, str]:
    """Return the reason why a node is refused, and a hint; both are "" if all runtimes support it."""
    if node.op_type in ABSENT:
        return ABSENT[node.op_type]
    if node.op_type == "MaxPool" and any(node.output[1:]):
        return INDICES, ""
    if node.op_type == "Split" and len(node.output) > WIDEST:
        why = f"it has {len(node.output)} outputs, but WebGPU supports at most {WIDEST}"
        return why, "make the sizes of its outputs a constant"
    if why := _wrong_convolution(graph, node):
        return why, "replace auto_pad by explicit pads, and use groups with another number of channels"
    if node.op_type in AXES and any(node.input[1:2]) and graph.constant(node.input[1]) is None:
        hint = "set the unknown sizes with `dims` or `shapes`"
        return "OpenVINO requires axes that are constants", hint
    if any(dtype_of(graph.types.get(name)) == TensorProto.BFLOAT16 for name in node.output):
        return "JavaScript does not support bfloat16", "convert the model to float32"
    return "", ""
