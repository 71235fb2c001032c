"""From an inference model and data to a trained inference model, in one call."""

from __future__ import annotations

import filecmp
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import LogForm, Resume
from onnxgrad_cli.common.full_disk import check_space
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import STREAM, ModelSource, Switch, check_apart, check_target
from onnxgrad_cli.jobs.build_attempt import page_for
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.jobs.train.course import Course
from onnxgrad_cli.jobs.train.prepare import prepare
from onnxgrad_cli.jobs.train.report import REPORTS, files_in, files_of_runs, stage_report
from onnxgrad_cli.jobs.train.settings import settings_of
from onnxgrad_cli.jobs.train.trained import Trained
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.adapters.formats import AdapterTarget, files_of
from onnxgrad_cli.training.distributed.communicator import Alone, Communicator
from onnxgrad_cli.training.loop import Loop
from onnxgrad_cli.training.run.folder import check_replaceable, holds_checkpoint
from onnxgrad_cli.training.run.interrupt import asked_to_stop
from onnxgrad_cli.training.run.rank_zero import rank_zero_folder
from onnxgrad_cli.training.run.watch import Watch, unwatched
from onnxgrad_cli.training.steps.base import drawing
from onnxgrad_cli.training.steps.parallel import agree


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
    resume: Resume = "never",
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
        run: the folder of checkpoints and log; by default `<out>.run`, where `out` is a link, too.
        resume: continue from the folder's checkpoint. 'must' requires one; 'auto' begins a run if there is none, and
            does nothing if the run is finished.
        new_data: with `resume`: on purpose with other training data, of as many samples.
        force: replace an earlier run in the folder, unless it is resumed, and files that onnxgrad did not write.
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
    options, course = options or Options(), course or Course()
    keep(data, val, course.sequences.tokenizer, *(spec.name for spec in options.losses), *course.metrics)
    keep(*([] if adapter_from is None else files_of(adapter_from)))
    checks.one_of("resume", resume, Resume)
    if new_data and resume == "never":
        raise UsageError("`new_data` goes with `resume`", "a run that begins takes any data: leave it out")
    log = checks.tuple_of("log", log, str, "such as log=('csv',)")
    for form in log:
        checks.one_of("log", form, LogForm)
        if form == "tensorboard":
            load_package("tensorboardX.event_file_writer", "`log='tensorboard'`")  # before an earlier run is removed
    start, link = time.perf_counter(), communicator or Alone()
    target, place = _places(model, out, run)
    resumed = link.broadcast(_is_resumed(place, resume, force) if link.rank == 0 else None)
    written = None if adapter is None else AdapterTarget(adapter)
    ready = prepare(
        model, data, val, target, options, course, written, adapter_from, force, link, tell, place if resumed else None
    )
    picture = page_for(checks.path_or_none("picture", picture), target)
    if picture is not None:
        check_target(picture, ready.original, ready.path, force)
    named = [target, *(written.files if written else ()), *([picture] if picture else ())]
    check_apart([*files_in(place, ready), *named])
    with rank_zero_folder(place, link) as folder, asked_to_stop(link, place, tell) as stop:
        settings = settings_of(options, course, data=data, val=val, adapter_from=adapter_from)
        loop = ready.loop(folder, stop, watch, log, settings)
        if link.broadcast(folder.begun) and not resumed and not force:
            raise _holds_a_run(place)  # it was begun since the first look
        agree(link, {use: np.array(digest) for use, digest in loop.digests.items()}, "data")
        if resumed:
            _resume(loop, new_data, drawing(ready.built.model), tell)
        if link.world > 1:
            agree(link, {name: buffer.read() for name, buffer in ready.trainer.buffers.items()}, "weights")
        if link.rank == 0:
            if not resumed:
                folder.clear(files_of_runs(place))
            ready.preprocessing.write_to_run(folder.path)
            size = sum(buffer.array.nbytes for buffer in ready.trainer.buffers.values())
            growth = folder.growth(size, ready.evaluator is not None)
            check_space(
                [(folder.path, growth), (target.parent, ready.original.ByteSize())],
                "free some space, or choose other places with `run` and `out`",
            )
        begun_at = loop.trainer.steps if resumed else -1
        reason = loop.run()
        if reason != "stopped" and ready.evaluator is not None:
            loop.take_best()
    if count := loop.progress.uncounted:
        tell(
            f"caution: no label counted in {count} of {loop.trainer.steps} batches: they are not in the mean loss, and "
            "their gradient is 0",
            0,
        )
    epochs = loop.progress.epochs
    best, by = loop.progress.best, loop.watched if ready.evaluator is not None else ""
    if not best:  # nothing was judged, or by what was no number
        if by and epochs and reason != "stopped":
            name = by.replace("val_", "validation ")
            tell(f"caution: the {name} was no finite number in any epoch: the weights of the last one are taken", 0)
        best, by = len(epochs), ""
    found = Trained(reason, epochs, best, by, ready.trainer.steps, time.perf_counter() - start, [])
    if reason == "stopped" or link.rank:
        return found
    with Switch(target) as switch:
        files = ready.stage(switch, target, written, force)
        others = [place / REPORTS[0], *([picture] if picture else ())]
        if begun_at == ready.trainer.steps and all(map(Path.exists, others)) and _is_written(switch, files):
            more = "a larger `max_steps`" if reason == "max steps" else "more `epochs`"
            tell(f"'{place}' holds a finished run, so nothing was done; {more} and `resume` continue it", 0)
            return found
        found = replace(found, files=[*files, *([picture] if picture else []), folder.path])
        stage_report(switch, folder, ready, found, picture)
        switch.commit()
    return found


def _places(model: ModelSource, out: str | Path | None, run: Path | None) -> tuple[Path, Path]:
    """Return the file of the trained model and the folder of the run, which is named after the file as it was typed."""
    if model == STREAM or str(out) == STREAM:
        raise UsageError("a run reads its model from a file and writes to one", "name both")
    target = target_of(model, out, "trained", streams=False)
    assert target is not None
    named = target if out is None else Path(out)
    return target, run or named.with_name(f"{named.name}.run")


def _is_resumed(folder: Path, resume: Resume, force: bool) -> bool:
    """Return True if a run continues, before anything is read that takes time.

    Raises:
        UsageError: a resumed run has no checkpoint, or a new run would replace files of other programs.
    """
    begun = holds_checkpoint(folder)
    if resume == "must" and not begun:
        raise UsageError(
            f"`resume`: '{folder}' holds no checkpoint",
            "leave `resume` out to begin a run, or use `resume='auto'`, which begins one if there is none",
        )
    if begun and resume == "never" and not force:
        raise _holds_a_run(folder)
    resumed = begun and resume != "never"
    if not resumed:
        check_replaceable(folder, files_of_runs(folder))
    return resumed


def _holds_a_run(folder: Path) -> UsageError:
    return UsageError(
        f"'{folder}' holds a run already",
        "`force=True` replaces it, `resume` continues it, `run=DIR` uses another folder",
    )


def _resume(loop: Loop, new_data: bool, drawn: Sequence[str], tell: Tell) -> None:
    """Continue from the folder's checkpoint."""
    loop.resume(new_data)
    if loop.finished:
        return
    tell(f"going on after step {loop.trainer.steps}", 0)
    if loop.rates_before:
        tell(f"the rates are others from here on: {loop.rates}; they were {loop.rates_before}", 0)
    if drawn:
        tell(f"{', '.join(drawn)} will draw other random numbers than in a run that was never cut off", 0)


def _is_written(switch: Switch, files: Sequence[Path]) -> bool:
    """Return True if files exist with the content that was staged for them."""
    return all(file.is_file() and filecmp.cmp(switch.where(file), file, shallow=False) for file in files)
