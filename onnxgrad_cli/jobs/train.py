"""From an inference model and data to a trained inference model, in one call."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxgrad_cli.builder import Built
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import STREAM, check_target, load_model, save_model
from onnxgrad_cli.graph import Graph
from onnxgrad_cli.jobs import Tell, silent, target_of
from onnxgrad_cli.jobs.export import write_back
from onnxgrad_cli.passes.describe import Roles
from onnxgrad_cli.pipeline import Options
from onnxgrad_cli.runtime.data import Batches, Data, open_data, ranges_of
from onnxgrad_cli.runtime.evaluation import Evaluator
from onnxgrad_cli.runtime.folder import RunFolder, run_folder
from onnxgrad_cli.runtime.judge import Judge
from onnxgrad_cli.runtime.loop import Loop
from onnxgrad_cli.runtime.metrics import Named, default_metrics, parse_metric
from onnxgrad_cli.runtime.schedules import parse_schedule
from onnxgrad_cli.runtime.session import find_provider
from onnxgrad_cli.runtime.trainer import Trainer

Watch = Callable[[int, int, float], None]
"""Takes the steps taken, the steps there are to be, and the loss."""


@dataclass(frozen=True)
class Course:
    """How a model is trained; the defaults are those of the command line.

    Attributes:
        epochs: how often all samples are seen.
        batch_size: how many of them a step takes.
        learning_rate, schedule: the rate, and how it changes from step to step.
        seed: of the order of the samples, and of what the model draws at random.
        metrics: what is measured on the validation data besides the loss; () is what suits the loss.
        patience: after how many epochs without a better validation it ends; None is never.
        save_every: how many steps lie between checkpoints; 0: they are written after each epoch.
        provider, threads: what it runs on; see `Trainer`.
        prefix, val_prefix: what the names in the data have before those of the inputs.
    """

    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 1e-3
    schedule: str = "constant"
    seed: int = 0
    metrics: tuple[str, ...] = ()
    patience: int | None = None
    save_every: int = 0
    provider: str = "cpu"
    threads: int | None = None
    prefix: str = ""
    val_prefix: str = ""


@dataclass(frozen=True)
class Trained:
    """What came of a run.

    Attributes:
        reason: why it ended: 'done', 'no better' or 'stopped'; then nothing was written but the checkpoint.
        epochs: what each epoch has come to: 'loss', and 'val_loss' and 'val_<metric>' with validation data.
        best: the epoch whose weights were taken, counted from 1.
        steps: how many were taken in all.
        seconds: how long this call took.
        files: what was written: the model, then the folder of the run.
    """

    reason: str
    epochs: list[dict[str, float]]
    best: int
    steps: int
    seconds: float
    files: list[Path]


def run_train(
    model: str | Path,
    data: str | Path,
    out: str | Path | None = None,
    options: Options | None = None,
    course: Course | None = None,
    *,
    val: str | Path | None = None,
    run: Path | None = None,
    resume: bool = False,
    force: bool = False,
    tell: Tell = silent,
    watch: Watch = lambda steps, of, loss: None,
) -> Trained:
    """Train the model in a file on data in others, and write it with the weights that were found.

    With validation data these are the weights of the best epoch, else the last ones.

    Args:
        model: the inference model.
        data, val: what it is trained and judged on; see `open_data`.
        out: the trained model, of the same graph, opset and names; by default `<model>.trained.onnx`.
        options: what is built of it; without an optimizer adam.
        course: how it is trained.
        run: the folder of checkpoints and log; by default `<out>.run`.
        resume: go on from the folder's checkpoint.
        force: replace a file that onnxgrad did not write.
        tell: takes what is narrated.
        watch: called after each step.

    Raises:
        UsageError: the model, the data and the options do not fit each other, or a file would be replaced.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: a file can't be read or written, or the loss became infinite or no number.
    """
    start = time.perf_counter()
    options, course = options or Options(), course or Course()
    options = replace(options, optimizer=options.optimizer or "adam")
    if str(model) == STREAM or str(out) == STREAM:
        raise UsageError("a run reads its model from a file and writes to one", "name both")
    proto, path = load_model(model)
    target = target_of(path, out, "trained")
    assert target is not None
    check_target(target, proto, path, force)
    original = ModelProto()
    original.CopyFrom(proto)
    built = Built(Graph(proto, path), options)
    built.run()
    trainer = Trainer(built, provider=find_provider(course.provider), threads=course.threads, seed=course.seed)
    ranges = ranges_of(built.model, options.loss_options)
    samples = open_data(data, trainer.inputs, ranges, prefix=course.prefix, tell=tell)
    judge = None
    if val is not None:
        held = open_data(val, trainer.inputs, ranges, prefix=course.val_prefix, tell=tell)
        judge = _judge(original, path, options, course, trainer, held)
    batches = Batches(samples, course.batch_size, course.seed, tell=tell)
    with run_folder(run or target.with_name(f"{target.name}.run")) as folder, _asked_to_stop() as stop:
        loop = _loop(trainer, samples, batches, judge, course, folder, stop, watch)
        if folder.begun and not resume:
            raise UsageError(
                f"'{folder.path}' holds a run already", "go on with it with --resume, or name another folder with --run"
            )
        if resume and not folder.begun:
            raise UsageError(f"--resume: '{folder.path}' holds no checkpoint", "leave --resume out to begin a run")
        if resume:
            loop.resume()
            tell(f"going on after step {trainer.steps}", 0)
        reason = loop.run()
        if reason != "stopped" and judge is not None and loop.progress.best:
            trainer.load(folder.load(best=True)[0])
    progress = loop.progress
    best = progress.best if judge is not None else len(progress.epochs)
    files: list[Path] = []
    if reason != "stopped":
        final = write_back(original, trainer.weights(), trainer.state(), trainer.roles.adapters, path)
        files = save_model(final, target, path, force)
    seconds = time.perf_counter() - start
    return Trained(reason, progress.epochs, best, trainer.steps, seconds, [*files, folder.path])


def _judge(
    model: ModelProto, path: Path | None, options: Options, course: Course, trainer: Trainer, held: Data
) -> Judge:
    evaluator = Evaluator(
        model, options, trainer.buffers, path=path, provider=find_provider(course.provider), threads=course.threads
    )
    return Judge(evaluator, held, course.batch_size, trainer.roles.losses[0], _metrics(trainer.roles, options, course))


def _metrics(roles: Roles, options: Options, course: Course) -> Sequence[Named]:
    term = roles.losses[0]
    if not term.label:
        return []
    if not course.metrics:
        return default_metrics(term, options.loss_options)
    return [parse_metric(text, **dict(options.loss_options)) for text in course.metrics]


def _loop(
    trainer: Trainer, data: Data, batches: Batches, judge: Judge | None, course: Course, folder: RunFolder,
    stop: Callable[[], bool], watch: Watch,
) -> Loop:  # fmt: skip
    steps = course.epochs * len(batches)
    schedule = parse_schedule(course.schedule, course.learning_rate, steps)
    if judge is None and (course.patience is not None or schedule.watches or course.metrics):
        raise UsageError("early stopping, metrics and the schedule plateau go by a validation", "add --val DATA")
    chosen = judge.metrics[0] if judge is not None and course.metrics else None
    return Loop(
        trainer, data, batches, schedule, judge,
        watched=f"val_{chosen.name}" if chosen else "val_loss" if judge else "loss",
        higher=chosen.higher if chosen else False,
        epochs=course.epochs, patience=course.patience, save_every=course.save_every,
        folder=folder, stop=stop, watch=lambda done, loss: watch(done, steps, loss),
    )  # fmt: skip


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Let an interrupt ask for an end instead of making one; a second one does make it."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: nobody can ask
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
