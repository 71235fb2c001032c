"""The quartet that onnxruntime.training.artifacts has made known: training, evaluation and optimizer model, checkpoint.

The three models hold no weights: these are inputs, and their values lie in the checkpoint alone. Whoever runs the
models, in any language, reads it once and binds what comes out of a run to what goes into the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli import metadata
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.execution.session import CPU, take_out
from onnxgrad_cli.files import Switch, check_structure, check_target, followed, load_model, stage_model
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.passes.optimizer.split import Halves, narrowed, split
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.training.eval_model import make_eval_model
from onnxgrad_cli.training.run.folder import load_checkpoint
from onnxgrad_cli.training.run.progress import is_nominal
from onnxgrad_cli.training.run.tensors import is_safetensors, load_words, save_tensors, tensor_bytes
from onnxgrad_cli.training.steps.base import TrainerBase
from onnxgrad_cli.training.steps.split import SplitTrainer
from onnxgrad_cli.verification.written import check_opens

TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT = (
    "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint",
)  # fmt: skip


@dataclass(frozen=True)
class Artifacts:
    """The quartet in memory.

    Attributes:
        training: from inputs, labels and weights to loss, gradients and next running statistics.
        evaluation: from the same to the loss and the outputs, in inference mode.
        optimizer: from gradients, weights, slots and the learning rate to the next weights and slots; None if there
            is no optimizer.
        values: weights, frozen parameters and state, by name.
        roles: of the inputs of all three models; frozen parameters are 'constant'.
    """

    training: ModelProto
    evaluation: ModelProto
    optimizer: ModelProto | None
    values: dict[str, np.ndarray]
    roles: Roles


def frozen_of(built: TrainingModel) -> list[str]:
    """The weights that are frozen by name: parameters that are not trained."""
    return matching(built.options.freeze, list(built.training.not_trained), "`freeze`", "float weights")


def make_artifacts(built: TrainingModel, original: ModelProto, outputs: Collection[str] = ()) -> Artifacts:
    """Take a training model apart.

    Args:
        built: the training model, its values included; not changed.
        original: the inference model it was made from.
        outputs: outputs of that model that training and evaluation model are to have besides the loss.

    Raises:
        UsageError: the model has no such output.
    """
    own = [value.name for value in original.graph.output]
    for name in outputs:
        if name not in own:
            raise UsageError(f"the model has no output '{name}'", suggest(name, own, "outputs"))
    whole, path, frozen = built.model, built.graph.path, frozen_of(built)
    optimizer = None
    training = copied(whole)
    if built.options.optimizer:
        halves = split(whole)
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
    """The inputs that have a value of their own."""
    return [name for name, role in roles.inputs.items() if role in metadata.STORED]


def _with_inputs(model: ModelProto, names: Collection[str]) -> ModelProto:
    """The model, with some of its initializers as inputs."""
    roles = metadata.describe(model)
    declared = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name in names and tensor.name not in declared:
            value_type = tensor_type(tensor.data_type, list(tensor.dims))
            model.graph.input.append(helper.make_value_info(tensor.name, value_type))
            roles.inputs[tensor.name] = "constant"
    metadata.write(model, roles)
    return model


def check_places(
    made: Artifacts, folder: Path, prefix: str = "", source: Path | None = None, force: bool = False
) -> None:
    """Make sure that the quartet may be written.

    Raises:
        UsageError: a file would be replaced that must not be.
        OnnxgradError: one can't be written.
    """
    for file in (*_places(made, folder, prefix), folder / f"{prefix}{CHECKPOINT}"):
        check_target(file, None, source, force)


def _places(made: Artifacts, folder: Path, prefix: str) -> dict[Path, ModelProto]:
    """Where the models go, the training model first."""
    models = {TRAINING: made.training, EVALUATION: made.evaluation, OPTIMIZER: made.optimizer}
    return {folder / f"{prefix}{name}": model for name, model in models.items() if model is not None}


def stage_artifacts(
    switch: Switch, made: Artifacts, built: TrainingModel, original: ModelProto, folder: Path, prefix: str = "",
    nominal: bool = False,
) -> list[Path]:  # fmt: skip
    """Write the quartet, whose files take their names together, if its models are valid and onnxruntime opens them.

    What onnxruntime has no kernels for in the original either (bfloat16 on the processor), or what is written for
    another device, is for a runtime elsewhere.

    Args:
        switch: lets the files take their names; its head is the training model, to which the others are bound.
        made: the artifacts.
        built: what they were made of; external data are relative to the file of its model.
        original: the inference model.
        folder: where they go; it must be there.
        prefix: what their names begin with.
        nominal: let the checkpoint have names, shapes and types only.

    Returns:
        The files written, the training model first.

    Raises:
        OnnxgradError: a model breaks the ONNX specification, or a file can't be written.
        CheckFailed: onnxruntime refuses a model, though it opens the original.
    """
    path, written = built.graph.path, []
    for file, model in _places(made, folder, prefix).items():
        check_structure(model, f"what would be '{file.name}'")
        elsewhere = built.options.target == "ort-cuda"
        check = None if elsewhere else check_opens(model, original, path, f"what would be '{file.name}'")
        written += stage_model(switch, model, file, path, check=check)
    checkpoint, said = folder / f"{prefix}{CHECKPOINT}", _said(made.values, made.roles, 0, nominal)
    data = tensor_bytes({} if nominal else made.values, {"progress": said})
    switch.stage(checkpoint, lambda file: file.write(data), durable=True)
    return [*dict.fromkeys(written), checkpoint]


def save_checkpoint(path: str | Path, trainer: TrainerBase, *, force: bool = False) -> None:
    """Write the weights and state of a trainer to a checkpoint: `onnxgrad export` and `open_artifacts` read it.

    Args:
        path: the file; tensors in safetensors' form that are there are replaced.
        trainer: the trainer.
        force: replace any file.

    Raises:
        UsageError: there is another file.
        OnnxgradError: it can't be written.
    """
    path = followed(checks.path("path", path))
    checks.of_type("trainer", trainer, TrainerBase, "a trainer")
    if path.is_file() and not force and not is_safetensors(path):
        raise UsageError(f"'{path}' is no checkpoint", "name another file, or replace it with `force=True`")
    values = {name: buffer.read() for name, buffer in trainer.buffers.items()}
    save_tensors(path, values, {"progress": _said(values, trainer.roles, trainer.steps)})


def _said(values: Mapping[str, np.ndarray], roles: Roles, steps: int, nominal: bool = False) -> dict[str, Any]:
    """What a checkpoint says, in the form of a run's: roles by name, and if `nominal` the values' types and shapes."""

    def named(role: str) -> list[str]:
        return [name for name in values if roles.inputs.get(name) == role]

    said: dict[str, Any] = {
        "writer": f"onnxgrad {metadata.tool_version()}",  # first, where `is_ours` looks for it
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
    """A trainer on the quartet in a folder.

    Args:
        folder, prefix: where it is.
        checkpoint: another one than the one beside the models.
        provider, threads, seed: see `Trainer`.

    Raises:
        UsageError: there is no optimizer model, or the checkpoint is of another model.
        OnnxgradError: a file can't be read, or the checkpoint is a nominal one.
    """
    folder = checks.path("folder", folder)
    path = folder / f"{prefix}{TRAINING}"
    if not (folder / f"{prefix}{OPTIMIZER}").exists():
        raise UsageError(f"there is no '{folder / f'{prefix}{OPTIMIZER}'}'", "make the artifacts with an optimizer")
    halves = Halves(load_model(path)[0], load_model(folder / f"{prefix}{OPTIMIZER}")[0])
    values, said = load_checkpoint(Path(checkpoint) if checkpoint else folder / f"{prefix}{CHECKPOINT}")
    trainer = SplitTrainer(halves, values, path=path, provider=provider, threads=threads, seed=seed)
    trainer.steps = said["steps"]
    return trainer


def with_stored(model: ModelProto, path: Path) -> ModelProto:
    """A training model of a quartet with the values of the checkpoint beside it; another model as it is.

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


def nominal(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The types and shapes in a nominal checkpoint, by name.

    Raises:
        OnnxgradError: it is none, or can't be read.
    """
    said = load_words(path).get("progress", {})
    if not isinstance(said, dict) or not is_nominal(said.get("nominal")):
        raise OnnxgradError(f"'{path}' is no nominal checkpoint", "it was written without nominal_checkpoint")
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in said["nominal"].items()}
