"""Train an inference model on data, and write the trained inference model."""

from __future__ import annotations

import filecmp
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnxgrad_cli.adapters.formats import AdapterTarget, files_of
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import LogForm, Resume
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.full_disk import check_space
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.launchers import launches
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.data.read_failures import check_there
from onnxgrad_cli.errors import UsageError, conflict, missing_file, missing_value
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.files import STREAM, AtomicWriteGroup, ModelSource, check_apart, check_exists, check_target
from onnxgrad_cli.jobs.output_plan import file_of, page_for
from onnxgrad_cli.jobs.train.data_set_names import Source, sets_of
from onnxgrad_cli.jobs.train.prepared_run import PreparedRun, Trained
from onnxgrad_cli.jobs.train.report import REPORTS, files_in, files_of_runs, stage_report
from onnxgrad_cli.jobs.train.run_settings import settings_of
from onnxgrad_cli.jobs.train.set_up import prepare
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.train import Course
from onnxgrad_cli.training.distributed.communicator import Alone, Communicator
from onnxgrad_cli.training.lbfgs_loop import LbfgsLoop
from onnxgrad_cli.training.loop import TrainingLoop
from onnxgrad_cli.training.run.folder import RunFolder, check_replaceable, run_folder
from onnxgrad_cli.training.run.interrupt import asked_to_stop
from onnxgrad_cli.training.run.watch import Watch, unwatched
from onnxgrad_cli.training.steps.base import drawing
from onnxgrad_cli.training.steps.parallel import agree


@attribute_failures
@job
def run_train(
    model: ModelSource,
    data: Source,
    out: str | Path | None = None,
    options: Options | None = None,
    course: Course | None = None,
    *,
    val: Source | float | None = None,
    adapter: str | Path | None = None,
    adapter_from: str | Path | None = None,
    run: str | Path | None = None,
    resume: Resume = "never",
    new_data: bool = False,
    force: bool = False,
    tell: Tell = silent,
    watch: Watch = unwatched,
    log: Sequence[LogForm] = (),
    picture: str | Path | None = None,
    communicator: Communicator | None = None,
) -> Trained:
    """Train a model on data, and write the model with the trained weights.

    With validation data, the weights of the best epoch are written, otherwise the last ones.

    Args:
        model: the inference model.
        data: the training data; see `open_data`. Or a map: name of a data set -> its data. Each step then takes a batch
            of each set, and each loss names its set. An epoch is one pass over the first set; the others are cycled.
        val: the validation data; or a number below 1, the fraction of `data` to hold out for validation. With several
            data sets, the losses of the first one are evaluated, and the fraction is held out of it. A map with one
            entry, name of a data set -> validation data, evaluates the losses of that set.
        out: the file for the trained model, which has the same graph, opset and names; by default
            `<model>.trained.onnx`.
        options: the options of the training model. The default optimizer is adam.
        course: the settings of the training.
        adapter: a file or folder to which only the low-rank adapters are written. Its name determines the format; see
            `AdapterTarget`.
        adapter_from: a file or folder with adapters to start from, in any of the formats. If `Options.lora` is not set,
            they define it, the scaling, DoRA and the default of `Options.lora_target`. If it is set, its rank and DoRA
            must match.
        run: the folder for checkpoints and logs; by default `<out>.run`, even if `out` is a link to another file.
        resume: 'must' continues from the folder's checkpoint. 'auto' does so if there is one, otherwise begins a new
            run; it does nothing if the run is finished. 'never' begins a new run.
        new_data: with `resume`, allow other training data with the same number of samples.
        force: replace an earlier run in the folder, if it is not resumed, and files that onnxgrad did not write.
        tell: receives progress messages.
        watch: called after each step and each evaluation with an event; see `Stepped` and `Judged`.
        log: formats of the log in addition to train.jsonl: 'csv' writes train.csv, 'tensorboard' a folder for
            TensorBoard, both in the run's folder.
        picture: an HTML page with the picture of the training model. The HTML report links to it.
        communicator: connects this process to others that train together with it. Each process computes its part of
            every batch, and the process of rank 0 evaluates and writes files for all. Required if a launcher such as
            torchrun has started several processes.

    Raises:
        UsageError: the model, the data and the options don't fit each other, or an existing file would be replaced.
        UnsupportedError: the model can't be differentiated, or has a loop that never ends.
        OnnxgradError: a file can't be read or written, or the loss became infinite or NaN.
    """
    sets = sets_of(data)
    adapter_from, run = checks.path_or_none("adapter_from", adapter_from), checks.path_or_none("run", run)
    options, course = options or Options(), course or Course()
    protect_inputs(*sets.values(), *(val.values() if isinstance(val, Mapping) else [val]))
    protect_inputs(course.sequences.tokenizer, *(spec.name for spec in options.losses), *course.metrics)
    protect_inputs(*([] if adapter_from is None else files_of(adapter_from)))
    checks.one_of("resume", resume, Resume)
    if new_data and resume == "never":
        raise conflict("`new_data` requires `resume`", "leave it out: a new run accepts any data")
    log = _checked_log(log)
    start, link = time.perf_counter(), communicator or _alone()
    check_exists(model)  # before a run is found that belongs to the correct name
    target, place = _places(model, out, run)
    resumed = link.broadcast(_is_resumed(place, resume, force, sets.values()) if link.rank == 0 else None)
    written = None if adapter is None else AdapterTarget(adapter)
    ready = prepare(
        model, sets, val, target, options, course, written, adapter_from, force, link, tell, place if resumed else None
    )
    if picture is not None:
        picture = page_for(checks.path("picture", picture), target)
        check_target(picture, ready.original, ready.path, force)
    pictures = [] if picture is None else [picture]
    check_apart([*files_in(place, ready), target, *(written.files if written else ()), *pictures])
    with run_folder(place, link) as folder, asked_to_stop(link, place, tell) as stop:
        settings = settings_of(options, course, data=data, val=val, adapter_from=adapter_from)
        loop = ready.loop(folder, stop, watch, log, settings, tell)
        if link.broadcast(folder.begun) and not resumed and not force:
            raise _holds_a_run(place)  # another process has begun it since the first check
        _begin(loop, ready, link, resumed, new_data, tell)
        if link.rank == 0:
            if not resumed:
                folder.clear(files_of_runs(place))
            ready.preprocessing.write_to_run(folder.path)
            _check_space(folder, target, ready)
        begun_at = loop.trainer.steps if resumed else -1
        reason = loop.run()
        if reason != "stopped" and ready.evaluator is not None:
            loop.take_best()
    found = _trained(loop, ready, reason, time.perf_counter() - start, tell)
    if reason == "stopped" or link.rank:
        return found
    with AtomicWriteGroup(target) as switch:
        files = ready.stage(switch, target, written, force)
        exist = begun_at == ready.trainer.steps and all(map(Path.exists, [place / REPORTS[0], *pictures]))
        if exist and _is_written(switch, files):
            _tell_nothing_done(loop, place, target, reason, tell)
            return found
        found = replace(found, files=[*files, *pictures, folder.path])
        stage_report(switch, folder, ready, found, picture)
        switch.commit()
    return found


def _begin(
    loop: TrainingLoop, ready: PreparedRun, link: Communicator, resumed: bool, new_data: bool, tell: Tell
) -> None:
    """Load the checkpoint of a run that is resumed. Check that all processes have the same data and weights."""
    agree(link, {use: np.array(digest) for use, digest in loop.digests.items()}, "data")
    if resumed:
        _resume(loop, new_data, drawing(ready.built.model), tell)
    if link.world > 1:
        agree(link, {name: buffer.read() for name, buffer in ready.trainer.buffers.items()}, "weights")


def _tell_nothing_done(loop: TrainingLoop, place: Path, target: Path, reason: str, tell: Tell) -> None:
    """Report that a finished run was resumed, and how to train further."""
    more = "`resume` and " + ("a larger `max_steps`" if reason == "max steps" else "more `epochs`")
    more = f"'{target}' as the model" if loop.progress.ended else more
    ignored = f", and {loop.rates} has no effect" if loop.rates_before else ""
    again = f"to continue it, use {more}; to replace it, use `force` without `resume`"
    tell(f"'{place}' contains a finished run, so nothing was done{ignored}; {again}", 0)


def _checked_log(log: Sequence[LogForm]) -> tuple[LogForm, ...]:
    """Return the forms of the log, after checking that they can be written.

    Raises:
        UsageError: a form does not exist, or the package that writes it is not installed.
    """
    log = checks.tuple_of("log", log, str, "such as log=('csv',)")
    for form in log:
        checks.one_of("log", form, LogForm)
        if form == "tensorboard":
            load_package("tensorboardX.event_file_writer", "`log='tensorboard'`")  # before an earlier run is removed
    return log


def _check_space(folder: RunFolder, target: Path, ready: PreparedRun) -> None:
    """Check that the disks have space for the files of the run and for the trained model."""
    size = sum(buffer.array.nbytes for buffer in ready.trainer.buffers.values())
    growth = folder.growth(size, ready.evaluator is not None)
    check_space(
        [(folder.path, growth), (target.parent, ready.original.ByteSize())],
        "free some space, or choose other places with `run` and `out`",
    )


def _trained(loop: TrainingLoop, ready: PreparedRun, reason: str, seconds: float, tell: Tell) -> Trained:
    """Return the outcome of a loop that has ended, without the files. Print cautions about its loss and its metric."""
    if count := loop.progress.uncounted:
        tell(
            f"caution: {count} of {loop.trainer.steps} batches have only ignored labels; the mean loss leaves these "
            "batches out, and their gradient is 0",
            0,
        )
    epochs = loop.progress.epochs
    best, by = loop.progress.best, loop.watched if ready.evaluator is not None else ""
    if not best:  # no epoch was evaluated, or the watched value was not finite
        if by and epochs and reason != "stopped":
            name = by.replace("val_", "validation ")
            tell(f"caution: the {name} was not finite in any epoch, so the weights of the last epoch are kept", 0)
        best, by = len(epochs), ""
    return Trained(reason, epochs, best, by, ready.trainer.steps, seconds, [])


def _alone() -> Alone:
    """Return a communicator for a single process.

    Raises:
        UsageError: a launcher has started several processes. Without a communicator, all would write the same files.
    """
    if launched := launches():
        raise missing_value(
            f"{launched[0].launcher} has started {launched[0].world} processes, but run_train got no communicator",
            "pass the communicator of onnxgrad_cli.training.distributed.connected(); or pass Alone(), and each process "
            "trains by itself",
        )
    return Alone()


def _places(model: ModelSource, out: str | Path | None, run: Path | None) -> tuple[Path, Path]:
    """Return the file for the trained model, and the folder for the run.

    The folder's default name is derived from `out`.
    """
    if model == STREAM:
        raise conflict("training can't read a model from stdin", "pass the model as a file")
    target = file_of(model, out, "trained")
    named = target if out is None else Path(out)
    folder = run or named.with_name(f"{named.name}.run")
    check_apart([target, folder])
    return target, folder


def _is_resumed(folder: Path, resume: Resume, force: bool, data: Iterable[Path]) -> bool:
    """Return True if an earlier run is to be continued. Errors are raised before the slow preparation of a run.

    Raises:
        OnnxgradError: `resume` is 'must', and there is no checkpoint; or the data don't exist.
        UsageError: a new run would replace an earlier run without `force`, or files of other programs.
    """
    begun = RunFolder(folder).begun
    if resume == "must" and not begun:
        raise missing_file(
            f"`resume`: '{folder}' contains no checkpoint",
            "leave `resume` out to start a new run, or use `resume='auto'`, which starts one if there is no checkpoint",
        )
    resumed = begun and resume != "never"
    if not resumed:
        check_replaceable(folder, files_of_runs(folder))
    if begun and not resumed and not force:
        for path in data:
            check_there(path)
        raise _holds_a_run(folder)
    return resumed


def _holds_a_run(folder: Path) -> UsageError:
    return UsageError(
        f"'{folder}' already contains a run",
        "`force=True` replaces it, `resume` continues it, `run=DIR` uses another folder",
        code="file_exists",
    )


def _resume(loop: TrainingLoop, new_data: bool, drawn: Sequence[str], tell: Tell) -> None:
    """Load the folder's checkpoint into the loop, and report differences from an uninterrupted run.

    These are a changed learning rate, an empty history of L-BFGS, and random operators that will draw other numbers.
    """
    loop.resume(new_data)
    if loop.finished:
        return
    tell(f"continuing after step {loop.trainer.steps}", 0)
    if loop.rates_before:
        tell(f"the learning rate changes from here on: now {loop.rates}, before {loop.rates_before}", 0)
    if isinstance(loop, LbfgsLoop):
        tell("L-BFGS starts with an empty history, so its steps differ from those of an uninterrupted run", 0)
    if drawn:
        tell(f"{', '.join(drawn)} will draw other random numbers than in an uninterrupted run", 0)


def _is_written(switch: AtomicWriteGroup, files: Sequence[Path]) -> bool:
    """Return True if files exist already, with the content that a group of files has for them."""
    return all(file.is_file() and filecmp.cmp(switch.where(file), file, shallow=False) for file in files)
