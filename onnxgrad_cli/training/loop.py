"""The training loop: batch after batch, with what is measured, saved and decided between them.

All that the course of a run depends on is in its progress: weights, state, the place in the data, the schedule, and
what early stopping has seen. A run that goes on from a checkpoint takes the steps that it would have taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.data import Batches, Data, Part
from onnxgrad_cli.training.evaluate import Evaluator
from onnxgrad_cli.training.run.folder import Log, RunFolder
from onnxgrad_cli.training.run.progress import ANEW
from onnxgrad_cli.training.run.watch import Judged, Pace, Stepped, Watch
from onnxgrad_cli.training.schedules import Schedule
from onnxgrad_cli.training.steps.base import NotFinite, TrainerBase
from onnxgrad_cli.training.trainer import Trainer
from onnxgrad_cli.verification.finiteness import INPUT, WEIGHT

CAUSAL_LM = "causal-lm"
"""The loss that predicts the next label, so that the first one of a sample does not count."""

WITH_DOMAIN = frozenset("Acos Acosh Asin Atanh Div Log Mod Pow Reciprocal Sqrt".split())
"""Operators that are not defined, or infinite, for some finite inputs."""


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        epochs: what each epoch has come to: its mean loss as 'loss', and what was measured as 'val_<name>'.
        best: the epoch with the best validation, counted from 1; 0 as long as there is none.
        total, seen: the sum of the losses of this epoch's samples, and how many these are; with the reduction 'sum'
            the sum of the losses of its batches.
        uncounted: the number of batches of the run in which no label counted.
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    best: int = 0
    total: float = 0.0
    seen: int = 0
    uncounted: int = 0


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
        stop: whether somebody asks for an end, asked before the first step and after each.
        model: what the steps compute, in short: a checkpoint goes on with the same alone.
        base: what tells the inference model from others, in short, for who makes one of a checkpoint.
        untrained: the digests of tensors that a model of derivatives has from its base model and that are not trained;
            None for other models.
        rates: the learning rate and the schedule, in words: a run may go on with others, and the log says so.
        settings: the settings of the run in words, by the names of the arguments: a resume that is refused lists those
            that changed.
        digests: 'training' and perhaps 'validation' -> what tells these data from others, in short.
        rates_before: those that the run was begun with, where they are others; "" where they are not.
        watch: takes what is told, of each step and each judgement.
        max_steps: after how many steps the run ends, in the middle of an epoch too; None is never.
        eval_every: how many steps lie between judgements within an epoch, which are told, and decide nothing; 0: none.
        logs: the forms in which the log is written, besides train.jsonl.
        origin_of: returns for a batch whose loss is not finite the first value that is not, and the operator that made
            it; see `verification.finiteness`.
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
    watch: Watch
    max_steps: int | None = None
    eval_every: int = 0
    logs: Sequence[LogForm] = ()
    origin_of: Callable[[Mapping[str, np.ndarray], float], tuple[str, str]] = lambda batch, loss: ("", "")
    model: str = ""
    base: str = ""
    untrained: Mapping[str, str] | None = None
    rates: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    rates_before: str = ""
    _pace: Pace = field(default_factory=Pace)
    _rate: float = math.nan
    _cut: bool = False

    @property
    def steps(self) -> int:
        """How many steps there are to be in all."""
        whole = self.epochs * len(self.batches)
        return whole if self.max_steps is None else min(whole, self.max_steps)

    @property
    def _reached(self) -> int:
        """How many epochs there are to be, of which `max_steps` may cut the last."""
        return math.ceil(self.steps / len(self.batches))

    @property
    def _results(self) -> list[str]:
        """What is said of an epoch, by name."""
        return ["loss", *(f"val_{name}" for name in self.evaluator.names)] if self.evaluator else ["loss"]

    def resume(self, new_data: bool = False) -> None:
        """Go on from the folder's checkpoint.

        Args:
            new_data: on purpose with other training data, of as many samples.

        Raises:
            UsageError: it is of another model, other data or other options; the details list the changed settings.
            OnnxgradError: it is damaged.
        """
        values, said = self.folder.load()
        try:
            self._check_same(values, said)
            self._check_data(said["data"], new_data)
            self.batches.restore(said["batches"])
        except UsageError as error:
            hint = error.hint if ANEW in (error.hint or "") else f"{error.hint}, or {ANEW}"
            raise UsageError(error.message, hint, self._changed(said.get("settings", {}))) from None
        if self.batches.dealt != said["steps"]:
            raise OnnxgradError(
                f"the checkpoint speaks of {said['steps']} steps, and of a place after {self.batches.dealt}",
                f"it is damaged: take another copy, or {ANEW}",
            )
        self.trainer.load(values, said["steps"])
        self.schedule.restore(said["schedule"])
        self.progress = Progress(**said["run"])
        before = said.get("rates", self.rates)
        self.rates_before = before if before != self.rates else ""

    def _changed(self, before: Mapping[str, str]) -> list[str]:
        """Return a line for each setting with another value than before."""
        names = [name for name in before if name in self.settings and before[name] != self.settings[name]]
        label = {"onnxgrad": "the version of onnxgrad"}
        return [
            f"{label.get(name, f'`{name}`')} was {before[name] or 'not set'}, now {self.settings[name] or 'not set'}"
            for name in names
        ]

    def _check_same(self, values: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        """Make sure that nothing would begin anew in the middle of a run, act otherwise or be evaluated otherwise."""
        needed = [*self.trainer.weights(), *self.trainer.state()]
        missing = next((name for name in needed if name not in values), None)
        if missing is not None:
            raise UsageError(
                f"the run was begun without '{missing}': other weights were trained, or by another optimizer",
                f"go on with the same options, or {ANEW}",
            )
        if said["adapters"] != [asdict(adapter) for adapter in self.trainer.roles.adapters]:
            raise UsageError("the run was begun with other adapters", f"go on with the same `lora`, or {ANEW}")
        if said["model"] != self.model:
            raise UsageError(
                "the run was begun with another model or other options: its steps were not these",
                f"go on with the same ones, or {ANEW}; `onnxgrad export` makes a model of its checkpoint",
            )
        epochs = said["run"]["epochs"]
        told = self._results
        if epochs and list(epochs[0]) != told:
            raise UsageError(
                f"the run was begun with {', '.join(epochs[0])} to judge an epoch by, now it is {', '.join(told)}",
                f"go on with the same `val` and `metrics`, or {ANEW}",
            )
        if said["watched"] != self.watched:
            raise UsageError(
                f"the run was begun with {said['watched']} to say which epoch is best, now it is {self.watched}",
                f"go on with the same `metrics` in the same order, or {ANEW}",
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
                f"`onnxgrad export` writes the last checkpoint; or {ANEW}",
            )
        return values

    def take_best(self) -> None:
        """Go back to the values of the best epoch, if there is one.

        Raises:
            OnnxgradError: they are damaged, or of another run.
        """
        present = self._cut and self.progress.best == len(self.progress.epochs)  # no checkpoint is of a part
        if self.progress.best and not present:
            self.trainer.load(self.best())

    def _check_data(self, digests: Mapping[str, str], new_data: bool) -> None:
        """Make sure that the data hold what they held, of whichever name and size they are."""
        for use, digest in self.digests.items():
            if digests.get(use) == digest or (new_data and use == "training"):
                continue
            hint = f"go on with the same data, or {ANEW}"
            if use == "training":
                hint += "; `new_data` goes on with others of as many samples"
            raise UsageError(f"the run was begun with other {use} data: what they hold is not what they held", hint)

    def run(self) -> str:
        """Take all steps that are left.

        Returns:
            Why it ended: 'done', 'no better', 'max steps' or 'stopped'.

        Raises:
            OnnxgradError: the loss was no finite number, or something could not be written.
        """
        self._pace = Pace()
        if self.finished:
            return self._end(None)
        with self.folder.log(self.trainer.steps, self.logs, self._results) as log:
            if self.stop():
                return "stopped"
            if self.rates_before:
                log.note({"step": self.trainer.steps, "rates": self.rates, "before": self.rates_before})
            while not self.finished:
                if not self._epoch(log):
                    self._save(log)
                    return "stopped"
            return self._end(log)

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return len(self.progress.epochs) >= self.epochs or self._out_of_patience() or self._spent()

    def _end(self, log: Log | None) -> str:
        """Return why the run has no step left; without a log, it had none from the start."""
        if len(self.progress.epochs) >= self.epochs:
            return "done"
        if self._out_of_patience():
            return "no better"
        self._cut_epoch(log)
        return "max steps"

    def _spent(self) -> bool:
        return self.max_steps is not None and self.trainer.steps >= self.max_steps

    def _epoch(self, log: Log) -> bool:
        """Train on what is left of an epoch, and judge it if it is over; False where an end was asked for."""
        self._pace.lap()
        for part in self.batches:
            self._take(part, log)
            ends = self.batches.position == 0
            if self.stop() and not ends:
                return False
            if ends or self._spent():
                break
            self._between(log)
        if self.batches.position == 0:
            self._close_epoch(log)
        return not self.stop()

    def _take(self, part: Part, log: Log) -> None:
        """Take a step on a batch, and tell of it."""
        start = time.perf_counter()
        self._rate = self.schedule.rate(self.trainer.steps)
        loss = self._step(part, self._rate)
        seconds = time.perf_counter() - start
        if math.isnan(loss):
            self.progress.uncounted += 1
        else:
            self.progress.total += loss if self.trainer.roles.reduction == "sum" else loss * part.whole
            self.progress.seen += part.whole
        self._pace.add(part.whole, seconds)
        step, epoch = self.trainer.steps, len(self.progress.epochs) + 1
        log.add({"step": step, "epoch": epoch, "loss": loss, "rate": self._rate, "seconds": round(seconds, 6)})
        self.watch(Stepped(step, self.steps, epoch, self._reached, loss, self._rate))

    def _between(self, log: Log) -> None:
        """What comes between two steps of an epoch: judgements that decide nothing, checkpoints."""
        steps = self.trainer.steps
        if self.eval_every and steps % self.eval_every == 0 and self.evaluator:
            epoch = len(self.progress.epochs) + 1
            found = {f"val_{name}": value for name, value in self.evaluator(self.trainer.buffers).items()}
            log.add({"step": steps, "epoch": epoch, **found})
            self._tell(epoch, found, ends=False, best=False)
        if self.save_every and steps % self.save_every == 0:
            self._save(log)

    def _step(self, part: Part, rate: float) -> float:
        """Take a step and return the loss before it, which is nan if no label of the batch counts."""
        batch = self.data.batch(part.indices, part)
        try:
            if isinstance(self.trainer, Trainer) and self._uncounted(batch):
                loss = self.trainer.step(batch, rate, uncounted=True)
                self._check_weights()
                return loss
            return self.trainer.step(batch, rate)
        except NotFinite as error:
            raise self._not_finite(part, batch, error) from None

    def _uncounted(self, batch: Mapping[str, np.ndarray]) -> str:
        """Return the name of a label input in which no label counts; "" if there is none."""
        for term in self.trainer.roles.losses:
            if term.ignore_index is not None and term.label in batch:
                labels = batch[term.label]
                labels = labels[:, 1:] if term.name == CAUSAL_LM else labels
                if labels.size and (labels == term.ignore_index).all():
                    return term.label
        return ""

    def _not_finite(self, part: Part, batch: Mapping[str, np.ndarray], error: NotFinite) -> OnnxgradError:
        """Return the error for a loss that is not finite, with the most likely reason."""
        indices = part.indices
        shown = ", ".join(map(str, indices[:8].tolist())) + (", ..." if len(indices) > 8 else "")
        which = f"the samples {shown}"
        if len(indices) < part.whole:
            which = f"a batch of {part.whole} samples, of which this process has {shown}"
        message, advice = f"step {self.trainer.steps + 1}: {error.message}, on {which}", ""
        name, maker = self.origin_of(batch, math.nan if "nan" in error.message else math.inf)
        if label := self._uncounted(batch):
            message += f": no label of '{label}' counts" + (" in these" if len(indices) < part.whole else "")
            advice = "leave out the samples without labels"
        elif maker:
            source = maker if maker in (INPUT, WEIGHT) else f"output of {maker}"
            message += (
                f": the first value that is not finite is '{name}', {'an' if source[0] in 'io' else 'a'} {source}"
            )
        if maker in WITH_DOMAIN and not advice:
            advice = f"keep what goes into {maker} in its domain, such as with a small number added, or "
            advice += "look at these samples" if not self.trainer.steps else "try a smaller learning rate"
        elif not advice:
            rate = "" if not self.trainer.steps else "try a smaller learning rate, or "
            advice = f"{rate}look at these samples"
        return OnnxgradError(message, f"{advice}; {self._where()}")

    def _close_epoch(self, log: Log) -> None:
        better = self._judge(log)
        self.progress.total, self.progress.seen = 0.0, 0
        self._save(log, best=better)

    def _cut_epoch(self, log: Log | None) -> None:
        """Judge the part of an epoch that `max_steps` leaves.

        No checkpoint counts it as an epoch, so that a run with more steps goes on as if it had never ended there.
        """
        if self.batches.position:
            if log is not None:
                self._save(log)
            self._cut = True
            self._judge(log)

    def _judge(self, log: Log | None) -> bool:
        """Judge the steps since the last epoch as an epoch, and tell of it; whether it is the best."""
        progress = self.progress
        found = {"loss": progress.total / progress.seen if progress.seen else math.nan}
        if self.evaluator:
            evaluated = self.evaluator(self.trainer.buffers)
            self.schedule.observe(evaluated["loss"])
            found |= {f"val_{name}": value for name, value in evaluated.items()}
        progress.epochs.append(found)
        epoch = len(progress.epochs)
        if log is not None:
            log.add({"step": self.trainer.steps, "epoch": epoch, **found})
        better = self.evaluator is not None and self._is_best(found)  # without a validation the last weights are taken
        if better:
            progress.best = epoch
        self._tell(epoch, found, ends=True, best=better)
        return better

    def _tell(self, epoch: int, found: Mapping[str, float], ends: bool, best: bool) -> None:
        step, of, pace = self.trainer.steps, self.steps, self._pace
        left = pace.left(of - step)
        self.watch(Judged(step, of, epoch, self._reached, self._rate, found, pace.speed, left, ends, best))

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
        weights = self._check_weights()
        said = {
            "steps": self.trainer.steps,
            "batches": self.batches.state(),
            "schedule": self.schedule.state(),
            "run": asdict(self.progress),
            "weights": list(weights),
            "adapters": [asdict(adapter) for adapter in self.trainer.roles.adapters],
            "watched": self.watched,
            "model": self.model,
            "base": self.base,
            **({} if self.untrained is None else {"untrained": dict(self.untrained)}),
            "rates": self.rates,
            "settings": dict(self.settings),
            "data": dict(self.digests),
            "averages": self.trainer.roles.averages,
            "quantized": asdict(self.trainer.roles.quantized),
        }
        try:
            log.write()
            self.folder.save({**weights, **self.trainer.state()}, said, best)
        except OnnxgradError as error:
            again = "continue with `resume`" if self.folder.begun else "start again"
            hint = f"{error.hint or 'remove the cause'}; then {again}: {self._where()}"
            raise OnnxgradError(f"step {self.trainer.steps}: {error.message}", hint, error.details) from error

    def _check_weights(self) -> dict[str, np.ndarray]:
        """Return the weights if they are finite.

        Raises:
            OnnxgradError: one is not.
        """
        weights = self.trainer.weights()
        for name, array in weights.items():
            if not np.isfinite(array).all():
                raise OnnxgradError(
                    f"step {self.trainer.steps}: '{name}' is no longer finite",
                    f"try a smaller learning rate; {self._where()}",
                )
        return weights

    def _where(self) -> str:
        return (
            f"'{self.folder.path}' has the last good checkpoint" if self.folder.begun else "there is no checkpoint yet"
        )
