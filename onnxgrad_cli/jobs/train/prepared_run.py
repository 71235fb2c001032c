"""`PreparedRun`, a training run that is ready for its first step, and `Trained`, the result of a run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.adapters.formats import AdapterTarget
from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.checkpoints.base_model_digest import untrained_digest
from onnxgrad_cli.checkpoints.model_values import untrained_digests
from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.data import Batches, Data, DataSets, NamedSet, Preprocessing
from onnxgrad_cli.data.class_names import names_for
from onnxgrad_cli.errors import missing_value
from onnxgrad_cli.files import AtomicWriteGroup, check_target, stage_model
from onnxgrad_cli.files.external_data import data_checksum
from onnxgrad_cli.ir.types import Arrays, dtype_of, is_external
from onnxgrad_cli.optimizers import LBFGS
from onnxgrad_cli.options.train import Course
from onnxgrad_cli.training.evaluation import Evaluator, confusions
from onnxgrad_cli.training.inference import matrix_of
from onnxgrad_cli.training.lbfgs_loop import LbfgsLoop
from onnxgrad_cli.training.loop import TrainingLoop
from onnxgrad_cli.training.run.folder import RunFolder
from onnxgrad_cli.training.run.watch import Watch
from onnxgrad_cli.training.schedules import parse_schedule, weight_schedule
from onnxgrad_cli.training.steps.base import TrainerBase
from onnxgrad_cli.training.steps.full_batch import FullBatchTrainer
from onnxgrad_cli.verification.checks.finiteness import origin_of
from onnxgrad_cli.verification.feeds import DescribedModel
from onnxgrad_cli.verification.written_file import check_opens

MOST_CLASSES = 30
"""Largest number of classes for which a confusion matrix is printed. `onnxgrad evaluate --json` shows larger ones."""


@dataclass
class PreparedRun:
    """All parts of a run. They are created before the first step, so that errors are reported early.

    Attributes:
        original, path: the inference model and the file it was read from.
        ema: weight -> the name of the state with its moving average. The average is evaluated and written instead.
        sets: the data sets with names, of which `samples` are the first; None for data without a name.
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
    sets: DataSets | None = None

    @property
    def others(self) -> Sequence[NamedSet]:
        """The data sets other than the first."""
        return self.sets.others if self.sets else ()

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of the data, which the trained model stores."""
        roles = self.trainer.roles
        found = self.samples.preprocessing(roles.on_set(self.sets.first.name if self.sets else "").losses)
        for other in self.others:
            found = found.with_more(other.data.preprocessing(roles.on_set(other.name).losses))
        return found

    def loop(
        self, folder: RunFolder, stop: Callable[[], bool], watch: Watch, logs: Sequence[LogForm],
        settings: Mapping[str, str], tell: Tell,
    ) -> TrainingLoop:  # fmt: skip
        """Return the loop that takes the training steps, logs them, and writes checkpoints to `folder`."""
        course, evaluator = self.course, self.evaluator
        whole = course.epochs * len(self.batches)
        steps = whole if course.max_steps is None else min(whole, course.max_steps)
        data = {"training": self.samples, **{f"'{each.name}' training": each.data for each in self.others}}
        data |= {"validation": evaluator.data} if evaluator else {}
        prepared = "".join(each.prepared_by(course.samples) for use, each in data.items() if use != "validation")
        trained = {*self.trainer.weights(), *self.trainer.state()}
        schedule = parse_schedule(course.schedule, course.learning_rate, steps, len(self.batches))
        losses = zip(self.trainer.roles.losses, self.built.options.losses, strict=True)
        scheduled = [(term.factor, spec) for term, spec in losses if term.factor]
        weights = {name: weight_schedule(spec, steps, len(self.batches)) for name, spec in scheduled}
        asked = {
            "`patience`": course.patience is not None, "`metrics`": bool(course.metrics),
            "`eval_every`": bool(course.eval_every), f"`schedule='{course.schedule}'`": schedule.watches,
        }  # fmt: skip
        if evaluator is None and (name := next((name for name, is_set in asked.items() if is_set), "")):
            raise missing_value(
                f"{name} requires validation data", "add `val=DATA`, or `val=0.2` for a fifth of the data"
            )
        chosen = evaluator.metrics[0] if evaluator is not None and course.metrics else None
        rates = f"a learning rate of {course.learning_rate:g}, {course.schedule}"
        rates += f" over {steps} steps" if course.schedule != "constant" else ""
        rates += "".join(f"; weight of {spec.name} {spec.schedule} over {steps} steps" for _, spec in scheduled)
        loop: Callable[..., TrainingLoop] = TrainingLoop
        if isinstance(self.trainer, FullBatchTrainer):
            solver = LBFGS.function(**LBFGS.settings(self.built.options.optimizer_options))
            loop, rates = partial(LbfgsLoop, solver=solver, tell=tell), ""
        return loop(
            self.trainer, self.sets or self.samples, self.batches, schedule, evaluator,
            watched=f"val_{chosen.name}" if chosen else "val_loss" if evaluator else "loss",
            higher=chosen.higher if chosen else False,
            epochs=course.epochs, patience=course.patience, save_every=course.save_every,
            folder=folder, stop=stop, watch=watch, max_steps=course.max_steps,
            eval_every=course.eval_every, logs=logs, settings=settings, origin_of=self._origin_of,
            model=_fingerprint(self.built, self.trainer, prepared),
            rates=rates,
            weights=weights,
            base=untrained_digest(self.original, trained),
            untrained=untrained_digests(self.original, trained),
            digests={use: samples.digest() for use, samples in data.items()},
        )  # fmt: skip

    def _origin_of(self, batch: Mapping[str, np.ndarray], loss: float) -> tuple[str, str]:
        """Return the first value that is not finite with the current weights, and the operator that computes it."""
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
        """Return a map: output -> class names, and the confusion matrix of the current weights on the validation data.

        This takes one more evaluation. All processes have the same weights, and only the first one calls this.
        """
        if self.evaluator is None:
            return {}
        taken = confusions(self.evaluator.terms, MOST_CLASSES)
        if taken:
            self.evaluator.measure(self.trainer.buffers, taken, metrics=False)
        matrices = {term.output: matrix_of(self.original, term, each) for term, each in taken}
        names = self.preprocessing
        return {
            name: (names_for(names.classes, len(each.counts), name) or each.classes, each.counts)
            for name, each in matrices.items()
        }

    def adapter_values(self, weights: Arrays, state: Arrays) -> Arrays:
        """Return the content of an adapter file: LoRA matrices, weights trained in full, and running statistics."""
        statistics = {name: array for name, array in state.items() if name not in self.trainer.roles.slots}
        return {**weights, **statistics}

    def stage(self, switch: AtomicWriteGroup, target: Path, adapter: AdapterTarget | None, force: bool) -> list[Path]:
        """Add the model with the current weights, and if requested its adapters, to a group of files to write.

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


@dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        reason: the reason why the run ended; see `TrainingLoop.run`. After 'stopped', only the checkpoint was written.
        epochs: the results of each epoch: 'loss', and with validation data 'val_loss' and 'val_<metric>'.
        best: the epoch whose weights were kept, counted from 1.
        by: the name in `epochs` that decides which epoch is best, or "" if the last epoch is kept.
        steps: the total number of steps.
        seconds: the duration of this call of `run_train`.
        files: the files written: the model, and the folder of the run, which also holds the report. Empty if the run
            was interrupted, or if a finished run was resumed.
    """

    reason: str
    epochs: list[dict[str, float]]
    best: int
    by: str
    steps: int
    seconds: float
    files: list[Path]


def _fingerprint(built: TrainingModel, trainer: TrainerBase, prepared: str) -> str:
    """Return a digest of all that determines a step: nodes, constants, initial weights, preparation of data, version.

    Args:
        built: the training model.
        trainer: holds the weights and the state before the first step.
        prepared: a description of how the data are prepared.
    """
    graph, check = built.model.graph, zlib.crc32((tool_version() + prepared).encode())
    stored = (tensor for tensor in graph.initializer if tensor.name not in trainer.buffers)
    for node in graph.node:
        check = zlib.crc32(node.SerializeToString(deterministic=True), check)
    for tensor in stored:  # the location of a tensor's values does not belong to the model
        outside = is_external(tensor)
        head = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type) if outside else tensor
        check = zlib.crc32(head.SerializeToString(deterministic=True), check)
        check = data_checksum(tensor, built.graph.path, check) if outside else check
    for name, buffer in trainer.buffers.items():
        check = zlib.crc32(np.ascontiguousarray(buffer.read()).view(np.uint8).data, zlib.crc32(name.encode(), check))
    return f"{check:08x}"
