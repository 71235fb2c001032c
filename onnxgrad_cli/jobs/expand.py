"""Expand a model with training information or Gradient nodes into models of standard operators.

Gradient nodes and the optimizers of ai.onnx.preview.training are replaced by standard operators, so that any runtime
can run the models. Each training information (ONNX TrainingInfoProto) of the model becomes two further models: one
computes a step and one the initial values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import Refusal, UnsupportedError, missing_value
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.observation import fed_types
from onnxgrad_cli.files import STREAM, AtomicWriteGroup, ModelSource, check_target, own_model, save_model, stage_model
from onnxgrad_cli.ir.dialects import repair
from onnxgrad_cli.ir.domains import PREVIEW
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import INITIALIZERS_ALONE
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.jobs.output_plan import target_of
from onnxgrad_cli.metadata import write_tensors
from onnxgrad_cli.passes.declare_outputs import forget_domain
from onnxgrad_cli.passes.parameters.changed import read_record
from onnxgrad_cli.passes.prepare.expand_definitions import expand
from onnxgrad_cli.passes.prepare.infer_and_lower import infer_and_fold, infer_and_lower
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET
from onnxgrad_cli.passes.prepare.upgrade import upgrade
from onnxgrad_cli.record import Training
from onnxgrad_cli.standard.gradient_operator import expand_gradients
from onnxgrad_cli.standard.training_info import check_training_info, inference_model, initial_model, step_model
from onnxgrad_cli.verification.written_file import check_opens


@dataclass(frozen=True)
class Piece:
    """One of the models that were written.

    Attributes:
        path: the file; "-" is stdout.
        kind: 'model', 'step' or 'initialization'.
        index: the index of the training information that the model comes from; None for the inference model.
        inputs: the inputs that must be fed.
        outputs: the outputs.
        bindings: initializer -> the output whose value replaces it.
    """

    path: str
    kind: str
    index: int | None
    inputs: list[str]
    outputs: list[str]
    bindings: dict[str, str]


@attribute_failures
@job
def run_expand(
    model: ModelSource,
    out: str | Path | None = None,
    *,
    keep_outputs: bool = False,
    force: bool = False,
    tell: Tell = silent,
) -> list[Piece]:
    """Write a model in standard operators, without its training information, and the training as models beside it.

    Args:
        model: the model; '-' is stdin.
        out: the file for the inference model; '-' is stdout. By default `<model>.expanded.onnx`, or stdout if the model
            comes from stdin. Steps and initializations are written to `<out>.step0.onnx`, `<out>.init0.onnx` and so on.
        keep_outputs: the models of training steps also have all outputs of the inference graph.
        force: replace files that onnxgrad did not write.
        tell: receives progress messages.

    Returns:
        The models written: the inference model first, then the step and the initialization of each training
        information.

    Raises:
        UsageError: an existing file would be replaced, or several models would be written to stdout.
        UnsupportedError: a node can't be expanded.
        OnnxgradError: the model can't be read or breaks the standard, or a file can't be written.
        CheckFailed: onnxruntime opens the original model but not a model to be written.
    """
    proto, path = own_model(model)
    target = target_of(model, out, "expanded")
    check_training_info(proto, path)
    if target is None and proto.training_info:
        raise missing_value(
            "the model becomes several models, which can't all be written to stdout", "name a file with -o"
        )
    if not proto.training_info and not _nodes(proto):
        tell("there is nothing to expand in the model", 0)
    found = list(_pieces(proto, target, keep_outputs))
    for piece, _ in found:
        if piece.path != STREAM:
            check_target(Path(piece.path), proto, path, force)
    tell("replacing operators by standard ones", 1)
    expanded = [expand_operators(each, path) for _, each in found]
    if target is None:
        save_model(expanded[0], STREAM)
    else:
        tell("writing the model, and opening the written file", 1)
        with AtomicWriteGroup(target) as switch:
            for (piece, _), each in zip(found, expanded, strict=True):
                stage_model(switch, each, Path(piece.path), path, check=check_opens(each, proto, path))
            switch.commit()
    return [piece for piece, _ in found]


def _pieces(model: ModelProto, target: Path | None, keep_outputs: bool) -> list[tuple[Piece, ModelProto]]:
    """Split a model with training information into models without it. Return each with a description.

    These are the inference model, and for each training information the step and the initialization, if it has them.
    """

    def piece(each: ModelProto, kind: str, index: int | None, bindings: Sequence[object]) -> tuple[Piece, ModelProto]:
        name = STREAM if target is None else str(target)
        if target is not None and index is not None:
            name = str(target.with_name(f"{target.stem}.{kind[:4]}{index}.onnx"))
        made = [value.name for value in each.graph.output]
        replaced = {pair.key: pair.value for pair in bindings}  # type: ignore[attr-defined]
        return Piece(name, kind, index, list(fed_types(each)), made, replaced), each

    found = [piece(inference_model(model), "model", None, [])]
    for index, info in enumerate(model.training_info):
        if info.algorithm.output or info.update_binding:  # without these it only describes the initialization
            found.append(piece(step_model(model, index, keep_outputs), "step", index, info.update_binding))
        initial = initial_model(model, index)
        if initial is not None:
            found.append(piece(initial, "initialization", index, info.initialization_binding))
    return found


def expand_operators(model: ModelProto, path: Path | None = None) -> ModelProto:
    """Replace every operator of ai.onnx.preview.training by standard operators.

    Args:
        model: the model, which is changed in place. Its opset is raised if that is necessary.
        path: the file that the model was read from; external data are relative to it.

    Raises:
        UnsupportedError: some nodes can't be replaced. The error lists all of them.
    """
    repair(model)
    before, expands = Graph(model), bool(_nodes(model))
    read_record(before)
    model = expand_gradients(model, path)
    graph = Graph(model, path)
    if _nodes(model):
        model.ir_version = max(model.ir_version, INITIALIZERS_ALONE)
    if any(node.domain == PREVIEW for node in graph.nodes):
        if graph.opset() is None:
            model.opset_import.add(domain="", version=OLDEST_OPSET)
        infer_and_fold(graph)
        if (graph.opset() or 0) < OLDEST_OPSET:
            normalise(graph)
            infer_and_fold(graph)
            upgrade(graph, OLDEST_OPSET)
            infer_and_fold(graph)
        expand(graph, PREVIEW)
    if _nodes(graph.commit()):  # in bodies or functions, or after nodes whose types depend on these
        normalise(graph)
        infer_and_lower(graph, Training())
    left = [node for node in with_bodies(graph.nodes) if node.domain == PREVIEW]
    if left:
        why = "the definition of the operator does not cover this case"
        refusals = [Refusal(n.name or n.output[0], n.op_type, graph.unexpanded.get(n.name, why)) for n in left]
        raise UnsupportedError(f"{len(left)} nodes can't be replaced by standard operators:", refusals)
    forget_domain(graph, PREVIEW)
    model = graph.commit()
    if expands:
        graph.provenance, graph.computed = before.provenance, before.computed
        write_tensors(model, graph)
    return model


def _nodes(model: ModelProto) -> list[str]:
    """Return the operators of ai.onnx.preview.training in a model, including those in bodies and functions."""
    every = [model.graph.node, *(function.node for function in model.functions)]
    return [node.op_type for nodes in every for node in with_bodies(nodes) if node.domain == PREVIEW]
