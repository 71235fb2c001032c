"""The training loop: steps on batches, with evaluations, checkpoints and early stopping between them.

A checkpoint contains all state of a run: weights, optimizer state, the position in the data, the schedule, and the
results of earlier epochs. A resumed run takes the same steps as a run without an interruption.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from onnxgrad_cli.checkpoints.validate_checkpoint import ANEW, Ended
from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.data import Batches, BatchShard, Data, DataSets
from onnxgrad_cli.errors import OnnxgradError, UsageError, mismatch, unreadable
from onnxgrad_cli.training.evaluation import Evaluator
from onnxgrad_cli.training.run.folder import CHECKPOINT, Log, RunFolder
from onnxgrad_cli.training.run.watch import Judged, Pace, Stepped, Watch
from onnxgrad_cli.training.schedules import Schedule
from onnxgrad_cli.training.steps.base import NotFinite, TrainerBase, numpy_type
from onnxgrad_cli.training.trainer import Trainer
from onnxgrad_cli.verification.checks.finiteness import INPUT, WEIGHT

CAUSAL_LM = "causal-lm"
"""The loss that compares the output at each position with the label at the next one. The first label is not used."""

WITH_DOMAIN = frozenset("Acos Acosh Asin Atanh Div Log Mod Pow Reciprocal Sqrt".split())
"""Operators whose result is nan or infinite for some finite inputs."""


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        epochs: the results of each epoch: its mean loss as 'loss', and results on validation data as 'val_<name>'.
        best: the epoch with the best validation result, counted from 1; 0 if there is none yet.
        total: the sum of the losses of this epoch's samples; with the reduction 'sum', the sum of the losses of its
            batches.
        seen: the number of samples in `total`.
        uncounted: the number of batches so far in which the loss ignored all labels.
        ended: the reason why the optimizer ended the run before its last epoch; "" if it did not.
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    best: int = 0
    total: float = 0.0
    seen: int = 0
    uncounted: int = 0
    ended: Ended = ""


@dataclass
class TrainingLoop:
    """The training loop of a run.

    Attributes:
        trainer: takes the steps.
        data: the training data, in one or several sets.
        batches: the order of the samples, in batches.
        schedule: the learning rate of each step.
        evaluator: evaluates the weights after an epoch; None without validation data.
        watched: the name of the result in `Progress.epochs` that decides which epoch is best.
        higher: True if a higher value of that result is better.
        epochs: the number of epochs.
        patience: the run ends after this number of epochs without a new best epoch; None for no early stopping.
        save_every: the number of steps between checkpoints; 0 for checkpoints at the ends of epochs only.
        folder: the folder of checkpoints and logs.
        stop: returns True if the run is to stop. It is called before the first step and after each step.
        model: a digest of the computation of a step. A checkpoint can only be resumed if this digest is unchanged.
        base: a digest of the inference model. Before `onnxgrad export` writes the weights of a checkpoint into a model,
            it compares this digest with the digest of that model.
        untrained: for a trained model that computes derivatives: tensor of the base model that is not trained -> its
            digest. None for other models.
        rates: a description of the learning rate and the schedule. A resumed run may change these; then the log
            contains the old and the new description.
        settings: argument -> its value as text. If a run can't be resumed, the error lists the changed settings.
        digests: 'training' -> the digest of the training data, "'SET' training" -> the digest of each further data set,
            and 'validation' -> the digest of the validation data, if any.
        rates_before: the value of `rates` in the checkpoint if it differs, otherwise "".
        watch: called after each step and each evaluation.
        max_steps: the run ends after this number of steps, even within an epoch; None for no limit.
        eval_every: the number of steps between evaluations within an epoch; 0 for no such evaluations. Their results
            are reported and logged, but don't affect the run.
        logs: the formats of the log in addition to train.jsonl.
        weights: input with the weight of a loss -> the schedule of the weight.
        origin_of: a function that takes a batch and its loss, which is not finite. It returns the name of the first
            value that is not finite, and the operator that computed this value.
        SHORTER: the advice if a loss is not finite after the first step.
    """

    trainer: TrainerBase
    data: Data | DataSets
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
    weights: Mapping[str, Schedule] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    rates_before: str = ""
    SHORTER: ClassVar[str] = "try a smaller learning rate"
    _pace: Pace = field(default_factory=Pace)
    _rate: float = math.nan
    _cut: bool = False

    @property
    def steps(self) -> int:
        """The total number of steps of the run."""
        whole = self.epochs * self._steps_per_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)

    @property
    def _steps_per_epoch(self) -> int:
        return len(self.batches)

    @property
    def _dealt(self) -> int:
        """The number of steps up to the current position in the data."""
        return self.batches.dealt

    @property
    def _reached(self) -> int:
        """The number of epochs that the run begins. `max_steps` may end the last one early."""
        return math.ceil(self.steps / self._steps_per_epoch)

    @property
    def _results(self) -> list[str]:
        """The names of the results of an epoch."""
        return ["loss", *(f"val_{name}" for name in self.evaluator.names)] if self.evaluator else ["loss"]

    def resume(self, new_data: bool = False) -> None:
        """Continue from the folder's checkpoint.

        Args:
            new_data: accept other training data with the same number of samples.

        Raises:
            UsageError: the checkpoint was written with another model, other data or other options; the details list
                the changed settings.
            OnnxgradError: the checkpoint is damaged.
        """
        values, said = self.folder.load()
        try:
            if difference := next(self._differences(values, said, new_data), None):
                raise difference
            self.batches.restore(said["batches"])
        except UsageError as error:
            changed = self._changed(said.get("settings", {}))
            raise UsageError(error.message, f"{error.hint}, or {ANEW}", changed, code=error.code) from None
        if self._dealt != said["steps"]:
            message = f"the checkpoint has {said['steps']} steps, but its position is after {self._dealt} batches"
            raise unreadable(message, f"it is damaged: use another copy, or {ANEW}")
        self.trainer.load(values, said["steps"])
        self.schedule.restore(said["schedule"])
        self.progress = Progress(**said["run"])
        before = said.get("rates", self.rates)
        self.rates_before = before if before != self.rates else ""

    def _changed(self, before: Mapping[str, str]) -> list[str]:
        """Return a line of text for each setting whose value differs from `before`."""
        names = [name for name in before if name in self.settings and before[name] != self.settings[name]]
        label = {"onnxgrad": "the version of onnxgrad"}
        now = self.settings
        return [f"{label.get(n, f'`{n}`')} was {before[n] or 'not set'}, now {now[n] or 'not set'}" for n in names]

    def _differences(self, values: Mapping[str, Any], said: Mapping[str, Any], new_data: bool) -> Iterator[UsageError]:
        """Yield an error for each difference between the run of a checkpoint and this run.

        Other weights or another optimizer would reset part of the state. Other metrics would make epochs incomparable.
        Data files may be renamed, but not changed, except for training data with `new_data`.
        """
        needed = [*self.trainer.weights(), *self.trainer.state()]
        missing = next((name for name in needed if name not in values), None)
        if missing is not None:
            message = f"the run was started without '{missing}': with other trained weights or another optimizer"
            yield mismatch(message, "continue with the same options")
        if said["adapters"] != [asdict(adapter) for adapter in self.trainer.roles.adapters]:
            yield mismatch("the run was started with other adapters", "continue with the same `lora`")
        if said["model"] != self.model:
            hint = "continue with the same ones, turn its checkpoint into a model with `onnxgrad export`"
            yield mismatch("the run was started with another model or other options", hint)
        epochs, results = said["run"]["epochs"], self._results
        if epochs and list(epochs[0]) != results:
            names = f"{', '.join(epochs[0])} as the results of an epoch, but now they are {', '.join(results)}"
            yield mismatch(f"the run was started with {names}", "continue with the same `val` and `metrics`")
        if said["watched"] != self.watched:
            names = f"{said['watched']} to choose the best epoch, but now it is {self.watched}"
            yield mismatch(f"the run was started with {names}", "continue with the same `metrics` in the same order")
        for use, digest in self.digests.items():
            trains = use.endswith("training")
            if said["data"].get(use) != digest and not (trains and new_data):
                hint = "continue with the same data"
                hint += ", add `new_data` if only the contents differ" if trains else ""
                yield mismatch(f"the run was started with other {use} data: their contents have changed", hint)

    def take_best(self) -> None:
        """Load the weights and state of the best epoch into the trainer, if there is a best epoch.

        Raises:
            OnnxgradError: the checkpoint is damaged, or belongs to another run.
        """
        # If `max_steps` ended the best epoch early, no checkpoint has its values, but the trainer still has them.
        best = self.progress.best
        if not best or (self._cut and best == len(self.progress.epochs)):
            return
        values, said = self.folder.load(best=True)
        if said["run"]["best"] != best or said["model"] != self.model:
            message = f"the best checkpoint in '{self.folder.path}' is not from epoch {best} of this run"
            last = self.folder.path / CHECKPOINT
            hint = f"write a model from the last checkpoint, '{last}', with `onnxgrad export`, or {ANEW}"
            raise OnnxgradError(message, hint, code="mismatch")
        self.trainer.load(values)

    def run(self) -> str:
        """Take all remaining steps.

        Returns:
            The reason for the end: 'done', 'no better' (early stopping), 'max steps', 'stopped', or `Progress.ended` if
            the optimizer ended the run.

        Raises:
            OnnxgradError: the loss or a weight was not finite, or a file could not be written.
        """
        self._pace = Pace()
        if self.finished:
            return self._end(None)
        with self.folder.log(self.trainer.steps, self.logs, self._results) as log:
            if self.stop():
                return "stopped"
            if self.rates_before:
                log.note({"step": self.trainer.steps, "rates": self.rates, "before": self.rates_before})
            if not self._train(log):
                self._save(log)
                return "stopped"
            return self._end(log)

    def _train(self, log: Log) -> bool:
        """Take the remaining steps. Return False if `stop` requested an end."""
        while not self.finished:
            if not self._epoch(log):
                return False
        return True

    @property
    def finished(self) -> bool:
        """True if no step remains."""
        return bool(self._ending)

    @property
    def _ending(self) -> str:
        """The reason why no step remains; "" if a step remains."""
        epochs = len(self.progress.epochs)
        if epochs >= self.epochs:
            return "done"
        if self.patience is not None and epochs - self.progress.best >= self.patience:
            return "no better"
        spent = self.max_steps is not None and self.trainer.steps >= self.max_steps
        return self.progress.ended or ("max steps" if spent else "")

    def _end(self, log: Log | None) -> str:
        """Evaluate an epoch that `max_steps` cut short, and return the reason why no step remains.

        The checkpoint is saved before the evaluation, and does not count this epoch as complete. If the run is resumed
        with more steps, it continues in the middle of this epoch.

        Args:
            log: the log; None if this call of `run` took no step.
        """
        reason = self._ending
        if reason == "max steps" and self.batches.position:
            if log is not None:
                self._save(log)
            self._cut = True
            self._judge(log)
        return reason

    def _epoch(self, log: Log) -> bool:
        """Train on the remaining batches of an epoch, and evaluate it if it is complete.

        Returns:
            False if `stop` requested an end.
        """
        self._pace.lap()
        for part in self.batches:
            self._take(part, log)
            ends = self.batches.position == 0
            if self.stop() and not ends:
                return False
            if ends or self.finished:
                break
            self._between(log)
        if self.batches.position == 0:
            self._end_epoch(log)
        return not self.stop()

    def _end_epoch(self, log: Log, save: bool = True) -> None:
        """Evaluate the weights at the end of an epoch. Write a checkpoint if `save`, or if they are the best so far."""
        better = self._judge(log)
        self.progress.total, self.progress.seen = 0.0, 0
        if save or better:
            self._save(log, best=better)

    def _take(self, part: BatchShard, log: Log) -> None:
        """Take a step on a batch, log it and report it to `watch`."""
        start = time.perf_counter()
        self._rate = self.schedule.rate(self.trainer.steps)
        loss = self._step(part)
        self._record(loss, part.whole, time.perf_counter() - start, log)

    def _record(self, loss: float, samples: int, seconds: float, log: Log) -> None:
        """Add a step to the results of the epoch, log it and report it to `watch`."""
        self._count(loss, samples)
        self._pace.add(samples, seconds)
        step, epoch = self.trainer.steps, len(self.progress.epochs) + 1
        log.add({"step": step, "epoch": epoch, "loss": loss, "rate": self._rate, "seconds": round(seconds, 6)})
        self.watch(Stepped(step, self.steps, epoch, self._reached, loss, self._rate))

    def _count(self, loss: float, samples: int) -> None:
        """Add a loss to the results of the epoch."""
        if math.isnan(loss):
            self.progress.uncounted += 1
        else:
            self.progress.total += loss if self.trainer.roles.reduction == "sum" else loss * samples
            self.progress.seen += samples

    def _between(self, log: Log) -> None:
        """Evaluate the weights and write a checkpoint between two steps, as `eval_every` and `save_every` request."""
        steps = self.trainer.steps
        if self.eval_every and steps % self.eval_every == 0 and self.evaluator:
            epoch, found = len(self.progress.epochs) + 1, self._evaluated()
            log.add({"step": steps, "epoch": epoch, **found})
            self._tell(epoch, found, ends=False, best=False)
        if self.save_every and steps % self.save_every == 0:
            self._save(log)

    def _step(self, part: BatchShard) -> float:
        """Take a step, and return the loss that was computed before the update; nan if the loss ignores all labels."""
        batch = self.data.batch(part.indices, part)
        for name, weight in self.weights.items():
            batch[name] = np.asarray(weight.rate(self.trainer.steps), numpy_type(self.trainer.inputs[name]))
        try:
            uncounted = isinstance(self.trainer, Trainer) and bool(self._uncounted(batch))
            loss = self.trainer.step(batch, self.schedule, uncounted)
        except NotFinite as error:
            raise self._not_finite(part, batch, error) from None
        if uncounted:
            self._check_weights()
        return loss

    def _uncounted(self, batch: Mapping[str, np.ndarray]) -> str:
        """Return the name of a label input whose labels in the batch are all ignored, or "" if there is none."""
        for term in self.trainer.roles.losses:
            if term.ignore_index is not None and term.label in batch:
                labels = batch[term.label]
                labels = labels[:, 1:] if term.name == CAUSAL_LM else labels
                if labels.size and (labels == term.ignore_index).all():
                    return term.label
        return ""

    def _not_finite(self, part: BatchShard, batch: Mapping[str, np.ndarray], error: NotFinite) -> OnnxgradError:
        """Return the error for a loss that is not finite. It names the most likely reason."""
        indices = part.indices
        shown = ", ".join(map(str, indices[:8].tolist())) + (", ..." if len(indices) > 8 else "")
        which = f"the samples {shown}"
        if len(indices) < part.whole:
            which = f"a batch of {part.whole} samples, of which this process has {shown}"
        if isinstance(self.data, DataSets):
            others = "".join(f" and a batch of '{other.name}'" for other in self.data.others)
            which += f" of '{self.data.first.name}'{others}"
        steps = self.trainer.steps
        message = f"step {steps + 1}: {error.message}, on {which}"
        name, maker = self.origin_of(batch, math.nan if "nan" in error.message else math.inf)
        if label := self._uncounted(batch):
            message += f": all labels of '{label}' are ignored" + (" in these" if len(indices) < part.whole else "")
        elif maker:
            source = maker if maker in (INPUT, WEIGHT) else f"output of {maker}"
            message += f": the first value that is not finite is '{name}' ({source})"
        if label:
            advice = "leave out the samples without labels"
        elif maker in WITH_DOMAIN:
            advice = f"keep the input of {maker} in its domain, for example by adding a small number, or "
            advice += self.SHORTER if steps else "look at these samples"
        else:
            advice = f"{self.SHORTER}, or look at these samples" if steps else "look at these samples"
        return OnnxgradError(message, f"{advice}; {self._where()}", code="not_finite")

    def _judge(self, log: Log | None) -> bool:
        """Evaluate the weights at the end of an epoch, log and report the results.

        Return True if they are the best so far.
        """
        progress = self.progress
        found = {"loss": progress.total / progress.seen if progress.seen else math.nan}
        if self.evaluator:
            found |= self._evaluated()
            self.schedule.observe(found["val_loss"])
        progress.epochs.append(found)
        epoch = len(progress.epochs)
        if log is not None:
            log.add({"step": self.trainer.steps, "epoch": epoch, **found})
        better = self.evaluator is not None and self._is_best(found)  # without validation data the last epoch is used
        if better:
            progress.best = epoch
        self._tell(epoch, found, ends=True, best=better)
        return better

    def _evaluated(self) -> dict[str, float]:
        """Return the results on validation data with the current weights, each as 'val_<name>'."""
        assert self.evaluator is not None
        return {f"val_{name}": value for name, value in self.evaluator(self.trainer.buffers).items()}

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

    def _save(self, log: Log, best: bool = False) -> None:
        """Write the log and then a checkpoint.

        Raises:
            OnnxgradError: a weight is not finite (then nothing was written), or a file can't be written.
        """
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
            message = f"step {self.trainer.steps}: {error.message}"
            raise OnnxgradError(message, hint, error.details, code=error.code) from error

    def _check_weights(self) -> dict[str, np.ndarray]:
        """Return the weights after checking that they are finite.

        Raises:
            OnnxgradError: a weight is not finite.
        """
        weights = self.trainer.weights()
        for name, array in weights.items():
            if not np.isfinite(array).all():
                hint = f"{self.SHORTER}; {self._where()}"
                raise OnnxgradError(f"step {self.trainer.steps}: '{name}' is no longer finite", hint, code="not_finite")
        return weights

    def _where(self) -> str:
        path = self.folder.path
        return f"'{path}' has the last good checkpoint" if self.folder.begun else "there is no checkpoint yet"
