"""The training loop: batch after batch, with what is measured, saved and decided between them.

All that the course of a run depends on is in its progress: weights, state, the place in the data, the schedule, and
what early stopping has seen. A run that goes on from a checkpoint takes the steps that it would have taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.data import Batches, Data, Part
from onnxgrad_cli.training.evaluate import Evaluator
from onnxgrad_cli.training.run.folder import Log, RunFolder
from onnxgrad_cli.training.schedules import Schedule
from onnxgrad_cli.training.steps.base import NotFinite, TrainerBase


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        epochs: what each epoch has come to: its mean loss as 'loss', and what was measured as 'val_<name>'.
        best: the epoch with the best validation, counted from 1; 0 as long as there is none.
        total, seen: the sum of the losses of this epoch's samples, and how many these are.
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    best: int = 0
    total: float = 0.0
    seen: int = 0


@dataclass
class Loop:
    """A run.

    Attributes:
        trainer, data, batches, schedule: what takes the steps, on what, in which order, with which rates.
        evaluator: evaluates the weights after an epoch; None leaves the loss of training alone.
        watched: which of its results counts: 'loss', or a metric; `higher`: whether more of it is better.
        epochs: how many there are to be.
        patience: after how many epochs without a better one the run ends; None is never.
        save_every: how many steps lie between checkpoints; 0 saves at the ends of epochs alone.
        folder: where they go.
        stop: whether somebody asks for an end, asked after each step.
        model: what the steps compute, in short: a checkpoint goes on with the same alone.
        digests: 'training' and perhaps 'validation' -> what tells these data from others, in short.
        watch: called after each step with the steps taken and the loss.
    """

    trainer: TrainerBase
    data: Data
    batches: Batches
    schedule: Schedule
    evaluator: Evaluator | None
    watched: str
    higher: bool
    epochs: int
    patience: int | None
    save_every: int
    folder: RunFolder
    stop: Callable[[], bool]
    watch: Callable[[int, float], None]
    model: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    def resume(self, new_data: bool = False) -> None:
        """Go on from the folder's checkpoint.

        Args:
            new_data: on purpose with other training data, of as many samples.

        Raises:
            UsageError: it is of another model, other data or other options.
            OnnxgradError: it is damaged.
        """
        values, said = self.folder.load()
        self._check_same(values, said)
        self._check_data(said["data"], new_data)
        self.batches.restore(said["batches"])
        if self.batches.dealt != said["steps"]:
            raise OnnxgradError(
                f"the checkpoint speaks of {said['steps']} steps, and of a place after {self.batches.dealt}",
                "it is damaged: take another copy, or begin anew with `run`",
            )
        self.trainer.load(values, said["steps"])
        self.schedule.restore(said["schedule"])
        self.progress = Progress(**said["run"])

    def _check_same(self, values: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        """Make sure that nothing would begin anew in the middle of a run, act otherwise or be evaluated otherwise."""
        needed = [*self.trainer.weights(), *self.trainer.state()]
        missing = next((name for name in needed if name not in values), None)
        if missing is not None:
            raise UsageError(
                f"the run was begun without '{missing}': other weights were trained, or by another optimizer",
                "go on with the same options, or begin anew with `run`",
            )
        if said["adapters"] != [asdict(adapter) for adapter in self.trainer.roles.adapters]:
            raise UsageError("the run was begun with other adapters", "go on with the same `lora`, or begin anew")
        if said["model"] != self.model:
            raise UsageError(
                "the run was begun with another model or other options: its steps were not these",
                "go on with the same ones, or begin anew with `run`; `onnxgrad export` makes a model of its checkpoint",
            )
        epochs = said["run"]["epochs"]
        told = ["loss", *(f"val_{name}" for name in self.evaluator.names)] if self.evaluator else ["loss"]
        if epochs and list(epochs[0]) != told:
            raise UsageError(
                f"the run was begun with {', '.join(epochs[0])} to judge an epoch by, now it is {', '.join(told)}",
                "go on with the same `val` and `metrics`, or begin anew with `run`",
            )
        if said["watched"] != self.watched:
            raise UsageError(
                f"the run was begun with {said['watched']} to say which epoch is best, now it is {self.watched}",
                "go on with the same `metrics` in the same order, or begin anew with `run`",
            )

    def best(self) -> dict[str, np.ndarray]:
        """The values of the best epoch, as the folder keeps them.

        Raises:
            OnnxgradError: they are damaged, or of another run.
        """
        values, said = self.folder.load(best=True)
        if said["run"]["best"] != self.progress.best or said["model"] != self.model:
            raise OnnxgradError(
                f"'{self.folder.path}': its best checkpoint is not that of epoch {self.progress.best} of this run",
                "`onnxgrad export` writes the last checkpoint; or begin anew with `run`",
            )
        return values

    def _check_data(self, digests: Mapping[str, str], new_data: bool) -> None:
        """Make sure that the data hold what they held, of whichever name and size they are."""
        for use, digest in self.digests.items():
            if digests.get(use) == digest or (new_data and use == "training"):
                continue
            hint = "go on with the same data, or begin anew with `run`"
            if use == "training":
                hint += "; `new_data` goes on with others of as many samples"
            raise UsageError(f"the run was begun with other {use} data: what they hold is not what they held", hint)

    def run(self) -> str:
        """Take all steps that are left.

        Returns:
            Why it ended: 'done', 'no better' or 'stopped'.

        Raises:
            OnnxgradError: the loss was no finite number, or something could not be written.
        """
        with self.folder.log(self.trainer.steps) as log:
            while len(self.progress.epochs) < self.epochs:
                if self._out_of_patience():
                    return "no better"
                if not self._epoch(log):
                    self._save(log)
                    return "stopped"
        return "done"

    def _epoch(self, log: Log) -> bool:
        """Train on what is left of an epoch, and evaluate it; False where an end was asked for before."""
        for part in self.batches:
            start = time.perf_counter()
            rate = self.schedule.rate(self.trainer.steps)
            loss = self._step(part, rate)
            self.progress.total += loss * part.whole
            self.progress.seen += part.whole
            steps = self.trainer.steps
            line = {"step": steps, "epoch": len(self.progress.epochs) + 1, "loss": loss, "rate": rate}
            log.add({**line, "seconds": round(time.perf_counter() - start, 6)})
            self.watch(steps, loss)
            ends = self.batches.position == 0
            if self.stop() and not ends:
                return False
            if self.save_every and steps % self.save_every == 0 and not ends:
                self._save(log)
        self._close_epoch(log)
        return not self.stop()

    def _step(self, part: Part, rate: float) -> float:
        indices = part.indices
        try:
            return self.trainer.step(self.data.batch(indices, part), rate)
        except NotFinite as error:
            shown = ", ".join(map(str, indices[:8].tolist())) + (", ..." if len(indices) > 8 else "")
            raise OnnxgradError(
                f"step {self.trainer.steps + 1}: {error.message}, on the samples {shown}",
                f"try a smaller learning rate, or look at these samples; {self._where()}",
            ) from None

    def _close_epoch(self, log: Log) -> None:
        progress = self.progress
        found = {"loss": progress.total / progress.seen}
        if self.evaluator:
            evaluated = self.evaluator(self.trainer.buffers)
            self.schedule.observe(evaluated["loss"])
            found |= {f"val_{name}": value for name, value in evaluated.items()}
        progress.epochs.append(found)
        progress.total, progress.seen = 0.0, 0
        log.add({"step": self.trainer.steps, "epoch": len(progress.epochs), **found})
        better = self._is_best(found)
        if better:
            progress.best = len(progress.epochs)
        self._save(log, best=better)

    def _is_best(self, found: dict[str, float]) -> bool:
        value = found[self.watched]
        if not self.progress.best:
            return math.isfinite(value)
        before = self.progress.epochs[self.progress.best - 1][self.watched]
        return value > before if self.higher else value < before

    def _out_of_patience(self) -> bool:
        return self.patience is not None and len(self.progress.epochs) - self.progress.best >= self.patience

    def _save(self, log: Log, best: bool = False) -> None:
        """Write a checkpoint, and the log before it; weights that are no longer finite are not written but refused."""
        weights = self.trainer.weights()
        for name, array in weights.items():
            if not np.isfinite(array).all():
                raise OnnxgradError(
                    f"step {self.trainer.steps}: '{name}' is no longer finite",
                    f"try a smaller learning rate; {self._where()}",
                )
        said = {
            "steps": self.trainer.steps,
            "batches": self.batches.state(),
            "schedule": self.schedule.state(),
            "run": asdict(self.progress),
            "weights": list(weights),
            "adapters": [asdict(adapter) for adapter in self.trainer.roles.adapters],
            "watched": self.watched,
            "model": self.model,
            "data": dict(self.digests),
            "averages": self.trainer.roles.averages,
            "quantized": asdict(self.trainer.roles.quantized),
        }
        try:
            log.write()
            self.folder.save({**weights, **self.trainer.state()}, said, best)
        except OnnxgradError as error:
            raise OnnxgradError(
                f"step {self.trainer.steps}: {error.message}", f"mend it and go on with `resume`: {self._where()}"
            ) from error

    def _where(self) -> str:
        return (
            f"'{self.folder.path}' has the last good checkpoint" if self.folder.begun else "there is no checkpoint yet"
        )
