"""From an inference model and data to a trained inference model, in one call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.builder import Built
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import STREAM, check_target, load_model, save_bytes, save_model
from onnxgrad_cli.graph import Graph
from onnxgrad_cli.jobs import Tell, silent, target_of
from onnxgrad_cli.jobs.export import write_back
from onnxgrad_cli.passes.describe import Roles
from onnxgrad_cli.pipeline import Options
from onnxgrad_cli.report import make_report
from onnxgrad_cli.report.curve import Curve
from onnxgrad_cli.report.html import html
from onnxgrad_cli.report.markdown import markdown
from onnxgrad_cli.report.training import PICTURE, Run, page
from onnxgrad_cli.runtime.adapter_file import save_adapter
from onnxgrad_cli.runtime.communicator import Alone, Communicator, any_of
from onnxgrad_cli.runtime.data import Batches, Data, open_data, ranges_of
from onnxgrad_cli.runtime.evaluation import Evaluator
from onnxgrad_cli.runtime.folder import RunFolder
from onnxgrad_cli.runtime.held import Held
from onnxgrad_cli.runtime.judge import Judge
from onnxgrad_cli.runtime.loop import Loop
from onnxgrad_cli.runtime.metrics import Named, default_metrics, parse_metric
from onnxgrad_cli.runtime.parallel import ParallelTrainer, agree
from onnxgrad_cli.runtime.schedules import parse_schedule
from onnxgrad_cli.runtime.session import find_provider
from onnxgrad_cli.runtime.shared import SharedJudge, shared_folder
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
        use_ema: judge and write the averages that `Options.ema` keeps, in place of the weights.
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
    use_ema: bool = False
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
        files: what was written: the model, then the folder of the run, in which its report is too.
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
    adapter: Path | None = None,
    run: Path | None = None,
    resume: bool = False,
    force: bool = False,
    tell: Tell = silent,
    watch: Watch = lambda steps, of, loss: None,
    communicator: Communicator | None = None,
) -> Trained:
    """Train the model in a file on data in others, and write it with the weights that were found.

    With validation data these are the weights of the best epoch, else the last ones.

    Args:
        model: the inference model.
        data, val: what it is trained and judged on; see `open_data`.
        out: the trained model, of the same graph, opset and names; by default `<model>.trained.onnx`.
        options: what is built of it; without an optimizer adam.
        course: how it is trained.
        adapter: a file for the low-rank adapters alone.
        run: the folder of checkpoints and log; by default `<out>.run`.
        resume: go on from the folder's checkpoint.
        force: replace a file that onnxgrad did not write.
        tell: takes what is narrated.
        watch: called after each step.
        communicator: connects this process to others that train with it; then each takes its part of every batch,
            and the first one judges and writes for all.

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
    for file in filter(None, (target, adapter)):
        check_target(file, proto, path, force)
    if adapter is not None and not options.lora:
        raise UsageError("--adapter: no adapters are trained", "ask for them with --lora RANK")
    original = ModelProto()
    original.CopyFrom(proto)
    built = Built(Graph(proto, path), options)
    built.run()
    link = communicator or Alone()
    trainer = _trainer(built, course, link)
    averages = _averages(trainer) if course.use_ema else {}
    ranges = ranges_of(built.model, options.loss_options)
    samples = open_data(data, trainer.inputs, ranges, prefix=course.prefix, tell=tell)
    judge = None
    if val is not None:
        held = open_data(val, trainer.inputs, ranges, prefix=course.val_prefix, tell=tell)
        judge = replace(_judge(original, path, options, course, trainer, held, link), averages=averages)
    agree(link, {"samples": np.array(len(samples))}, "data")
    batches = Batches(samples, course.batch_size, course.seed, rank=link.rank, world=link.world, tell=tell)
    if options.accumulate > len(batches):
        raise UsageError(
            f"--accumulate {options.accumulate}: an epoch has {len(batches)} batches, so it would take no step",
            "choose a smaller one, or a smaller --batch-size",
        )
    place = run or target.with_name(f"{target.name}.run")
    with shared_folder(place, link) as folder, _asked_to_stop(link, place, tell) as stop:
        loop = _loop(trainer, samples, batches, judge, course, folder, stop, watch)
        begun = link.told(folder.begun)
        if begun and not resume:
            raise UsageError(
                f"'{folder.path}' holds a run already", "go on with it with --resume, or name another folder with --run"
            )
        if resume and not begun:
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
    if reason != "stopped" and link.rank == 0:
        state = trainer.state()
        weights = {**trainer.weights(), **{name: state[average] for name, average in averages.items()}}
        final = write_back(original, weights, state, trainer.roles.adapters, path)
        files = save_model(final, target, path, force)
        if adapter is not None:
            save_adapter(adapter, trainer.roles.adapters, weights)
            files.append(adapter)
    found = Trained(reason, progress.epochs, best, trainer.steps, time.perf_counter() - start, [*files, folder.path])
    if reason != "stopped" and link.rank == 0:
        sets = {"training": samples, **({"validation": judge.data} if judge else {})}
        _report(folder, built, found, course, sets)
    return found


def _averages(trainer: Held) -> dict[str, str]:
    """Weight -> the state that holds its average.

    Raises:
        UsageError: there is none, or it is of another type than the weight.
    """
    found = trainer.roles.averages
    if not found:
        raise UsageError("--use-ema: no averages are kept", "add --ema DECAY, such as 0.999")
    for name, average in found.items():
        if trainer.buffers[name].array.dtype != trainer.buffers[average].array.dtype:
            raise UsageError(f"--use-ema: '{name}' is of 16 bits, its average of 32", "leave --use-ema out")
    return found


def _report(folder: RunFolder, built: Built, found: Trained, course: Course, sets: Mapping[str, Data]) -> None:
    asked = {"--" + name.replace("_", "-"): value for name, value in asdict(course).items() if value}
    run = Run(
        built.graph.path.name if built.graph.path else "",
        found.reason, found.epochs, found.best, found.steps, found.seconds, asked,
        {use: (str(data.source), len(data)) for use, data in sets.items()},
        [str(file) for file in found.files], Curve.of(folder.history()), make_report(built=built),
    )  # fmt: skip
    document = page(run)
    written = {"report.md": markdown(document), "report.html": html(document)}
    for name, text in {**written, **({PICTURE: run.picture} if run.curve.steps else {})}.items():
        save_bytes(text.encode(), folder.path / name)


def _trainer(built: Built, course: Course, link: Communicator) -> Held:
    provider = find_provider(course.provider)
    if link.world == 1:
        return Trainer(built, provider=provider, threads=course.threads, seed=course.seed)
    return ParallelTrainer(built, link, provider=provider, threads=course.threads, seed=course.seed)


def _judge(
    model: ModelProto, path: Path | None, options: Options, course: Course, trainer: Held, held: Data,
    link: Communicator,
) -> Judge:  # fmt: skip
    evaluator = Evaluator(
        model, options, trainer.buffers, path=path, provider=find_provider(course.provider), threads=course.threads
    )
    metrics = _metrics(trainer.roles, options, course)
    return SharedJudge(evaluator, held, course.batch_size, trainer.roles.losses[0], metrics, communicator=link)


def _metrics(roles: Roles, options: Options, course: Course) -> Sequence[Named]:
    term = roles.losses[0]
    if not term.label:
        return []
    if not course.metrics:
        return default_metrics(term, options.loss_options)
    return [parse_metric(text, **dict(options.loss_options)) for text in course.metrics]


def _loop(
    trainer: Held, data: Data, batches: Batches, judge: Judge | None, course: Course, folder: RunFolder,
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
def _asked_to_stop(link: Communicator, folder: Path, tell: Tell) -> Iterator[Callable[[], bool]]:
    """Let an interrupt ask for an end instead of making one; a second one does make it.

    Several processes end at the same step. Where one of them has died the others can't reach it: so the request is
    told at once.
    """
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: nobody can ask
        before = {}
    ears = _told_at_once(folder, tell) if link.world > 1 and before else nullcontext()
    try:
        with ears:
            yield lambda: any_of(link, bool(asked))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _told_at_once(folder: Path, tell: Tell) -> Iterator[None]:
    """Tell of a signal when it comes, even while the main thread waits for another process."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)

    def listen() -> None:
        with open(reader, "rb", buffering=0) as heard:
            if heard.read(1):
                tell(
                    f"the run is being ended, or another of its processes has died: '{folder}' has the last "
                    "checkpoint, --resume goes on from it",
                    0,
                )

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        listener.join(1)
