"""All that a run of training takes, made before its first step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, helper

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import Switch, check_target, stage_model
from onnxgrad_cli.ir.types import Arrays, dtype_of
from onnxgrad_cli.jobs.train.course import Course
from onnxgrad_cli.metadata import tool_version
from onnxgrad_cli.training.adapters.formats import AdapterTarget
from onnxgrad_cli.training.adapters.merge import merge
from onnxgrad_cli.training.class_names import names_for
from onnxgrad_cli.training.data import (
    Batches,
    Data,
    Preprocessing,
)
from onnxgrad_cli.training.evaluate import Evaluator, confusions
from onnxgrad_cli.training.inference import matrix_of
from onnxgrad_cli.training.loop import Loop
from onnxgrad_cli.training.run.base import untrained_digest
from onnxgrad_cli.training.run.folder import RunFolder
from onnxgrad_cli.training.run.model_values import untrained_digests
from onnxgrad_cli.training.run.watch import Watch
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.steps.base import TrainerBase
from onnxgrad_cli.verification.feeds import DescribedModel
from onnxgrad_cli.verification.finiteness import origin_of
from onnxgrad_cli.verification.written import check_opens

MOST_CLASSES = 30
"""Of more classes a confusion matrix is no table for the eye; `onnxgrad evaluate` has it as JSON."""


@dataclass
class PreparedRun:
    """All that a run takes. It is made before the first step: what does not fit together is told by then.

    Attributes:
        original, path: the inference model and the file it was read from.
        ema: weight -> the state with its moving average, which is evaluated and written in place of the weight.
    """

    original: ModelProto
    path: Path | None
    course: Course
    built: TrainingModel
    trainer: TrainerBase
    samples: Data
    evaluator: Evaluator | None
    batches: Batches
    ema: Mapping[str, str]

    @property
    def preprocessing(self) -> Preprocessing:
        """What was done to the data, which the trained model keeps."""
        return self.samples.preprocessing(self.trainer.roles.losses)

    def loop(
        self, folder: RunFolder, stop: Callable[[], bool], watch: Watch, logs: Sequence[LogForm],
        settings: Mapping[str, str],
    ) -> Loop:  # fmt: skip
        """The steps to take."""
        course, evaluator = self.course, self.evaluator
        whole = course.epochs * len(self.batches)
        steps = whole if course.max_steps is None else min(whole, course.max_steps)
        data = {"training": self.samples, **({"validation": evaluator.data} if evaluator else {})}
        trained = {*self.trainer.weights(), *self.trainer.state()}
        schedule = parse_schedule(course.schedule, course.learning_rate, steps, len(self.batches))
        if evaluator is None and (
            course.patience is not None or schedule.watches or course.metrics or course.eval_every
        ):
            words = "early stopping, metrics, `eval_every` and the schedule plateau go by a validation"
            raise UsageError(words, "add `val=DATA`")
        chosen = evaluator.metrics[0] if evaluator is not None and course.metrics else None
        return Loop(
            self.trainer, self.samples, self.batches, schedule, evaluator,
            watched=f"val_{chosen.name}" if chosen else "val_loss" if evaluator else "loss",
            higher=chosen.higher if chosen else False,
            epochs=course.epochs, patience=course.patience, save_every=course.save_every,
            folder=folder, stop=stop, watch=watch, max_steps=course.max_steps,
            eval_every=course.eval_every, logs=logs, settings=settings, origin_of=self._origin_of,
            model=_fingerprint(self.built, self.samples.prepared_by(course.samples)),
            rates=f"a learning rate of {course.learning_rate:g}, {course.schedule}"
            + (f" over {steps} steps" if course.schedule != "constant" else ""),
            base=untrained_digest(self.original, trained),
            untrained=untrained_digests(self.original, trained),
            digests={use: samples.digest() for use, samples in data.items()},
        )  # fmt: skip

    def _origin_of(self, batch: Mapping[str, np.ndarray], loss: float) -> tuple[str, str]:
        """Return the first value that is not finite with the weights of now, and the operator that made it."""
        roles = self.trainer.roles
        rates = {
            value.name: np.zeros((), helper.tensor_dtype_to_np_dtype(dtype_of(value.type)))
            for value in self.built.model.graph.input if roles.inputs.get(value.name) == "learning rate"
        }  # fmt: skip
        feeds = {**self.trainer.weights(), **self.trainer.state(), **rates, **batch}
        described = DescribedModel(self.built.model, roles)
        with suppress(Exception):  # such as a model that is too large to be copied: the error is reported without it
            return origin_of(described, feeds, np.array(loss))
        return "", ""

    def confusion(self) -> dict[str, tuple[Sequence[str], list[list[int]]]]:
        """How the weights of now take classes for each other on the validation data, by output.

        It takes an evaluation more. All processes have the same weights: the first one, which alone asks, answers.
        """
        if self.evaluator is None:
            return {}
        taken = confusions(self.trainer.roles.losses, MOST_CLASSES)
        if taken:
            Evaluator.measure(self.evaluator, self.trainer.buffers, taken, metrics=False)
        matrices, names = (
            {term.output: matrix_of(self.original, term, each) for term, each in taken},
            self.preprocessing,
        )
        return {
            name: (names_for(names.classes, len(each.counts), name) or each.classes, each.counts)
            for name, each in matrices.items()
        }

    def adapter_values(self, weights: Arrays, state: Arrays) -> Arrays:
        """What a file of adapters holds: their factors, weights that are trained in full, running statistics."""
        statistics = {name: array for name, array in state.items() if name not in self.trainer.roles.slots}
        return {**weights, **statistics}

    def stage(self, switch: Switch, target: Path, adapter: AdapterTarget | None, force: bool) -> list[Path]:
        """Write the model with the weights of now, and the adapters alone if asked for; they take their names together.

        Returns:
            The files.
        """
        state, roles = self.trainer.state(), self.trainer.roles
        adapters = roles.adapters
        weights = {**self.trainer.weights(), **{name: state[average] for name, average in self.ema.items()}}
        found = merge(self.original, adapters, weights, self.path, state, self.course.keep_mode, roles.quantized)
        self.preprocessing.write_to(found)
        check_target(target, found, self.path, force)
        if adapter is not None:
            adapter.check(found, self.path, force)
        files = stage_model(switch, found, target, self.path, check=check_opens(found, self.original, self.path))
        if adapter is not None:
            files += adapter.stage(switch, self.original, adapters, self.adapter_values(weights, state))
        return files


def _fingerprint(built: TrainingModel, prepared: str) -> str:
    """Eight digits that tell training models apart by nodes, constants and frozen weights, and versions of onnxgrad.

    What is done to data before a model sees them, in words, counts as a part of it.
    """
    graph, check = built.model.graph, zlib.crc32((tool_version() + prepared).encode())
    stored = (tensor for tensor in graph.initializer if tensor.name not in built.training.state)
    for message in (*graph.node, *stored):
        check = zlib.crc32(message.SerializeToString(deterministic=True), check)
    return f"{check:08x}"
