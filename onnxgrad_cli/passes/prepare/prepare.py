"""Bring any model into the one form the other passes know.

Functions inlined, constants held as initializers, every node named, the opset raised where the backward graph
needs it (and only then), every value typed, on a model without its weights; then: what is trained.
"""

from __future__ import annotations

import onnx
import onnx.inliner

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.errors import Caution, OnnxgradError, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.nodes import FORWARD, ROLE, with_bodies
from onnxgrad_cli.ir.skeleton import adopt
from onnxgrad_cli.options import ModeOptions, PreparationOptions, ShapeOptions
from onnxgrad_cli.passes.parameters.outputs import resolve_outputs
from onnxgrad_cli.passes.parameters.select import select
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.passes.prepare.downgrade import downgrade, opset_limit
from onnxgrad_cli.passes.prepare.expand import expand, standard_functions
from onnxgrad_cli.passes.prepare.fixed_shapes import fix_shapes
from onnxgrad_cli.passes.prepare.fold import fold
from onnxgrad_cli.passes.prepare.mode import apply_mode
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET, raise_opset
from onnxgrad_cli.passes.prepare.sequences import unpack
from onnxgrad_cli.passes.prepare.subgraphs import choose_branches, settle_bodies
from onnxgrad_cli.record import ModeRecord, PreparationRecord

FIRST_WITH_CONSTANTS = 4
"""The IR version from which an initializer that is no input is a constant; before it, all had to be inputs too."""


def _run(graph: Graph, options: PreparationOptions, training: PreparationRecord) -> bool:
    if graph.proto.training_info:
        text = "the training information that the model had is left out: it is about the graph as it was"
        training.cautions.append(Caution("note", "training_info", text))
    admit(graph, options)
    bring(graph, options, training)
    training.inputs = [name for name in graph.input_names if name not in graph.initializers]
    training.predictions = resolve_outputs(graph, options)
    select(graph, options, training)
    return True


def admit(graph: Graph, options: ShapeOptions) -> None:
    """Refuse what is beyond us, fix the shapes that were asked for, and forget what an earlier build has said."""
    _refuse_unknown_opset(graph)
    fix_shapes(graph, options)
    _forget_roles(graph)
    if graph.proto.ir_version < FIRST_WITH_CONSTANTS:
        graph.unlist_initializers()
        graph.proto.ir_version = FIRST_WITH_CONSTANTS


def bring(graph: Graph, options: ModeOptions, training: ModeRecord) -> None:
    """Bring an admitted graph into the form that can be differentiated."""
    normalise(graph)
    settle(graph, training)
    if apply_mode(graph, options, training):
        infer_types(graph)


def settle(graph: Graph, training: Cautions) -> None:
    """Type a normalised graph, raise it to the opset its gradient needs, replace operators that have no rule.

    What is beyond the newest opset that onnxruntime loads and runs is then written at that one.
    """
    if graph.opset() is None:  # all of its operators are of other domains
        graph.proto.opset_import.add(domain="", version=OLDEST_OPSET)
    infer_and_fold(graph)
    while raise_opset(graph, training) or _replace(graph):
        normalise(graph)
        infer_and_fold(graph)
    limit = opset_limit(graph)
    if limit.opset < (graph.opset() or 0) and _write_out(graph, limit.opset):
        normalise(graph)
        infer_and_fold(graph)
    downgrade(graph, limit, training)


def _replace(graph: Graph) -> bool:
    """Replace nodes that have no rule or need not stand, those of bodies too; whether there were any."""
    return (
        expand(graph)
        or unpack(graph)
        or choose_branches(graph)
        or settle_bodies(graph, _settle_body)
        or _inline_standard(graph)
    )


def _write_out(graph: Graph, opset: int) -> bool:
    """Replace nodes newer than an opset by their definitions, those of bodies too; whether there were any."""

    def write_out(body: Graph) -> None:
        if expand(body, newer_than=opset):
            infer_and_fold(body)

    changed = expand(graph, newer_than=opset)
    return settle_bodies(graph, write_out) or changed


def _settle_body(body: Graph) -> None:
    infer_and_fold(body)
    while _replace(body):
        infer_and_fold(body)


def infer_and_fold(graph: Graph) -> None:
    """Type every value; each shape that turns out to be constant may give others theirs."""
    infer_types(graph)
    while fold(graph):
        infer_types(graph)


def _refuse_unknown_opset(graph: Graph) -> None:
    opset = graph.opset()
    if opset is None and any(is_standard(node.domain) for node in graph.nodes):
        raise OnnxgradError("the model imports no opset of the default domain", "it is not a valid ONNX model")
    if (opset or 0) > onnx.defs.onnx_opset_version():
        raise UnsupportedError(
            f"the model is at opset {opset}; the newest that is known here is {onnx.defs.onnx_opset_version()}",
            hint="export the model at an older opset",
        )


def _inline_standard(graph: Graph) -> bool:
    """Write out the operators that only the function body of the standard can differentiate; whether there are any."""
    chosen = standard_functions(graph)
    if not chosen:
        return False
    bare = graph.skeleton()
    known = {value.name for value in (*bare.graph.value_info, *bare.graph.input, *bare.graph.output)}
    named = ((name, value_type) for name, value_type in graph.types.items() if name not in known)
    bare.graph.value_info.extend(onnx.helper.make_value_info(*pair) for pair in named)
    adopt(graph, onnx.inliner.inline_selected_functions(bare, chosen, inline_schema_functions=True))
    return True


def _forget_roles(graph: Graph) -> None:
    """A training model can be built on again: what an earlier build said of its nodes is no longer so.

    Nor is what the model says of its training, which is about the graph as it was.
    """
    graph.proto.ClearField("training_info")
    for node in with_bodies(graph.nodes):
        for entry in [p for p in node.metadata_props if p.key in (ROLE, FORWARD)]:
            node.metadata_props.remove(entry)


PREPARE = Pass("prepare", "functions inlined, opset raised where needed, values typed, weights chosen", _run)
