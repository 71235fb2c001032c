"""Check a model before its types are inferred, fix shapes, and remove the traces of earlier builds."""

from __future__ import annotations

import onnx
from onnx import AttributeProto

from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError
from onnxgrad_cli.ir.dialects import repair
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import INITIALIZERS_ALONE
from onnxgrad_cli.ir.node import FORWARD, ROLE, metadata, set_metadata
from onnxgrad_cli.ir.node_values import CONTROL_FLOW, with_bodies
from onnxgrad_cli.options import ShapeOptions
from onnxgrad_cli.passes.prepare.declarations import forget_placeholders
from onnxgrad_cli.passes.prepare.fixed_shapes import fix_shapes
from onnxgrad_cli.passes.prepare.free_batch import NOT_COMPARED, asked_batch, free_batch
from onnxgrad_cli.passes.prepare.opset import nodes_of

BLOCKED = "com.microsoft.nchwc"
"""The domain of operators on blocks of channels, which onnxruntime's optimizer writes at ORT_ENABLE_ALL."""

FLAGS = frozenset(
    "align_corners allowzero antialias ceil_mode center_point_box count_include_pad detect_negative detect_positive "
    "exclude_outside exclusive fmod input_forget inverse is_causal keepdims largest layout linear_before_reset "
    "new_axis noop_with_empty_axes onesided periodic reverse saturate select_last_index sorted storage_order "
    "training_mode transA transB upper zeros".split()
)
"""Attributes of standard operators that must be 0 or 1.

onnxruntime's kernels treat other values inconsistently: most as 1, but ReduceProd treats keepdims=3 as 0.
"""


def validate_input(graph: Graph, options: ShapeOptions) -> list[Caution]:
    """Refuse unsupported models, fix the requested shapes, and remove the traces of an earlier build.

    Returns:
        Cautions about repairs of the file, and about a fixed batch size that was made symbolic.

    Raises:
        UnsupportedError: the model has an unknown opset, was optimized for one kind of processor, has control flow of
            another domain, or has a flag that is neither 0 nor 1.
    """
    cautions = repair(graph.commit())
    graph.read_again()
    _refuse_unknown_opset(graph)
    _refuse_blocked(graph)
    _refuse_foreign_control_flow(graph)
    _refuse_odd_flags(graph)
    forget_placeholders(graph)
    batch = asked_batch(graph.proto, options) if options.shapes else None
    if batch is not None:
        cautions.append(free_batch(graph, batch, options.shapes).caution(NOT_COMPARED))
    fix_shapes(graph, options)
    _forget_roles(graph)
    if graph.proto.ir_version < INITIALIZERS_ALONE:
        graph.unlist_initializers()
        graph.proto.ir_version = INITIALIZERS_ALONE
    return cautions


def _refuse_unknown_opset(graph: Graph) -> None:
    owners = (graph.proto, *graph.proto.functions)
    opset = max((e.version for owner in owners for e in owner.opset_import if is_standard(e.domain)), default=0)
    if opset > onnx.defs.onnx_opset_version():
        raise UnsupportedError(
            f"the model has opset {opset}; the newest supported opset is {onnx.defs.onnx_opset_version()}",
            hint="export the model at an older opset",
        )


def _refuse_blocked(graph: Graph) -> None:
    """Refuse operators that onnxruntime's optimizer wrote for one kind of processor."""
    found = [node for node in with_bodies(graph.nodes) if node.domain == BLOCKED]
    if found:
        label = found[0].name or found[0].output[0]
        raise UnsupportedError(
            f"the model was optimized for a specific machine: {len(found)} of its {len(graph.nodes)} nodes "
            f"(the first is '{label}') compute in blocks of channels ({BLOCKED})",
            hint="start from the model before it was optimized, or save it with graph_optimization_level "
            "ORT_ENABLE_EXTENDED, which fuses nodes for any machine",
        )


def _refuse_foreign_control_flow(graph: Graph) -> None:
    """Refuse an If, Loop or Scan of another domain that isn't a function: its use of bodies is undefined."""
    own = {(function.domain, function.name) for function in graph.proto.functions}
    found = [
        Refusal(
            node.name or node.output[0],
            f"{node.domain}::{node.op_type}",
            "the operator is not standard, so the meaning of its subgraphs is unknown",
        )
        for node in with_bodies(graph.nodes)
        if node.op_type in CONTROL_FLOW and not is_standard(node.domain) and (node.domain, node.op_type) not in own
    ]
    if found:
        raise UnsupportedError(
            "If, Loop and Scan are supported only in the standard domain, which these nodes are not in:",
            found,
            "replace them by the standard's If, Loop or Scan",
        )


def _refuse_odd_flags(graph: Graph) -> None:
    odd = [
        Refusal(node.name or node.output[0], node.op_type, f"attribute {a.name}={a.i} is neither 0 nor 1")
        for node in with_bodies(nodes_of(graph))
        if is_standard(node.domain)
        for a in node.attribute
        if a.type == AttributeProto.INT and a.name in FLAGS and not a.ref_attr_name and a.i not in (0, 1)
    ]
    if odd:
        raise UnsupportedError("runtimes interpret these nodes differently:", odd, "set these attributes to 0 or 1")


def _forget_roles(graph: Graph) -> None:
    """Remove the node roles and the training information of an earlier build, which are about an older graph.

    A training model can be the input of another build.
    """
    graph.proto.ClearField("training_info")
    for node in with_bodies(graph.nodes):
        said = metadata(node)
        if ROLE in said or FORWARD in said:
            set_metadata(node, {key: text for key, text in said.items() if key not in (ROLE, FORWARD)})
