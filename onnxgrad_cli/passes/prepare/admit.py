"""What is done to a model before anything is known of its values: refusals, fixed shapes, marks of earlier builds."""

from __future__ import annotations

import onnx
from onnx import AttributeProto

from onnxgrad_cli.errors import Caution, OnnxgradError, Refusal, UnsupportedError
from onnxgrad_cli.ir.dialects import mend, unknown_operators
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, ROLE, metadata, set_metadata
from onnxgrad_cli.ir.nodes import CONTROL_FLOW, with_bodies
from onnxgrad_cli.options import ShapeOptions
from onnxgrad_cli.passes.prepare.declarations import forget_placeholders
from onnxgrad_cli.passes.prepare.fixed_shapes import fix_shapes
from onnxgrad_cli.passes.prepare.free_batch import NOT_COMPARED, asked_batch, free_batch

BLOCKED = "com.microsoft.nchwc"
"""The domain of the operators on blocks of channels that onnxruntime writes at ORT_ENABLE_ALL."""

FIRST_WITH_CONSTANTS = 4
"""The IR version from which an initializer that is no input is a constant; before it, all had to be inputs too."""

FLAGS = frozenset(
    "align_corners allowzero antialias ceil_mode center_point_box count_include_pad detect_negative detect_positive "
    "exclude_outside exclusive fmod input_forget inverse is_causal keepdims largest layout linear_before_reset "
    "new_axis noop_with_empty_axes onesided periodic reverse saturate select_last_index sorted storage_order "
    "training_mode transA transB upper zeros".split()
)
"""Attributes of the standard's operators that are 0 or 1.

Of another number the kernels of onnxruntime disagree: to some it is 1, but keepdims=3 of ReduceProd is 0.
"""


def admit(graph: Graph, options: ShapeOptions) -> list[Caution]:
    """Refuse what is beyond us, fix the shapes that were asked for, and forget what an earlier build has said.

    Returns:
        What was mended of the file's form.

    Raises:
        UnsupportedError: it is of a newer opset than is known, was optimized for one machine, has control flow that is
            not the standard's, or a node with a flag that is neither 0 nor 1.
        OnnxgradError: it has operators of domains that it does not import, or that its opset has not.
    """
    cautions = mend(graph.commit())
    graph.read_again()
    _refuse_unknown_opset(graph)
    unknown = unknown_operators(graph.proto)  # of a file it is known that there are none
    if unknown:
        raise OnnxgradError(f"the model is no valid ONNX model: {unknown}", "export it again")
    _refuse_blocked(graph)
    _refuse_foreign_control_flow(graph)
    _refuse_odd_flags(graph)
    forget_placeholders(graph)
    batch = asked_batch(graph.proto, options)
    if batch is not None:
        cautions.append(free_batch(graph, batch, options.shapes).caution(NOT_COMPARED))
    fix_shapes(graph, options)
    _forget_roles(graph)
    if graph.proto.ir_version < FIRST_WITH_CONSTANTS:
        graph.unlist_initializers()
        graph.proto.ir_version = FIRST_WITH_CONSTANTS
    return cautions


def _refuse_unknown_opset(graph: Graph) -> None:
    opset = graph.opset()
    if opset is None and any(is_standard(node.domain) for node in graph.nodes):
        raise OnnxgradError("the model imports no opset of the default domain", "it is not a valid ONNX model")
    if (opset or 0) > onnx.defs.onnx_opset_version():
        raise UnsupportedError(
            f"the model is at opset {opset}; the newest that is known here is {onnx.defs.onnx_opset_version()}",
            hint="export the model at an older opset",
        )


def _refuse_blocked(graph: Graph) -> None:
    """Refuse what onnxruntime's optimizer has written for the registers of one kind of processor."""
    found = [node for node in with_bodies(graph.nodes) if node.domain == BLOCKED]
    if found:
        label = found[0].name or found[0].output[0]
        raise UnsupportedError(
            f"the model was optimized for one machine: {len(found)} of its {len(graph.nodes)} nodes, "
            f"'{label}' the first, compute in blocks of channels ({BLOCKED})",
            hint="start from the model before it was optimized, or save it with graph_optimization_level "
            "ORT_ENABLE_EXTENDED, which fuses nodes for any machine",
        )


def _refuse_foreign_control_flow(graph: Graph) -> None:
    """Refuse an If, Loop or Scan of somebody's own that is no function: what its bodies are for only the name says."""
    own = {(function.domain, function.name) for function in graph.proto.functions}
    found = [
        Refusal(node.name or node.output[0], f"{node.domain}::{node.op_type}", "nobody knows how its bodies run")
        for node in with_bodies(graph.nodes)
        if node.op_type in CONTROL_FLOW and not is_standard(node.domain) and (node.domain, node.op_type) not in own
    ]
    if found:
        raise UnsupportedError("control flow is that of the standard alone:", found, "put the standard's in its place")


def _refuse_odd_flags(graph: Graph) -> None:
    nodes = with_bodies([*graph.nodes, *(node for function in graph.proto.functions for node in function.node)])
    odd = [
        Refusal(node.name or node.output[0], node.op_type, f"attribute {a.name}={a.i} is neither 0 nor 1")
        for node in nodes
        if is_standard(node.domain)
        for a in node.attribute
        if a.type == AttributeProto.INT and a.name in FLAGS and not a.ref_attr_name and a.i not in (0, 1)
    ]
    if odd:
        raise UnsupportedError("runtimes disagree about what the model says:", odd, "set these to 0 or 1")


def _forget_roles(graph: Graph) -> None:
    """A training model can be built on again: what an earlier build said of its nodes is no longer so.

    Nor is what the model says of its training, which is about the graph as it was.
    """
    graph.proto.ClearField("training_info")
    for node in with_bodies(graph.nodes):
        said = metadata(node)
        if ROLE in said or FORWARD in said:
            set_metadata(node, {key: text for key, text in said.items() if key not in (ROLE, FORWARD)})
