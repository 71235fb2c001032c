"""What is done to a model before anything is known of its values: refusals, fixed shapes, marks of earlier builds."""

from __future__ import annotations

import onnx

from onnxgrad_cli.errors import OnnxgradError, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import FORWARD, ROLE, with_bodies
from onnxgrad_cli.options import ShapeOptions
from onnxgrad_cli.passes.prepare.fixed_shapes import fix_shapes

FIRST_WITH_CONSTANTS = 4
"""The IR version from which an initializer that is no input is a constant; before it, all had to be inputs too."""


def admit(graph: Graph, options: ShapeOptions) -> None:
    """Refuse what is beyond us, fix the shapes that were asked for, and forget what an earlier build has said."""
    _refuse_unknown_opset(graph)
    fix_shapes(graph, options)
    _forget_roles(graph)
    if graph.proto.ir_version < FIRST_WITH_CONSTANTS:
        graph.unlist_initializers()
        graph.proto.ir_version = FIRST_WITH_CONSTANTS


def _refuse_unknown_opset(graph: Graph) -> None:
    opset = graph.opset()
    if opset is None and any(is_standard(node.domain) for node in graph.nodes):
        raise OnnxgradError("the model imports no opset of the default domain", "it is not a valid ONNX model")
    if (opset or 0) > onnx.defs.onnx_opset_version():
        raise UnsupportedError(
            f"the model is at opset {opset}; the newest that is known here is {onnx.defs.onnx_opset_version()}",
            hint="export the model at an older opset",
        )


def _forget_roles(graph: Graph) -> None:
    """A training model can be built on again: what an earlier build said of its nodes is no longer so.

    Nor is what the model says of its training, which is about the graph as it was.
    """
    graph.proto.ClearField("training_info")
    for node in with_bodies(graph.nodes):
        for entry in [p for p in node.metadata_props if p.key in (ROLE, FORWARD)]:
            node.metadata_props.remove(entry)
