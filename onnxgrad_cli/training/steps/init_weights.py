"""Random initial weights, drawn into the buffers that the first step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.session import open_session
from onnxgrad_cli.ir.modules import known_as
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.standard.initialization import KEEP, initialization, initializer
from onnxgrad_cli.training.steps.base import TrainerBase


def init_weights(
    trainer: TrainerBase, built: TrainingModel, original: ModelProto, how: str, seed: int, reset: Sequence[str] = ()
) -> None:
    """Draw initial weights, each by the part it plays, and set running statistics to 0 and 1.

    Args:
        trainer: takes its first step from these weights.
        built: the training model that the trainer runs.
        original: the inference model that `built` was made of.
        how: 'xavier', 'he' or 'normal'; 'keep' draws nothing.
        seed: the same one draws the same weights.
        reset: with 'keep', glob patterns of weights that are drawn nevertheless, as 'xavier'.

    Raises:
        UsageError: adapters are trained, which add to weights that were found before; or a pattern names no weight.
    """
    if how == KEEP:
        _reset(trainer, built, original, seed, reset)
        return
    if built.training.adapters:
        raise UsageError(
            f"`init={how!r}` does not go with `lora`, whose adapters add to weights as they are",
            "leave one of them out",
        )
    _write(trainer, initialization(built.graph, original.graph, built.training, how, seed))


def _reset(
    trainer: TrainerBase, built: TrainingModel, original: ModelProto, seed: int, patterns: Sequence[str]
) -> None:
    """Draw the trained weights that patterns name."""
    if not patterns:
        return
    trained = list(built.training.trained)
    names = matching(patterns, trained, "`reset`", "trained weights", known_as(built.graph.nodes, trained))
    values = initialization(built.graph, original.graph, built.training, "xavier", seed)
    missing = [name for name in names if name not in values]
    if missing:
        raise UsageError(f"`reset`: nothing is known of how '{missing[0]}' is to begin", "leave it out")
    _write(trainer, {name: values[name] for name in names})


def _write(trainer: TrainerBase, values: Mapping[str, Val]) -> None:
    session = open_session(initializer(values, {name: name for name in values}))
    binding = session.io_binding()
    for name in values:
        binding.bind_ortvalue_output(name, trainer.buffers[name].value)
    session.run_with_iobinding(binding)
