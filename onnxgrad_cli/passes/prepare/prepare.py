"""Convert any model to the one form that the other passes expect, and choose the weights to train.

Functions are inlined, constants become initializers, every node gets a name, and every value gets a type. The opset is
raised only if the backward part needs that. All this works without reading the weights.
"""

from __future__ import annotations

from onnx import TensorProto

from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.kernels import loads
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import dtype_of
from onnxgrad_cli.options import FormOptions, PreparationOptions
from onnxgrad_cli.passes.parameters.changed import read_record, refuse_changed
from onnxgrad_cli.passes.parameters.constants import settings
from onnxgrad_cli.passes.parameters.patterns import resolve_outputs
from onnxgrad_cli.passes.parameters.select import select
from onnxgrad_cli.passes.parameters.sharing import tie, untie
from onnxgrad_cli.passes.prepare.fake_quantizers import put_dequantizers, put_fake_quantizers, round_biases
from onnxgrad_cli.passes.prepare.infer_and_lower import infer_and_lower
from onnxgrad_cli.passes.prepare.lsq import learn_scales
from onnxgrad_cli.passes.prepare.mode import set_mode, write_batch_statistics
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET, opset_of_losses, raise_opset
from onnxgrad_cli.passes.prepare.quantized_operators import FIRST_BY_AXIS, is_known_quantized, write_out_quantized
from onnxgrad_cli.passes.prepare.validate_input import validate_input
from onnxgrad_cli.record import ModeRecord, PreparationRecord


def prepare(graph: Graph, options: PreparationOptions, training: PreparationRecord) -> None:
    """Inline functions, raise the opset if needed, infer types, and choose the weights to train."""
    if graph.proto.training_info:
        text = "the training information in the model was removed, because it describes the original graph"
        training.cautions.append(Caution("note", "training_info", text))
    read_record(graph)
    training.cautions += validate_input(graph, options)
    graph.settings = settings(graph)
    if options.straight_through:
        _write_out_quantized(graph, training)
    changed = _bring_into_form(graph, options, training, opset_of_losses(options))
    stored_as = put_dequantizers(graph) if options.quantization == "ste" else {}
    lora = options.lora is not None  # adapters do not change stored values
    biases = put_fake_quantizers(graph, training, stored_as) if options.straight_through and not lora else {}
    if options.quantization == "lsq":
        learn_scales(graph, training)
    if options.untie:
        untie(graph, options.untie)
    if options.tie:
        tie(graph, options.tie, training)
    training.inputs = [name for name in graph.input_names if name not in graph.initializers]
    training.predictions = resolve_outputs(graph, options)
    is_open = any(spec.function for spec in options.losses)  # it may read any output, or evaluate the model again
    training.ends = list(graph.output_names) if is_open else training.predictions
    select(graph, options, training)
    if training.trained or training.adaptable:
        refuse_changed(graph)
    _write_out(graph, options, training, changed)
    if biases:
        round_biases(graph, training, biases)


def _write_out_quantized(graph: Graph, training: PreparationRecord) -> None:
    """Replace operators on integers by float operators. If the opset is too old for these, upgrade the model first."""
    if (graph.opset() or FIRST_BY_AXIS) < FIRST_BY_AXIS and any(map(is_known_quantized, graph.nodes)):
        normalise(graph)
        raise_opset(graph, training)
    write_out_quantized(graph)


def make_differentiable(graph: Graph, options: FormOptions, training: ModeRecord) -> None:
    """Bring a validated graph into a form that can be differentiated."""
    _write_out(graph, options, training, _bring_into_form(graph, options, training, OLDEST_OPSET))


def _bring_into_form(graph: Graph, options: FormOptions, training: ModeRecord, opset: int) -> bool:
    """Bring a validated graph into the form in which weights are chosen. Return True if its types are outdated."""
    graph.runs_bfloat16 = _has_bfloat16(graph) and loads(graph.skeleton())
    normalise(graph)
    infer_and_lower(graph, training, opset, options.infer_by_run)
    changed = set_mode(graph, options, training)
    _declare_outputs(graph)
    return changed


def _write_out(graph: Graph, options: FormOptions, training: ModeRecord, changed: bool) -> None:
    """Expand batch statistics. Weights must be chosen before, because the new nodes read them differently."""
    if write_batch_statistics(graph, options, training) or changed:
        infer_types(graph)


def _has_bfloat16(graph: Graph) -> bool:
    """Return True if a declared value, an initializer, or the result of a Cast is bfloat16."""
    values = (*graph.proto.graph.input, *graph.proto.graph.output, *graph.proto.graph.value_info)
    kinds = {*map(dtype_of, (value.type for value in values)), *(t.data_type for t in graph.initializers.values())}
    casts = (a.i for node in graph.nodes if node.op_type == "Cast" for a in node.attribute if a.name == "to")
    return TensorProto.BFLOAT16 in kinds.union(casts)


def _declare_outputs(graph: Graph) -> None:
    """Declare the types of outputs that the file leaves open. onnxruntime infers them too when it loads the model."""
    for value in graph.proto.graph.output:
        kind = value.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not value.type.tensor_type.HasField("shape")):
            value.type.CopyFrom(graph.types.get(value.name, value.type))
