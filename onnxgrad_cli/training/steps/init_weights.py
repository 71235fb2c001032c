"""Random initial weights, drawn into the buffers that the first step reads."""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.session import open_session
from onnxgrad_cli.standard.initialization import KEEP, initialization, initializer
from onnxgrad_cli.training.steps.base import TrainerBase


def init_weights(trainer: TrainerBase, built: TrainingModel, original: ModelProto, how: str, seed: int) -> None:
    """Draw initial weights, each by the part it plays, and set running statistics to 0 and 1.

    Args:
        trainer: takes its first step from these weights.
        built: the training model that the trainer runs.
        original: the inference model that `built` was made of.
        how: 'xavier', 'he' or 'normal'; 'keep' draws nothing.
        seed: the same one draws the same weights.

    Raises:
        UsageError: adapters are trained, which add to weights that were found before.
    """
    if how == KEEP:
        return
    if built.training.adapters:
        raise UsageError(
            f"`init={how!r}` does not go with `lora`, whose adapters add to weights as they are",
            "leave one of them out",
        )
    values = initialization(built.graph, original.graph, built.training, how, seed)
    session = open_session(initializer(values, {name: name for name in values}))
    binding = session.io_binding()
    for name in values:
        binding.bind_ortvalue_output(name, trainer.buffers[name].value)
    session.run_with_iobinding(binding)
