"""The target that is several runtimes: those of JavaScript, by wasm and WebGPU, and OpenVINO; what all of them have.

What each lacks was found by running; docs/runtimes.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto, TensorProto, helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import dtype_of, shape_of

FORMS = {
    ("MaxPool", "gradient"): "compared",  # WebGPU has no Indices, OpenVINO no MaxUnpool
    ("LSTM", "gates"): "recomputed",  # the operator itself is in all of them, in the place of a Scan
}
"""The form that suits these runtimes, by the operator and the name of the gradient that has several."""


def portable_form(op: Op, name: str) -> str | None:
    """The form of a gradient that all runtimes have kernels for; None where all forms are such."""
    if name == "steps":
        return "unrolled"
    if op.node is None:
        return None
    return _weight_form(op, op.node) if name == "weight gradient" else FORMS.get((op.node.op_type, name))


def _weight_form(op: Op, node: NodeProto) -> str | None:
    """Of groups, no convolution with as many groups as there are samples: OpenVINO has none of an unknown number."""
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    shape = shape_of(op.graph.types.get(node.input[1])) or ()
    shifted = shape[1:2] == (1,) and max(given.get("strides") or (1,)) == 1
    return "channels" if given.get("group", 1) > 1 and not shifted else None


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


def check_portable(graph: Graph) -> None:
    """Refuse a training model with something that one of the runtimes has not.

    Raises:
        UnsupportedError: it has; each node is listed with the runtime.
    """
    found = list(_lacking(graph))
    if found:
        raise UnsupportedError(
            f"{len(found)} of {len(graph.nodes)} nodes are none that every runtime of `target='portable'` has:",
            found,
            "; ".join(dict.fromkeys(refusal.hint for refusal in found if refusal.hint))
            or "build it for any runtime, with `target='standard'`",
        )


def _lacking(graph: Graph) -> Iterator[Refusal]:
    for node in graph.nodes:
        if not is_standard(node.domain):
            continue
        if node.op_type in ABSENT:
            yield Refusal(node.name, node.op_type, *ABSENT[node.op_type])
        elif node.op_type == "MaxPool" and any(node.output[1:]):
            yield Refusal(node.name, node.op_type, INDICES)
        elif node.op_type in AXES and any(node.input[1:2]) and graph.constant(node.input[1]) is None:
            hint = "fix the sizes that are not known by `dims` or `shapes`"
            yield Refusal(node.name, node.op_type, "OpenVINO wants axes that are constants", hint)
        elif any(dtype_of(graph.types.get(name)) == TensorProto.BFLOAT16 for name in node.output):
            yield Refusal(node.name, node.op_type, "JavaScript has no bfloat16", "convert the model to float32")
