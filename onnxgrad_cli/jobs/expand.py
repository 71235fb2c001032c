"""From a model that says how it is trained to plain models that any runtime runs.

Gradient nodes and the optimizers of ai.onnx.preview.training are written out in standard operators, and each of the
standard's training information becomes a model of one step and one of the initialization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.autodiff.definitions.preview import PREVIEW
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, Refusal, UnsupportedError, UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import STREAM, ModelSource, Switch, check_target, own_model, save_model, stage_model
from onnxgrad_cli.files.reading import not_text
from onnxgrad_cli.ir.dialects import mend
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.metadata import write_tensors
from onnxgrad_cli.passes.outputs import forget_domain
from onnxgrad_cli.passes.parameters.changed import read_record
from onnxgrad_cli.passes.prepare.admit import FIRST_WITH_CONSTANTS
from onnxgrad_cli.passes.prepare.expand import expand
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET
from onnxgrad_cli.passes.prepare.settle import infer_and_fold, settle
from onnxgrad_cli.passes.prepare.upgrade import upgrade
from onnxgrad_cli.record import Training
from onnxgrad_cli.standard.gradient_operator import expand_gradients
from onnxgrad_cli.standard.training_info import check_training_info, inference_model, initial_model, step_model
from onnxgrad_cli.verification.written import check_opens


@dataclass(frozen=True)
class Piece:
    """One model that was written.

    Attributes:
        path: the file; "-" is stdout.
        kind: 'model', 'step' or 'initialization'.
        index: which of the training information it is; None for the model.
        inputs: what must be fed.
        outputs: what comes out.
        bindings: initializer -> the output that replaces it.
    """

    path: str
    kind: str
    index: int | None
    inputs: list[str]
    outputs: list[str]
    bindings: dict[str, str]


@judged
def run_expand(
    model: ModelSource,
    out: str | Path | None = None,
    *,
    keep_outputs: bool = False,
    force: bool = False,
    tell: Tell = silent,
) -> list[Piece]:
    """Write the model in a file without its training information and in standard operators, and its training beside it.

    Args:
        model: the model; '-' is stdin.
        out: the inference model; '-' is stdout; by default `<model>.expanded.onnx`, and stdout for stdin. Steps and
            initializations go to `<out>.step0.onnx`, `<out>.init0.onnx` and so on.
        keep_outputs: let steps have all outputs of the inference graph too.
        force: replace files that onnxgrad did not write.
        tell: takes what is narrated.

    Returns:
        What was written, the model first, then the step and the initialization of each training information.

    Raises:
        UsageError: a file would be replaced that must not be, or several models would go to stdout.
        UnsupportedError: a node can't be expanded.
        OnnxgradError: the model can't be read or breaks the standard, or a file can't be written.
        CheckFailed: onnxruntime does not open what would be written, and opens the model.
    """
    proto, path = own_model(model)
    if fault := not_text(proto):
        raise OnnxgradError(f"the model is no valid ONNX model: {fault}", "export it again")
    target = target_of(model, out, "expanded")
    check_training_info(proto, path)
    if target is None and proto.training_info:
        raise UsageError("the model becomes several, which can't all go to stdout", "name a file with -o")
    if not proto.training_info and not _nodes(proto):
        tell("there is nothing to expand in the model", 0)
    found = list(_pieces(proto, target, keep_outputs))
    for piece, _ in found:
        if piece.path != STREAM:
            check_target(Path(piece.path), proto, path, force)
    tell("writing operators out", 1)
    expanded = [expand_operators(each, path) for _, each in found]
    if target is None:
        save_model(expanded[0], STREAM)
    else:
        tell("writing the model, and opening what was written", 1)
        with Switch(target) as switch:
            for (piece, _), each in zip(found, expanded, strict=True):
                stage_model(switch, each, Path(piece.path), path, check=check_opens(each, proto, path))
            switch.commit()
    return [piece for piece, _ in found]


def _pieces(model: ModelProto, target: Path | None, keep_outputs: bool) -> list[tuple[Piece, ModelProto]]:
    """The plain models in a model with training information, each with its file: the model, steps, initializations."""

    def piece(each: ModelProto, kind: str, index: int | None, bindings: Sequence[object]) -> tuple[Piece, ModelProto]:
        name = STREAM if target is None else str(target)
        if target is not None and index is not None:
            name = str(target.with_name(f"{target.stem}.{kind[:4]}{index}.onnx"))
        stored = {tensor.name for tensor in each.graph.initializer}
        fed = [value.name for value in each.graph.input if value.name not in stored]
        made = [value.name for value in each.graph.output]
        return Piece(name, kind, index, fed, made, {pair.key: pair.value for pair in bindings}), each  # type: ignore[attr-defined]

    found = [piece(inference_model(model), "model", None, [])]
    for index, info in enumerate(model.training_info):
        if info.algorithm.output or info.update_binding:  # else it says no more than how training begins
            found.append(piece(step_model(model, index, keep_outputs), "step", index, info.update_binding))
        initial = initial_model(model, index)
        if initial is not None:
            found.append(piece(initial, "initialization", index, info.initialization_binding))
    return found


def expand_operators(model: ModelProto, path: Path | None = None) -> ModelProto:
    """Write out every operator of ai.onnx.preview.training in standard operators.

    Args:
        model: the model, which is changed in place: its opset is raised where that needs it.
        path: where it was read from; external data are relative to it.

    Raises:
        UnsupportedError: a node can't be written out; all are listed.
    """
    mend(model)
    before, expands = Graph(model), bool(_nodes(model))
    read_record(before)
    model = expand_gradients(model, path)
    graph = Graph(model, path)
    if _nodes(model):
        model.ir_version = max(model.ir_version, FIRST_WITH_CONSTANTS)
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
    if _nodes(graph.commit()):  # in bodies or functions, or behind what only these let infer
        normalise(graph)
        settle(graph, Training())
    left = [node for node in with_bodies(graph.nodes) if node.domain == PREVIEW]
    if left:
        why = "its definition does not cover it"
        refusals = [Refusal(n.name or n.output[0], n.op_type, graph.unexpanded.get(n.name, why)) for n in left]
        raise UnsupportedError(f"{len(left)} nodes can't be written out in standard operators:", refusals)
    forget_domain(graph, PREVIEW)
    model = graph.commit()
    if expands:
        graph.provenance, graph.computed = before.provenance, before.computed
        write_tensors(model, graph)
    return model


def _nodes(model: ModelProto) -> list[str]:
    """The operators of ai.onnx.preview.training that a model has, in bodies and functions too."""
    every = [model.graph.node, *(function.node for function in model.functions)]
    return [node.op_type for nodes in every for node in with_bodies(nodes) if node.domain == PREVIEW]
