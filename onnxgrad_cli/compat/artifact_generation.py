"""`generate_artifacts` with the interface of onnxruntime.training.artifacts. Any runtime can run the written models."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.compat.artifacts import (
    TRAINING,
    check_places,
    make_artifacts,
    stage_artifacts,
)
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.files import AtomicWriteGroup, ModelSource, make_folder, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.losses import parse_loss
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.checks.size_promises import settle_sizes


class LossType(Enum):
    """The losses of onnxruntime.training.artifacts."""

    MSELoss = 0
    CrossEntropyLoss = 1
    BCEWithLogitsLoss = 2
    L1Loss = 3


class OptimType(Enum):
    """The optimizers of onnxruntime.training.artifacts."""

    AdamW = 0
    SGD = 1


LOSSES = {
    LossType.MSELoss: ("mse", "target"),
    LossType.CrossEntropyLoss: ("cross-entropy", "labels"),
    LossType.BCEWithLogitsLoss: ("bce-logits", "target"),
    LossType.L1Loss: ("mae", "target"),
}
"""Loss -> (its name in onnxgrad, the name that onnxruntime.training.artifacts gives its label)."""

OPTIMIZERS: dict[OptimType, tuple[str, dict[str, object]]] = {
    OptimType.AdamW: ("adamw", {"eps": 1e-6, "weight_decay": 0.0}),
    OptimType.SGD: ("sgd", {}),
}
"""Optimizer -> (its name in onnxgrad, the options that are its defaults in onnxruntime.training.artifacts)."""


@attribute_failures
def generate_artifacts(
    model: ModelSource,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | str | Sequence[str] | None = None,
    optimizer: OptimType | str | None = None,
    artifact_directory: str | Path | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | Path | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    force: bool = False,
    **options: Any,
) -> list[Path]:
    """Write the training model, evaluation model, optimizer model and checkpoint for an inference model.

    Differences from onnxruntime.training.artifacts, called ORT below, are noted.

    Args:
        model: a file, the bytes of a file, or a model, which is not changed.
        requires_grad: the weights to train. None trains all that `onnxgrad build` trains, except the frozen ones. (In
            ORT, None trains nothing.)
        frozen_params: weights that are not trained but are inputs, with a value in the checkpoint. Other weights that
            are not trained stay constants in the models.
        loss: a LossType; a loss as on the command line, "NAME[:OUTPUT[:LABEL[:WEIGHT]]]" or FILE.onnx, or several such
            losses. With None the first output is the loss.
        optimizer: an OptimType, with the default options of ORT, or a name as on the command line, with those of
            onnxgrad. None writes no optimizer model.
        artifact_directory: the folder of the files, by default the working directory; it is created if it is missing.
        prefix: the first part of the file names.
        ort_format: must be False; the ORT format is not supported.
        custom_op_library: must be None; custom operators are not supported.
        additional_output_names: outputs of the model that are also outputs of the training and evaluation models.
        nominal_checkpoint: write a checkpoint with names, shapes and types only, without values.
        loss_input_names: the output on which the loss is computed; by default the first float output.
        force: replace files that onnxgrad did not write.
        **options: more fields of `Options`: `optimizer_options`, `loss_options`, `dims`, ... The mode is 'train' by
            default, as it always is in ORT.

    Returns:
        The files written, the training model first.

    Raises:
        UsageError: a name is unknown, or an argument has a value that onnxgrad does not support.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: a file can't be read or written, or onnxruntime refuses a model.
    """
    if ort_format:
        hint = "make .ort files of them with python -m onnxruntime.tools.convert_onnx_models_to_ort"
        raise UsageError("ort_format: the models are written only as ONNX", hint)
    if custom_op_library is not None:
        hint = "write the rule as in docs/adding-an-operator.md"
        raise UsageError("custom_op_library: an operator of another library needs a gradient rule in onnxgrad", hint)
    if loss_input_names is not None:
        if len(loss_input_names) != 1:
            hint = 'pass several losses: ["mse:OUTPUT:LABEL", ...]'
            raise UsageError("loss_input_names: a loss is computed on one output", hint)
        options.setdefault("output", loss_input_names[0])
    losses, label = _losses(loss)
    name, settings = OPTIMIZERS[optimizer] if isinstance(optimizer, OptimType) else (optimizer or "", {})
    chosen = Options(
        **{
            "mode": "train",
            "label": label,
            "keep_outputs": bool(additional_output_names),
            **options,
            "losses": losses,
            "train": tuple(requires_grad or ()),
            "freeze": tuple(frozen_params or ()),
            "optimizer": name,
            "optimizer_options": {**settings, **options.get("optimizer_options", {})},
        }
    )
    proto, path = own_model(model)
    graph = Graph(proto, path)
    settle_sizes(graph, chosen)
    original = copied(proto)
    folder = Path(artifact_directory or ".")
    make_folder(folder, "artifact_directory")
    built = TrainingModel(graph, chosen, frozen_are_inputs=True)
    built.run()
    made = make_artifacts(built, original, additional_output_names or ())
    check_places(made, folder, prefix, path, force)
    with AtomicWriteGroup(folder / f"{prefix}{TRAINING}", bound=True) as switch:
        written = stage_artifacts(switch, made, built, original, folder, prefix, nominal_checkpoint)
        switch.commit()
    return written


def _losses(loss: LossType | str | Sequence[str] | None) -> tuple[tuple[LossSpec, ...], str]:
    """Return the losses. Also return the name of the label that losses get if they don't name one."""
    if loss is None:
        return (LossSpec("identity"),), "label"
    if isinstance(loss, LossType):
        name, label = LOSSES[loss]
        return (LossSpec(name),), label
    if isinstance(loss, str):
        return (parse_loss(loss),), "label"
    if isinstance(loss, Sequence) and all(isinstance(each, str) for each in loss):
        return tuple(parse_loss(each) for each in loss), "label"
    hint = "pass a LossType, a name, or the loss as an .onnx file"
    raise UsageError(f"loss: a {type(loss).__name__} is not a loss", hint)
