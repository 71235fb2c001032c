"""From an inference model and data to a trained inference model, in one call."""

from __future__ import annotations

import glob
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Init, LogForm
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.wording import flag_of
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.endless import check_ends
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.execution.session import CPU, find_provider
from onnxgrad_cli.files import STREAM, ModelSource, Switch, check_target, own_model, save_bytes, stage_model
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.build_attempt import page_for
from onnxgrad_cli.jobs.memory_plan import Plan, planned
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.metadata import Adapter, check_is_original, tool_version
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.mode import SUBJECT as MODE
from onnxgrad_cli.report import make_report
from onnxgrad_cli.report.curve import Curve
from onnxgrad_cli.report.html import html
from onnxgrad_cli.report.markdown import markdown
from onnxgrad_cli.report.training import Run, page
from onnxgrad_cli.training.adapters.branches import check_branches
from onnxgrad_cli.training.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.training.adapters.merge import merge
from onnxgrad_cli.training.class_names import names_for
from onnxgrad_cli.training.data import (
    Batches,
    Data,
    Preprocessing,
    SampleOptions,
    SequenceOptions,
    balance,
    fraction_of,
    held_out,
    names_in,
    open_data,
    prepared,
    ranges_of,
)
from onnxgrad_cli.training.data.pasts import with_empty_pasts, with_sizes_of_pasts
from onnxgrad_cli.training.eval_model import EvalSession
from onnxgrad_cli.training.evaluate import Evaluator, confusions
from onnxgrad_cli.training.inference import matrix_of
from onnxgrad_cli.training.loop import Loop
from onnxgrad_cli.training.metrics import metrics_of
from onnxgrad_cli.training.new_head import with_classes
from onnxgrad_cli.training.run.communicator import Alone, Communicator
from onnxgrad_cli.training.run.ema_weights import check_ema
from onnxgrad_cli.training.run.export import check_stored
from onnxgrad_cli.training.run.folder import RunFolder
from onnxgrad_cli.training.run.integers import stored_as
from onnxgrad_cli.training.run.interrupt import asked_to_stop
from onnxgrad_cli.training.run.rank_zero import RankZeroEvaluator, rank_zero_folder
from onnxgrad_cli.training.run.watch import Watch, unwatched
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.steps.base import RATE, TrainerBase, drawing
from onnxgrad_cli.training.steps.init_adapters import as_asked, begin_from
from onnxgrad_cli.training.steps.init_weights import init_weights
from onnxgrad_cli.training.steps.parallel import ParallelTrainer, agree
from onnxgrad_cli.training.trainer import Trainer
from onnxgrad_cli.verification.written import check_opens
from onnxgrad_cli.view import draw
from onnxgrad_cli.view.html import html as drawn


@dataclass(frozen=True)
class Course(KnownKeywords):
    """How a model is trained; the defaults are those of the command line.

    Attributes:
        epochs: how often all samples are seen.
        max_steps: after how many steps it ends, where epochs are more; None is never. What was begun of an epoch is
            judged as one, and a run that goes on with more steps goes on in its middle.
        batch_size: how many of them a step takes.
        learning_rate, schedule: the rate, and how it changes from step to step.
        init: how weights begin: 'keep' their stored values, or drawn as 'xavier', 'he' or 'normal'.
        seed: of the order of the samples, of weights that are drawn, and of what the model draws at random.
        metrics: what is measured on the validation data besides the loss; () is what suits the loss. The best epoch is
            that with the best of the first one named here, or where none is, that with the least validation loss; of
            equal ones the first. Without validation data the last epoch counts.
        patience: after how many epochs without a better validation it ends; None is never.
        eval_every: how many steps lie between judgements on the validation data, which are told, logged and drawn,
            and decide nothing: the best epoch, patience and schedule go by those at the ends of epochs; 0: these alone.
        save_every: how many steps lie between checkpoints; 0: they are written after each epoch.
        use_ema: evaluate and write the moving averages (EMA) that `Options.ema` keeps, in place of the weights.
        keep_mode: evaluate and write the model in the mode in which it came; else BatchNormalization and Dropout are
            in inference mode, however they were trained.
        provider, threads: what it runs on; see `Trainer`.
        prefix, val_prefix: what the names in the data have before those of the inputs.
        sequences: how text and lists of tokens become samples.
        samples: how data become samples: columns, names of classes, pictures, normalization, balance.
        classes: how many the last layer is to tell apart, with weights drawn anew; None: as many as it does.
        memory: the bytes that a step may take, beyond what the process and its data take: what is computed again, and
            in how many runs a step is taken, is then chosen so; None: no limit.
        reset: glob patterns of trained weights that are drawn anew, by `init`, or 'xavier' where that is 'keep'.

    Raises:
        UsageError: there is no such field, or a word, a number or a type does not fit; the message names it.
    """

    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
    learning_rate: float = RATE
    schedule: str = "constant"
    init: Init = "keep"
    seed: int = 0
    metrics: tuple[str, ...] = ()
    patience: int | None = None
    eval_every: int = 0
    save_every: int = 0
    use_ema: bool = False
    keep_mode: bool = False
    provider: str = "cpu"
    threads: int | None = None
    prefix: str = ""
    val_prefix: str = ""
    sequences: SequenceOptions = field(default_factory=SequenceOptions)
    samples: SampleOptions = field(default_factory=SampleOptions)
    classes: int | None = None
    reset: tuple[str, ...] = ()
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 1), ("eval_every", 0), ("save_every", 0)):
            checks.at_least(name, getattr(self, name), low, whole=True)
        for name in ("max_steps", "patience", "memory"):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), 1, whole=True)
        if self.threads is not None:
            checks.threads(self.threads)
        if not checks.is_number(self.learning_rate):
            raise UsageError(f"`learning_rate={self.learning_rate!r}`: a finite number is wanted")
        checks.one_of("init", self.init, Init)
        checks.at_least("seed", self.seed, 0, whole=True)
        object.__setattr__(
            self, "metrics", checks.tuple_of("metrics", self.metrics, str, "such as metrics=('accuracy',)")
        )
        checks.flag("use_ema", self.use_ema)
        checks.flag("keep_mode", self.keep_mode)
        for name in ("schedule", "provider", "prefix", "val_prefix"):
            checks.text(name, getattr(self, name))
        if self.classes is not None:
            checks.at_least("classes", self.classes, 1, whole=True)
        object.__setattr__(self, "reset", checks.tuple_of("reset", self.reset, str, "such as reset=('*.head.*',)"))
        checks.of_type("sequences", self.sequences, SequenceOptions, "SequenceOptions(...)")
        checks.of_type("samples", self.samples, SampleOptions, "SampleOptions(...)")


@dataclass(frozen=True)
class Trained:
    """What came of a run.

    Attributes:
        reason: why it ended: 'done', 'max steps', 'no better' or 'stopped'; then nothing was written but the
            checkpoint.
        epochs: what each epoch has come to: 'loss', and 'val_loss' and 'val_<metric>' with validation data.
        best: the epoch whose weights were taken, counted from 1.
        by: what says which epoch is best, a name in `epochs`; "" where the last one is taken, as nothing says so.
        steps: how many were taken in all.
        seconds: how long this call took.
        files: what was written: the model, then the folder of the run, in which its report is too.
    """

    reason: str
    epochs: list[dict[str, float]]
    best: int
    by: str
    steps: int
    seconds: float
    files: list[Path]


@judged
def run_train(
    model: ModelSource,
    data: str | Path,
    out: str | Path | None = None,
    options: Options | None = None,
    course: Course | None = None,
    *,
    val: str | Path | float | None = None,
    adapter: str | Path | None = None,
    adapter_from: str | Path | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    new_data: bool = False,
    force: bool = False,
    tell: Tell = silent,
    watch: Watch = unwatched,
    log: Sequence[LogForm] = (),
    picture: str | Path | None = None,
    communicator: Communicator | None = None,
) -> Trained:
    """Train the model in a file on data in others, and write it with the weights that were found.

    With validation data these are the weights of the best epoch, else the last ones.

    Args:
        model: the inference model.
        data, val: the data to train on and to validate on; see `open_data`. A number below 1 is the share of `data`
            that is held out for validation.
        out: the trained model, of the same graph, opset and names; by default `<model>.trained.onnx`.
        options: what is built of it; without an optimizer adam.
        course: how it is trained.
        adapter: a file or folder for the low-rank adapters alone; its form goes by its name, see `AdapterTarget`.
        adapter_from: adapters to begin with, in any of the forms; without `Options.lora` theirs is taken.
        run: the folder of checkpoints and log; by default `<out>.run`.
        resume: go on from the folder's checkpoint.
        new_data: with `resume`: on purpose with other training data, of as many samples.
        force: replace a file that onnxgrad did not write.
        tell: takes what is narrated.
        watch: takes what is told of each step and each judgement, see `Stepped` and `Judged`.
        log: the forms in which the log is written to the run's folder besides train.jsonl: 'csv' is train.csv,
            'tensorboard' a folder that TensorBoard shows.
        picture: a page of HTML with the picture of the training model, to which the report in HTML links.
        communicator: connects this process to others that train with it; then each takes its part of every batch,
            and the process of rank 0 evaluates and writes for all.

    Raises:
        UsageError: the model, the data and the options do not fit each other, or a file would be replaced.
        UnsupportedError: the model can't be differentiated, or has a loop that never ends.
        OnnxgradError: a file can't be read or written, or the loss became infinite or no number.
    """
    checks.path("data", data)
    adapter_from, run = checks.path_or_none("adapter_from", adapter_from), checks.path_or_none("run", run)
    if new_data and not resume:
        raise UsageError("`new_data` goes with `resume`", "a run that begins takes any data: leave it out")
    log = checks.tuple_of("log", log, str, "such as log=('csv',)")
    for form in log:
        checks.one_of("log", form, LogForm)
    start, link = time.perf_counter(), communicator or Alone()
    written = None if adapter is None else AdapterTarget(adapter)
    ready, target = _ready(
        model, data, val, out, options or Options(), course or Course(), written, adapter_from, force, link, tell,
        run if resume else None, resume,
    )  # fmt: skip
    picture = page_for(checks.path_or_none("picture", picture), target)
    if picture is not None:
        check_target(picture, ready.original, ready.path, force)
    place = run or _run_of(target)
    with rank_zero_folder(place, link) as folder, asked_to_stop(link, place, tell) as stop:
        loop = ready.loop(folder, stop, watch, log)
        _resume(loop, link, resume, new_data, drawing(ready.built.model), tell)
        if link.rank == 0:
            ready.preprocessing.write_to_run(folder.path)
        reason = loop.run()
        if reason != "stopped" and ready.evaluator is not None:
            loop.take_best()
    epochs = loop.progress.epochs
    best, by = loop.progress.best, loop.watched if ready.evaluator is not None else ""
    if not best:  # nothing was judged, or by what was no number
        if by and epochs and reason != "stopped":
            name = by.replace("val_", "validation ")
            tell(f"caution: the {name} was no finite number in any epoch: the weights of the last one are taken", 0)
        best, by = len(epochs), ""
    found = Trained(reason, epochs, best, by, ready.trainer.steps, time.perf_counter() - start, [folder.path])
    if reason == "stopped" or link.rank:
        return found
    found = replace(found, files=[*ready.write(target, written, force), *([picture] if picture else []), folder.path])
    _report(folder, ready, found, picture)
    return found


MOST_CLASSES = 30
"""Of more classes a confusion matrix is no table for the eye; `onnxgrad evaluate` has it as JSON."""


@dataclass
class _Run:
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

    def loop(self, folder: RunFolder, stop: Callable[[], bool], watch: Watch, logs: Sequence[LogForm]) -> Loop:
        """The steps to take."""
        course, evaluator = self.course, self.evaluator
        whole = course.epochs * len(self.batches)
        steps = whole if course.max_steps is None else min(whole, course.max_steps)
        data = {"training": self.samples, **({"validation": evaluator.data} if evaluator else {})}
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
            eval_every=course.eval_every, logs=logs,
            model=_fingerprint(self.built, self.samples.prepared_by(course.samples)),
            digests={use: samples.digest() for use, samples in data.items()},
        )  # fmt: skip

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

    def write(self, target: Path, adapter: AdapterTarget | None, force: bool) -> list[Path]:
        """Write the model with the weights of now, and the adapters alone if asked for; both or none."""
        state, roles = self.trainer.state(), self.trainer.roles
        adapters = roles.adapters
        weights = {**self.trainer.weights(), **{name: state[average] for name, average in self.ema.items()}}
        found = merge(self.original, adapters, weights, self.path, state, self.course.keep_mode, roles.quantized)
        self.preprocessing.write_to(found)
        check_target(target, found, self.path, force)
        if adapter is not None:
            adapter.check(found, self.path, force)
        with Switch(target) as switch:
            files = stage_model(switch, found, target, self.path, check=check_opens(found, self.original, self.path))
            if adapter is not None:
                files += adapter.stage(switch, self.original, adapters, self.adapter_values(weights, state))
            switch.commit()
        return files


def _ready(
    model: ModelSource, data: str | Path, val: str | Path | float | None, out: str | Path | None, options: Options,
    course: Course, adapter: AdapterTarget | None, adapter_from: Path | None, force: bool, link: Communicator,
    tell: Tell, run: Path | None, resume: bool,
) -> tuple[_Run, Path]:  # fmt: skip
    """Build the training model, open the data, and say where the trained one goes."""
    options = replace(options, optimizer=options.optimizer or "adam", embed_state=False)  # the trainer begins it
    if model == STREAM or str(out) == STREAM:
        raise UsageError("a run reads its model from a file and writes to one", "name both")
    if adapter is not None and not options.lora and adapter_from is None:
        raise UsageError("`adapter`: no adapters are trained", "ask for them with `lora=RANK`")
    original, path = own_model(model)
    check_is_original(original)
    begun = None if adapter_from is None else read_adapters(adapter_from, original, tell)
    target, asked = _target(model, original, path, out, adapter, force), course
    built, options, course = _built(original, path, options, course, data, begun, link, tell)
    trainer = _trainer(built, course, link)
    check_stored(original, _own(original, trainer))
    check_branches(original, trainer.roles.adapters)
    init_weights(trainer, built, original, course.init, course.seed, course.reset)
    if begun is not None:
        begin_from(trainer, *begun)
    values = {name: buffer.array for name, buffer in trainer.buffers.items()}
    ema = check_ema(trainer.roles.averages, values) if course.use_ema else {}
    known = _known(original, course, run or _run_of(target), resume)
    samples, validation = _data(data, val, built, trainer, course, known, tell)
    evaluator = None
    if validation is not None:
        evaluator = _evaluator(original, path, options, course, trainer, validation, link, ema, tell)
    agree(link, {"samples": np.array(len(samples))}, "data")
    weights = balance(samples, trainer.roles.losses[0].label, tell) if course.samples.balance else None
    batches = Batches(
        samples, course.batch_size, course.seed, rank=link.rank, world=link.world, weights=weights, tell=tell
    )
    if course.batch_size != asked.batch_size and (rest := len(samples) % asked.batch_size):
        tell(f"the last {rest} samples of an epoch are of one step with the first ones of the next", 0)
    if options.accumulate > len(batches):
        raise UsageError(
            f"`accumulate={options.accumulate}`: an epoch has {len(batches)} batches, so it would take no step",
            "choose a smaller one, or a smaller `batch_size`",
        )
    ready = _Run(original, path, course, built, trainer, samples, evaluator, batches, ema)
    if adapter is not None:  # the form has a place for all that there will be
        adapter.make(original, trainer.roles.adapters, ready.adapter_values(trainer.weights(), trainer.state()))
    return ready, target


def _run_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.run")


def _known(original: ModelProto, course: Course, run: Path, resume: bool) -> Preprocessing:
    """What is known of the data: what a run that goes on was begun with, or what the model says that was trained."""
    begun = Preprocessing.of_run(run) if resume else None
    if begun is not None:
        return begun
    known = Preprocessing.of_model(original)
    return known if course.classes is None else replace(known, classes={})


def _target(
    model: ModelSource, original: ModelProto, path: Path | None, out: str | Path | None, adapter: AdapterTarget | None,
    force: bool,
) -> Path:  # fmt: skip
    """Where the trained model goes: there, and where its adapters go, files may be written."""
    target = target_of(model, out, "trained")
    assert target is not None
    check_target(target, original, path, force)
    if adapter is not None:
        if adapter.path.resolve() == target.resolve():
            raise UsageError(f"`adapter`: '{adapter.path}' is the trained model", "name another file")
        adapter.check(original, path, force)
    return target


def _built(
    original: ModelProto, path: Path | None, options: Options, course: Course, data: str | Path,
    begun: tuple[Sequence[Adapter], Arrays] | None, link: Communicator, tell: Tell,
) -> tuple[TrainingModel, Options, Course]:  # fmt: skip
    """The training model, and options and course with what follows from `begun`, adapters that it begins with, from the
    data, and from the memory that there is.

    The original gets the head that is asked for.
    """
    if begun is not None:
        options = as_asked(options, begun[0])
    if course.classes is not None:
        fresh = with_classes(original, options.losses[0].output or options.output, course.classes, course.seed)
        options = _also_trained(options, fresh)
    options = with_empty_pasts(original, options, lambda: names_in(data), tell)
    if course.memory is None:
        built = build(original, options, path=path)
    else:
        plan = _within(course.memory, original, path, options, course, link, tell)
        built, options = plan.built, plan.options
        course = _in_runs(course, plan.runs)
    check_ends(built.graph)
    for caution in built.training.cautions:
        if caution.subject == MODE:
            tell(f"caution: {caution}", 0)
    return built, options, course


def _within(
    limit: int, original: ModelProto, path: Path | None, options: Options, course: Course, link: Communicator,
    tell: Tell,
) -> Plan:  # fmt: skip
    """A way to take a step within a limit of memory."""
    if link.world > 1 or find_provider(course.provider) != CPU:
        raise UsageError("`memory` is foretold of one process on the processor", "leave it out")
    whole = "" if course.schedule == "constant" else "the schedule counts runs"
    return planned(
        lambda asked: build(original, asked, path=path),
        options, limit, course.batch_size, course.threads, whole, tell,
    )  # fmt: skip


def _in_runs(course: Course, runs: int) -> Course:
    """The course with as many runs for a step: what is counted in steps is so many more runs."""
    return replace(
        course,
        batch_size=course.batch_size // runs,
        max_steps=None if course.max_steps is None else course.max_steps * runs,
        eval_every=course.eval_every * runs,
        save_every=course.save_every * runs,
    )


def _also_trained(options: Options, names: Sequence[str]) -> Options:
    """The options with some weights chosen too, where not all are trained."""
    if not (options.train or options.preset or options.train_last or options.lora):
        return options
    return replace(options, train=(*options.train, *map(glob.escape, names)))


def _own(original: ModelProto, trainer: TrainerBase) -> list[str]:
    """What a training changes of the model's own tensors: weights, those with adapters, running statistics."""
    roles, adapters = trainer.roles, trainer.roles.adapters
    factors = {name for adapter in adapters for name in adapter.names}
    kept = [name for name in roles.successors if name not in factors and name not in roles.slots]
    return [*stored_as(original, roles.quantized, kept), *(adapter.weight for adapter in adapters)]


def _data(
    data: str | Path,
    val: str | Path | float | None,
    built: TrainingModel,
    trainer: TrainerBase,
    course: Course,
    known: Preprocessing,
    tell: Tell,
) -> tuple[Data, Data | None]:
    """The training data, and the validation data."""
    inputs, ranges = with_sizes_of_pasts(trainer.inputs, built.graph), ranges_of(built.model)

    def opened(source: str | Path, prefix: str, known: Preprocessing) -> Data:
        terms, options, how = trainer.roles.losses, course.sequences, course.samples
        return open_data(
            source, inputs, ranges, prefix=prefix, terms=terms, options=options, samples=how, known=known, tell=tell
        )

    samples, validation = opened(data, course.prefix, known), None
    samples.tell_padding(tell)
    share = None if val is None else fraction_of(val)
    if val is not None and share is None:
        learnt = {**known.classes, **samples.preprocessing(trainer.roles.losses).classes}
        validation = opened(str(val), course.val_prefix, replace(known, classes=learnt))
    elif share is not None:
        if course.val_prefix:
            raise UsageError("`val_prefix` goes with `val=DATA`, not with a share of `data`", "leave it out")
        samples, validation = held_out(samples, share, course.seed)
        tell(f"{len(validation)} of {len(samples) + len(validation)} samples are held out for validation", 0)
    return prepared(samples, validation, inputs, trainer.roles, course.samples, known, course.seed, tell)


def _resume(loop: Loop, link: Communicator, resume: bool, new_data: bool, drawn: Sequence[str], tell: Tell) -> None:
    """Go on from the folder's checkpoint if that is asked for, and never over one that it is not asked for."""
    folder = loop.folder
    begun = link.told(folder.begun)
    if begun and not resume:
        raise UsageError(
            f"'{folder.path}' holds a run already", "go on with it with `resume`, or name another folder with `run`"
        )
    if resume and not begun:
        raise UsageError(f"`resume`: '{folder.path}' holds no checkpoint", "leave `resume` out to begin a run")
    if resume:
        loop.resume(new_data)
        tell(f"going on after step {loop.trainer.steps}", 0)
        if drawn:
            tell(f"{', '.join(drawn)} will draw other random numbers than in a run that was never cut off", 0)


def _fingerprint(built: TrainingModel, prepared: str) -> str:
    """Eight digits that tell training models apart by nodes, constants and frozen weights, and versions of onnxgrad.

    What is done to data before a model sees them, in words, counts as a part of it.
    """
    graph, check = built.model.graph, zlib.crc32((tool_version() + prepared).encode())
    stored = (tensor for tensor in graph.initializer if tensor.name not in built.training.state)
    for message in (*graph.node, *stored):
        check = zlib.crc32(message.SerializeToString(deterministic=True), check)
    return f"{check:08x}"


def _report(folder: RunFolder, ready: _Run, found: Trained, picture: Path | None) -> None:
    """Write the reports to the run's folder, and the picture of the training model to its page."""
    told = asdict(ready.course)
    told |= told.pop("sequences") | _shown(told.pop("samples"))
    asked = {flag_of(name): value for name, value in told.items() if value}
    sets = {"training": ready.samples, **({"validation": ready.evaluator.data} if ready.evaluator else {})}
    log = folder.history()
    run = Run(
        ready.path.name if ready.path else "",
        found.reason, found.epochs, found.best, found.by, found.steps, found.seconds, asked,
        {use: (str(data.source), len(data)) for use, data in sets.items()},
        [str(file) for file in found.files], Curve.of(log), Curve.others(log), ready.confusion(),
        make_report(built=ready.built),
    )  # fmt: skip
    link = "" if picture is None else quote(Path(relpath(picture, folder.path)).as_posix())
    document = replace(page(run), picture=link)
    if picture is not None:
        save_bytes(drawn(draw(ready.built.model, ready.path)).encode(), picture)
    written = {"report.md": markdown(document), "report.html": html(document)}
    for name, text in {**written, **{picture.file: picture.svg for picture in run.pictures}}.items():
        save_bytes(text.encode(), folder.path / name)


def _shown(samples: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked of the samples, as it would be typed."""
    columns = [f"{column}={feed}" for column, feed in samples["columns"].items()]
    function = getattr(samples["transform"], "__name__", None)
    return {**samples, "columns": columns, "transform": function}


def _trainer(built: TrainingModel, course: Course, link: Communicator) -> TrainerBase:
    provider = find_provider(course.provider)
    if link.world == 1:
        return Trainer(built, provider=provider, threads=course.threads, seed=course.seed)
    return ParallelTrainer(built, link, provider=provider, threads=course.threads, seed=course.seed)


def _evaluator(
    model: ModelProto, path: Path | None, options: Options, course: Course, trainer: TrainerBase, data: Data,
    link: Communicator, ema: Mapping[str, str], tell: Tell,
) -> Evaluator:  # fmt: skip
    session = EvalSession(
        model, options, trainer.buffers, path=path, provider=find_provider(course.provider), threads=course.threads,
        keep_mode=course.keep_mode,
    )  # fmt: skip
    metrics = metrics_of(course.metrics, trainer.roles.losses)
    batches = Batches(data, data.batch_size or course.batch_size, shuffle=False, tell=tell)
    evaluator = RankZeroEvaluator(session, data, batches, metrics, ema, link)
    if link.rank == 0:
        evaluator.check(trainer.buffers)
    return evaluator
