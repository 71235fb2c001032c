"""The folder of a run: its checkpoints and its log, held by one process at a time.

A checkpoint is written under a temporary name and renamed once the disk has it, so that a process that is killed, or
a machine that loses its power, at any moment leaves a whole one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.common.inputs import check_is_no_input
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files import Switch, hold, is_special, opened, save_bytes, tidy, told
from onnxgrad_cli.training.data.preprocessing import FILE as PREPROCESSING
from onnxgrad_cli.training.run.logs import CSV, EVENTS, TENSORBOARD, Sink, sinks
from onnxgrad_cli.training.run.progress import OF_A_RUN, check_progress, check_run, is_log_line
from onnxgrad_cli.training.run.tensors import load_tensors, load_words, tensor_bytes

CHECKPOINT, BEST, LOG, LOCK = "checkpoint.safetensors", "best.safetensors", "train.jsonl", "lock"

NAMES = (CHECKPOINT, BEST, LOG, LOCK, CSV, TENSORBOARD, PREPROCESSING)
"""What is a run's own in its folder."""


class Log:
    """One JSON object a line. Lines are gathered and written once a second: alone, each costs more than a small step.

    Who is killed may lose those of the last second; no checkpoint is of a step that the log does not have, for the
    loop has them written before it saves.
    """

    def __init__(self, path: Path, others: Sequence[Sink] = ()) -> None:
        self._path, self._others = path, others
        self._lines: list[Mapping[str, Any]] = []
        self._written = time.monotonic()

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line, now or soon.

        Raises:
            OnnxgradError: the file can't be written.
        """
        self._lines.append(line)
        for other in self._others:
            other.add(line)
        if time.monotonic() - self._written > 1:
            self.write()

    def note(self, line: Mapping[str, Any]) -> None:
        """Take a line of words for this log alone: the other forms have numbers."""
        self._lines.append(line)

    def write(self) -> None:
        """Write all lines that are not yet written.

        Raises:
            OnnxgradError: the file can't be written.
        """
        with told(self._path), self._path.open("a", encoding="utf-8") as stream:
            stream.writelines(strict_json.dumps(line) + "\n" for line in self._lines)
        self._lines, self._written = [], time.monotonic()
        for other in self._others:
            other.write()


class RunFolder:
    """A folder that this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return holds_checkpoint(self.path)

    def clear(self, files: Iterable[Path]) -> None:
        """Remove the files of an earlier run. Other files in the folder stay.

        Args:
            files: what runs write to the folder; see `check_replaceable`.

        Raises:
            UsageError: a file is an input.
            OnnxgradError: a file can't be removed.
        """
        files = [self.path / CHECKPOINT, *files]  # in this order, so that no later run continues a half-removed one
        for file in files:
            check_is_no_input(file)
        for file in files:
            with told(file):
                if file.is_file() or file.is_symlink():
                    file.unlink()
        events = self.path / TENSORBOARD
        if events.is_dir() and not events.is_symlink():
            for file in events.glob(EVENTS):
                with told(file):
                    file.unlink()
            with suppress(OSError):  # it holds files of other programs
                events.rmdir()

    def save(self, values: Mapping[str, np.ndarray], progress: Mapping[str, Any], best: bool = False) -> None:
        """Write a checkpoint; where it is kept as the best one too, both take their names once both are whole.

        Args:
            values: weights and state.
            progress: what else it takes to go on; JSON must hold it.
            best: keep it as the best one, too.

        Raises:
            OnnxgradError: it can't be written; the one before is whole.
        """
        data = tensor_bytes(values, {"progress": progress})
        with Switch(self.path / CHECKPOINT) as switch:
            for name in (BEST,) * best + (CHECKPOINT,):
                switch.stage(self.path / name, methodcaller("write", data), durable=True)
            switch.commit()

    def growth(self, size: int, best: bool) -> int:
        """Return the bytes by which the folder grows: a new checkpoint is whole before the old one is removed.

        Args:
            size: the bytes of weights and state.
            best: the best checkpoint is kept, too.
        """
        names = (CHECKPOINT, *[BEST] * best)
        there = sum(file.stat().st_size for name in names if (file := self.path / name).is_file())
        return 2 * len(names) * size - there

    def load(self, best: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The values and the progress of the last checkpoint, or of the best one.

        Raises:
            OnnxgradError: it can't be read, is damaged, or is of no run.
        """
        path = self.path / (BEST if best else CHECKPOINT)
        values, said = load_checkpoint(path)
        check_run(path, said)
        return values, said

    def history(self) -> list[dict[str, Any]]:
        """What the log says."""
        return [line for _, line in _lines(self.path / LOG)]

    @contextmanager
    def log(self, steps: int, forms: Sequence[LogForm] = (), results: Sequence[str] = ()) -> Iterator[Log]:
        """The log; what it says of steps after `steps` is forgotten, for they come again.

        Args:
            steps: how many were taken before.
            forms: in which other forms it is written, too.
            results: what a judgement says, by the names in its lines.
        """
        file = self.path / LOG
        kept = [text for text, line in _lines(file) if line["step"] <= steps] if steps else []
        save_bytes("".join(kept).encode(), file)
        log = Log(file, sinks(self.path, forms, steps, results))
        try:
            yield log
        except BaseException:
            with suppress(OnnxgradError):  # the first error is the one to tell
                log.write()
            raise
        log.write()


def _lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The whole lines of a log, as text and as what they say: the last one may have been cut.

    Raises:
        OnnxgradError: a line is none of a log's.
    """
    if not file.exists():
        return []
    if not file.is_file():
        raise OnnxgradError(f"'{file}' is no log: it is a folder, a device or a pipe", "move it away")
    try:
        text = file.read_text("utf-8", errors="replace")
    except OSError as error:
        raise OnnxgradError(
            f"'{file}' can't be read: {error.strerror}", "move it away: a run goes on without"
        ) from None
    found = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("}\n"):
            continue
        try:
            said = strict_json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not is_log_line(said):
            raise OnnxgradError(
                f"'{file}', line {number}: this is no line of a log",
                "correct or remove it: the log is there to be read, and a run goes on without what it lacks",
            )
        found.append((line, said))
    return found


def load_checkpoint(path: Path, tell: Tell = silent) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The values in a checkpoint, and the progress of its run.

    Args:
        path: the file.
        tell: takes a line where another program has written it, without checksums.

    Raises:
        OnnxgradError: there is none, it is damaged, or it is a file of another kind, or one without values.
    """
    values, words = load_tensors(path, tell)
    if "progress" not in words:
        raise OnnxgradError(f"'{path}' is no checkpoint of onnxgrad", "`onnxgrad train` writes them")
    said = words["progress"]
    if isinstance(said, dict) and "nominal" in said:
        raise OnnxgradError(f"'{path}' is a nominal checkpoint: it has names, shapes and types, but no values")
    check_progress(path, said, values)
    return values, said


def _check_files(folder: Path) -> None:
    """Refuse a folder with a pipe or a device: in the place of a log it would let whoever opens it wait for ever."""
    for file in folder.iterdir():
        if is_special(file):
            raise OnnxgradError(f"`run`: '{file}' is no file: it is a device or a pipe", "move it away")


def holds_checkpoint(path: Path) -> bool:
    """Return True if a folder holds a checkpoint, or a file of that name."""
    return (path / CHECKPOINT).exists()


def check_replaceable(path: Path, files: Iterable[Path]) -> None:
    """Make sure that no run has to replace files that another program or a user has written.

    A folder is a run's if its checkpoint says so. A run that was killed before its first checkpoint leaves its lock.

    Args:
        path: the folder.
        files: what runs write to it.

    Raises:
        UsageError: one of the files exists, and the folder is not a run's.
    """
    if not holds_checkpoint(path):
        ours = (path / LOCK).is_file() and not (path / LOCK).stat().st_size
    else:
        try:
            progress = load_words(path / CHECKPOINT).get("progress")
            ours = isinstance(progress, dict) and progress.keys() >= OF_A_RUN.keys()
        except OnnxgradError:
            ours = False
    foreign = None if ours else next((file for file in files if os.path.lexists(file)), None)
    if foreign is not None:
        raise UsageError(
            f"`run`: '{foreign}' is not a file of a run of onnxgrad, so it is not replaced",
            "name another folder with `run`",
        )


@contextmanager
def run_folder(path: Path) -> Iterator[RunFolder]:
    """Make a folder, and hold it as long as the block runs.

    Raises:
        UsageError: another process holds it.
        OnnxgradError: it can't be made, or holds what is no file.
    """
    with ExitStack() as held:
        try:
            path.mkdir(parents=True, exist_ok=True)
            alone = hold(held.enter_context(opened(path / LOCK)))
        except OSError as error:
            what = "written to" if os.path.isdir(path) else "made"
            raise OnnxgradError(
                f"`run`: '{path}' can't be {what}: {error.strerror}", "name another folder with `run`"
            ) from None
        if not alone:
            raise UsageError(f"`run`: another run is going on in '{path}'", "name another folder with `run`")
        with suppress(PermissionError):  # who may write in a folder need not be one who may read it
            _check_files(path)
        tidy(path)
        yield RunFolder(path)
