"""`generate_artifacts`, as onnxruntime.training.artifacts has it: the same words, for models that any runtime runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.compat.artifacts import (
    TRAINING,
    check_places,
    frozen_of,
    make_artifacts,
    stage_artifacts,
)
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, Switch, make_folder, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.losses import parse_loss
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.pipeline import Pass, PassRecord
from onnxgrad_cli.verification.sizes import settle_sizes

After = Callable[[Pass, Graph, PassRecord], None]


class LossType(Enum):
    """The losses that onnxruntime.training.artifacts names."""

    MSELoss = 0
    CrossEntropyLoss = 1
    BCEWithLogitsLoss = 2
    L1Loss = 3


class OptimType(Enum):
    """The optimizers that onnxruntime.training.artifacts names."""

    AdamW = 0
    SGD = 1


LOSSES = {
    LossType.MSELoss: ("mse", "target"),
    LossType.CrossEntropyLoss: ("cross-entropy", "labels"),
    LossType.BCEWithLogitsLoss: ("bce-logits", "target"),
    LossType.L1Loss: ("mae", "target"),
}
"""What they are called here, and what their label is called there."""

OPTIMIZERS: dict[OptimType, tuple[str, dict[str, object]]] = {
    OptimType.AdamW: ("adamw", {"eps": 1e-6, "weight_decay": 0.0}),
    OptimType.SGD: ("sgd", {}),
}
"""What they are called here, and the defaults they have there."""


@judged
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
    """Write training model, evaluation model, optimizer model and checkpoint of an inference model.

    Args:
        model: a file, the bytes of one, or a model, which is not changed.
        requires_grad: the weights to train; None is all that `onnxgrad build` trains, but those frozen. (There, None
            trained nothing.)
        frozen_params: weights that are inputs and lie in the checkpoint, but are not trained. What is neither trained
            nor frozen stays a constant in the models.
        loss: a LossType; a loss as on the command line, "NAME[:OUTPUT[:LABEL[:WEIGHT]]]" or FILE.onnx, or several;
            None: the first output is the loss.
        optimizer: an OptimType with the defaults it had there, or a name as on the command line with those it has
            here; None writes no optimizer model.
        artifact_directory: where they go, by default the working directory; it is made where it is missing.
        prefix: what the names of the files begin with.
        ort_format, custom_op_library: refused.
        additional_output_names: outputs of the model that training and evaluation model have besides the loss.
        nominal_checkpoint: let the checkpoint have names, shapes and types only.
        loss_input_names: the output that the loss judges; by default the first float output.
        force: replace files that onnxgrad did not write.
        **options: more fields of `Options`: `optimizer_options`, `loss_options`, `dims`, ... The mode is 'train'
            where it is not given: there it always was.

    Returns:
        The files written, the training model first.

    Raises:
        UsageError: a name is unknown, or something is asked for that is not to be had here.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: a file can't be read or written, or onnxruntime refuses what was made.
    """
    if ort_format:
        raise UsageError(
            "ort_format: the models are written as ONNX alone",
            "python -m onnxruntime.tools.convert_onnx_models_to_ort makes .ort files of them",
        )
    if custom_op_library is not None:
        raise UsageError(
            "custom_op_library: an operator of another library needs a gradient rule here",
            "see docs/adding-an-operator.md",
        )
    if loss_input_names is not None:
        if len(loss_input_names) != 1:
            raise UsageError(
                "loss_input_names: one output is judged by a loss", 'give several losses: ["mse:OUTPUT:LABEL", ...]'
            )
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
    built = TrainingModel(graph, chosen)
    built.run(after=opens_frozen(built))
    made = make_artifacts(built, original, additional_output_names or ())
    check_places(made, folder, prefix, path, force)
    with Switch(folder / f"{prefix}{TRAINING}", bound=True) as switch:
        written = stage_artifacts(switch, made, built, original, folder, prefix, nominal_checkpoint)
        switch.commit()
    return written


def _losses(loss: LossType | str | Sequence[str] | None) -> tuple[tuple[LossSpec, ...], str]:
    """The losses, and what the label is called where none says."""
    if loss is None:
        return (LossSpec("identity"),), "label"
    if isinstance(loss, LossType):
        name, label = LOSSES[loss]
        return (LossSpec(name),), label
    if isinstance(loss, str):
        return (parse_loss(loss),), "label"
    if isinstance(loss, Sequence) and all(isinstance(each, str) for each in loss):
        return tuple(parse_loss(each) for each in loss), "label"
    raise UsageError(
        f"loss: a {type(loss).__name__} is no loss", "give a LossType, a name, or the loss as an .onnx file"
    )


def opens_frozen(built: TrainingModel, after: After | None = None) -> After:
    """What to call after each pass, so that nothing is made of the values of frozen parameters, which are inputs."""

    def call(step: Pass, graph: Graph, record: PassRecord) -> None:
        if step.name == "prepare":
            graph.vary(frozen_of(built))
        if after:
            after(step, graph, record)

    return call
