"""Bring any model into the one form the other passes know.

Functions inlined, constants held as initializers, every node named, the opset raised where the backward graph
needs it (and only then), every value typed, on a model without its weights; then: what is trained.
"""

from __future__ import annotations

from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.options import ModeOptions, PreparationOptions
from onnxgrad_cli.passes.parameters.outputs import resolve_outputs
from onnxgrad_cli.passes.parameters.select import select
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.passes.prepare.admit import admit
from onnxgrad_cli.passes.prepare.mode import apply_mode
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.settle import settle
from onnxgrad_cli.record import ModeRecord, PreparationRecord


def _run(graph: Graph, options: PreparationOptions, training: PreparationRecord) -> bool:
    if graph.proto.training_info:
        text = "the training information that the model had is left out: it is about the graph as it was"
        training.cautions.append(Caution("note", "training_info", text))
    admit(graph, options)
    make_differentiable(graph, options, training)
    training.inputs = [name for name in graph.input_names if name not in graph.initializers]
    training.predictions = resolve_outputs(graph, options)
    select(graph, options, training)
    return True


def make_differentiable(graph: Graph, options: ModeOptions, training: ModeRecord) -> None:
    """Bring an admitted graph into the form that can be differentiated."""
    normalise(graph)
    settle(graph, training)
    if apply_mode(graph, options, training):
        infer_types(graph)


PREPARE = Pass("prepare", "functions inlined, opset raised where needed, values typed, weights chosen", _run)
