"""The four files of onnxruntime.training.artifacts: training, evaluation and optimizer model, and checkpoint.

The three models contain no weights. Weights are inputs, and only the checkpoint has their values. A program in any
language reads the checkpoint once, and then feeds the outputs of each run to the next run. `generate_artifacts` has the
interface of onnxruntime.training.artifacts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli import metadata
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.checkpoints.tensors import is_safetensors, save_tensors, tensor_bytes
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.errors import UsageError, missing_file, suggest, unknown_name, wrong_value
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.session import CPU, take_out
from onnxgrad_cli.files import (
    AtomicWriteGroup,
    ModelSource,
    check_structure,
    check_target,
    load_model,
    make_folder,
    own_model,
    resolve_output,
    stage_model,
)
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.losses.spec import as_losses
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.split import Halves, narrowed, split
from onnxgrad_cli.training.evaluation import make_eval_model
from onnxgrad_cli.training.run.folder import load_checkpoint
from onnxgrad_cli.training.steps.base import TrainerBase
from onnxgrad_cli.training.steps.split_trainer import SplitTrainer
from onnxgrad_cli.verification.checks.size_promises import settle_sizes
from onnxgrad_cli.verification.written_file import check_opens

TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT = (
    "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint",
)  # fmt: skip


@dataclass(frozen=True)
class Artifacts:
    """The content of the four files: three models, and the values of the checkpoint.

    Attributes:
        training: computes the loss, the gradients and the next running statistics from inputs, labels and weights.
        evaluation: computes the loss and the outputs from the same inputs, in inference mode.
        optimizer: computes the next weights and slots (the optimizer's state) from gradients, weights, slots and the
            learning rate; None if there is no optimizer.
        values: name of a weight, frozen parameter or state -> its value.
        roles: the roles of the inputs of all three models. Frozen parameters have the role 'constant'.
    """

    training: ModelProto
    evaluation: ModelProto
    optimizer: ModelProto | None
    values: dict[str, np.ndarray]
    roles: Roles


def make_artifacts(built: TrainingModel, original: ModelProto, outputs: Collection[str] = ()) -> Artifacts:
    """Split a training model into the contents of the four files.

    Args:
        built: the training model with its values; not changed.
        original: the inference model that it was built from.
        outputs: outputs of the inference model that are also outputs of the training and evaluation models.

    Raises:
        UsageError: the model has no such output.
    """
    own = [value.name for value in original.graph.output]
    for name in outputs:
        if name not in own:
            raise unknown_name(f"the model has no output '{name}'", suggest(name, own, "outputs"))
    path, frozen = built.graph.path, built.frozen
    training, optimizer = copied(built.model), None
    if built.options.optimizer:
        halves = split(built.model)
        training, optimizer = halves.gradient, halves.optimizer
    roles = metadata.describe(training)
    needed = {value.name for value in optimizer.graph.input} if optimizer else set()
    kept = [n for n, role in roles.outputs.items() if role.role != "kept output" or n in needed or n in outputs]
    training = _with_inputs(narrowed(training, kept), frozen)
    roles = metadata.describe(training)
    stored = _stored(roles)
    evaluation = make_eval_model(original, built.options, [*stored, *frozen], path, outputs).model
    steps = metadata.read(optimizer) if optimizer else None
    training, values = take_out(training, stored, path)
    evaluation, more = take_out(evaluation, _stored(metadata.read(evaluation)), path)
    values |= more
    if optimizer is not None and steps is not None:
        optimizer, more = take_out(optimizer, _stored(steps), path)
        values |= more
    inputs = {**dict.fromkeys(frozen, "constant"), **roles.inputs}
    if steps:
        inputs |= {name: role for name, role in steps.inputs.items() if role != "gradient"}
        roles = replace(roles, slots={**roles.slots, **steps.slots})
        values |= steps.begun(values)
    return Artifacts(training, evaluation, optimizer, values, replace(roles, inputs=inputs))


def _stored(roles: Roles) -> list[str]:
    """Return the inputs that have a stored value, such as weights and state."""
    return [name for name, role in roles.inputs.items() if role in metadata.STORED]


def _with_inputs(model: ModelProto, names: Collection[str]) -> ModelProto:
    """Declare the initializers in `names` as inputs with the role 'constant', in place, and return the model."""
    roles = metadata.describe(model)
    declared = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name in names and tensor.name not in declared:
            value_type = tensor_type(tensor.data_type, list(tensor.dims))
            model.graph.input.append(helper.make_value_info(tensor.name, value_type))
            roles.inputs[tensor.name] = "constant"
    metadata.write(model, roles)
    return model


def _places(made: Artifacts, folder: Path, prefix: str) -> dict[Path, ModelProto]:
    """Return file -> the model to write to it, the training model first."""
    models = {TRAINING: made.training, EVALUATION: made.evaluation, OPTIMIZER: made.optimizer}
    return {folder / f"{prefix}{name}": model for name, model in models.items() if model is not None}


def stage_artifacts(
    switch: AtomicWriteGroup, made: Artifacts, built: TrainingModel, original: ModelProto, folder: Path,
    prefix: str = "", nominal: bool = False,
) -> list[Path]:  # fmt: skip
    """Write the four files as one group, after checking that the models are valid and that onnxruntime opens them.

    Models for the target ort-cuda are not opened, because this machine may lack the device. A model that onnxruntime
    can't open is accepted if it can't open the original either, for example because it lacks bfloat16 kernels on the
    processor.

    Args:
        switch: the group that replaces the files together, with the training model as its main file.
        made: the artifacts.
        built: the training model from which they were made; external data are relative to its file.
        original: the inference model.
        folder: the folder of the files; it must exist.
        prefix: the first part of the file names.
        nominal: write a checkpoint with names, shapes and types only, without values.

    Returns:
        The files written, the training model first.

    Raises:
        OnnxgradError: a model breaks the ONNX specification, or a file can't be written.
        CheckFailed: onnxruntime refuses a model, though it opens the original.
    """
    path, written = built.graph.path, []
    for file, model in _places(made, folder, prefix).items():
        check_structure(model, f"the output '{file.name}'")
        elsewhere = built.options.target == "ort-cuda"
        check = None if elsewhere else check_opens(model, original, path, f"the output '{file.name}'")
        written += stage_model(switch, model, file, path, check=check)
    checkpoint, said = folder / f"{prefix}{CHECKPOINT}", _said(made.values, made.roles, 0, nominal)
    data = tensor_bytes({} if nominal else made.values, {"progress": said})
    switch.stage(checkpoint, lambda file: file.write(data), durable=True)
    return [*dict.fromkeys(written), checkpoint]


def save_checkpoint(path: str | Path, trainer: TrainerBase, *, force: bool = False) -> None:
    """Write the weights and state of a trainer to a checkpoint, which `onnxgrad export` and `open_artifacts` read.

    Args:
        path: the file. An existing file in safetensors format is replaced.
        trainer: the trainer.
        force: replace an existing file of any format.

    Raises:
        UsageError: another file exists at this path.
        OnnxgradError: it can't be written.
    """
    path = resolve_output(checks.path("path", path))
    checks.of_type("trainer", trainer, TrainerBase, "a trainer")
    if path.is_file() and not force and not is_safetensors(path):
        hint = "name another file, or replace it with `force=True`"
        raise UsageError(f"'{path}' is not a checkpoint", hint, code="file_exists")
    values = {name: buffer.read() for name, buffer in trainer.buffers.items()}
    save_tensors(path, values, {"progress": _said(values, trainer.roles, trainer.steps)})


def _said(values: Mapping[str, np.ndarray], roles: Roles, steps: int, nominal: bool = False) -> dict[str, Any]:
    """Return the metadata of a checkpoint, in the same form as in the checkpoints of `onnxgrad train`.

    The metadata list the names of the values by role. If `nominal`, they also give the types and shapes of the values.
    """

    def named(role: str) -> list[str]:
        return [name for name in values if roles.inputs.get(name) == role]

    said: dict[str, Any] = {
        "writer": f"onnxgrad {tool_version()}",  # first, where `is_ours` looks for it
        "steps": steps,
        "adapters": [asdict(adapter) for adapter in roles.adapters],
        "averages": roles.averages,
        "quantized": asdict(roles.quantized),
        "weights": named("weight"),
        "frozen": named("constant"),
        "state": named("state"),
    }
    if nominal:
        said["nominal"] = {name: [str(array.dtype), list(array.shape)] for name, array in values.items()}
    return said


def open_artifacts(
    folder: str | Path, prefix: str = "", *, checkpoint: str | Path | None = None, provider: str = CPU,
    threads: int | None = None, seed: int = 0,
) -> SplitTrainer:  # fmt: skip
    """Open the four files in a folder, and return a trainer that runs them.

    `provider`, `threads` and `seed` are as in `Trainer`.

    Args:
        folder: the folder of the files.
        prefix: the first part of the file names.
        checkpoint: the checkpoint to read, by default the one in the folder.

    Raises:
        UsageError: the checkpoint is from another model.
        OnnxgradError: there is no optimizer model, a file can't be read, or the checkpoint is a nominal one.
    """
    folder = checks.path("folder", folder)
    path, optimizer, own = (folder / f"{prefix}{name}" for name in (TRAINING, OPTIMIZER, CHECKPOINT))
    if not optimizer.exists():
        raise missing_file(f"there is no '{optimizer}'", "make the artifacts with an optimizer")
    halves = Halves(load_model(path)[0], load_model(optimizer)[0])
    values, said = load_checkpoint(Path(checkpoint) if checkpoint else own)
    trainer = SplitTrainer(halves, values, path=path, provider=provider, threads=threads, seed=seed)
    trainer.steps = said["steps"]
    return trainer


def with_stored(model: ModelProto, path: Path) -> ModelProto:
    """Return a training model with the values of the checkpoint beside it. Return any other model unchanged.

    Args:
        model: the model.
        path: its file. A training model of `generate_artifacts` is recognized by its name and by missing values.

    Raises:
        OnnxgradError: the checkpoint can't be read, or is a nominal one.
    """
    checkpoint = path.with_name(path.name.replace(TRAINING, CHECKPOINT))
    stored = {tensor.name for tensor in model.graph.initializer}
    lacking = [n for n, role in metadata.read(model).inputs.items() if role in metadata.STORED and n not in stored]
    if not lacking or checkpoint == path or not checkpoint.exists():
        return model
    values = load_checkpoint(checkpoint)[0]
    copy = copied(model)
    copy.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in lacking if name in values)
    return copy


# -- the interface of onnxruntime.training.artifacts ------------------------------------------------------------------


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
"""Loss -> (its name in onnxgrad, the name of its label input in onnxruntime.training.artifacts)."""

OPTIMIZERS: dict[OptimType, tuple[str, dict[str, object]]] = {
    OptimType.AdamW: ("adamw", {"eps": 1e-6, "weight_decay": 0.0}),
    OptimType.SGD: ("sgd", {}),
}
"""Optimizer -> (its name in onnxgrad, its default options in onnxruntime.training.artifacts)."""


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
        requires_grad: the weights to train. None trains the weights that `onnxgrad build` trains, except the frozen
            ones. (In ORT, None trains nothing.)
        frozen_params: weights that are not trained but are inputs, with a value in the checkpoint. Other weights that
            are not trained stay constants in the models.
        loss: a LossType; a loss as on the command line, "NAME[:OUTPUT[:LABEL[:WEIGHT]]]" or FILE.onnx, or several such
            losses. With None the first output is the loss.
        optimizer: an OptimType, with ORT's default options, or a name as on the command line, with onnxgrad's default
            options. None writes no optimizer model.
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
        raise wrong_value("`ort_format=True`: the models are written only as ONNX", hint)
    if custom_op_library is not None:
        hint = "write the rule as in docs/adding-an-operator.md"
        raise wrong_value("`custom_op_library`: an operator of another library needs a rule in onnxgrad", hint)
    if loss_input_names is not None:
        if len(loss_input_names) != 1:
            hint = 'pass several losses: ["mse:OUTPUT:LABEL", ...]'
            raise wrong_value("`loss_input_names`: a loss is computed on one output", hint)
        options.setdefault("output", loss_input_names[0])
    loss = "identity" if loss is None else loss
    losses, label = LOSSES[loss] if isinstance(loss, LossType) else (loss, "label")
    name, settings = OPTIMIZERS[optimizer] if isinstance(optimizer, OptimType) else (optimizer or "", {})
    chosen = Options(
        **{
            "mode": "train",
            "label": label,
            "keep_outputs": bool(additional_output_names),
            **options,
            "losses": as_losses(losses),
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
    for file in (*_places(made, folder, prefix), folder / f"{prefix}{CHECKPOINT}"):
        check_target(file, None, path, force)
    with AtomicWriteGroup(folder / f"{prefix}{TRAINING}", bound=True) as switch:
        written = stage_artifacts(switch, made, built, original, folder, prefix, nominal_checkpoint)
        switch.commit()
    return written
