"""The folder of a run, with its checkpoints and its log. A lock prevents two processes from using the folder at once.

A checkpoint is written under a temporary name, flushed to the disk and renamed. If the process is killed or the machine
loses power, the folder still contains a complete checkpoint.
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

from onnxgrad_cli.checkpoints.tensors import load_tensors, load_words, tensor_bytes
from onnxgrad_cli.checkpoints.validate_checkpoint import OF_A_RUN, check_progress, check_run, is_log_line
from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.common.inputs import check_is_no_input
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.data.preprocessing import FILE as PREPROCESSING
from onnxgrad_cli.errors import OnnxgradError, UsageError, conflict, unreadable, unwritable
from onnxgrad_cli.files import AtomicWriteGroup, hold, is_special, opened, save_bytes, tidy, told
from onnxgrad_cli.training.distributed.communicator import Alone, Communicator
from onnxgrad_cli.training.run.logs import CSV, EVENTS, TENSORBOARD, WITHOUT, Sink, sinks

CHECKPOINT, BEST, LOG, LOCK = "checkpoint.safetensors", "best.safetensors", "train.jsonl", "lock"

NAMES = (CHECKPOINT, BEST, LOG, LOCK, CSV, TENSORBOARD, PREPROCESSING)
"""The names of the files and folders that a run writes to its folder."""


class Log:
    """A log with one JSON object per line.

    Lines are collected and written once per second, because writing each line on its own takes longer than a small
    step. If the process is killed, the lines of the last second may be lost. The training loop writes all lines before
    each checkpoint, so the log contains all steps up to the checkpoint.
    """

    def __init__(self, path: Path | None, others: Sequence[Sink] = ()) -> None:
        """Args:
        path: the file; None writes no file.
        others: writers of the same lines in other formats.
        """
        self._path, self._others = path, others
        self._lines: list[Mapping[str, Any]] = []
        self._written = time.monotonic()

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. It may be written together with later lines.

        Raises:
            OnnxgradError: the file can't be written.
        """
        self._lines.append(line)
        for other in self._others:
            other.add(line)
        if time.monotonic() - self._written > 1:
            self.write()

    def note(self, line: Mapping[str, Any]) -> None:
        """Add a line that contains text. It is not added to the logs in other formats, which contain only numbers."""
        self._lines.append(line)

    def write(self) -> None:
        """Write all lines that have not been written yet.

        Raises:
            OnnxgradError: the file can't be written.
        """
        if self._path is not None:
            with told(self._path), self._path.open("a", encoding="utf-8") as stream:
                stream.writelines(strict_json.dumps(line) + "\n" for line in self._lines)
        self._lines, self._written = [], time.monotonic()
        for other in self._others:
            other.write()


class RunFolder:
    """The folder of a run.

    If several processes train together, only rank 0 accesses the folder, and broadcasts the contents of checkpoints.
    """

    def __init__(self, path: Path, communicator: Communicator | None = None) -> None:
        self.path, self._communicator = path, communicator or Alone()

    @property
    def begun(self) -> bool:
        """True if the folder has a checkpoint from which a run can continue."""
        return (self.path / CHECKPOINT).exists()

    def clear(self, files: Iterable[Path]) -> None:
        """Remove the files of an earlier run. Other files in the folder stay.

        Args:
            files: the files that runs write to the folder.

        Raises:
            UsageError: a file is an input.
            OnnxgradError: a file can't be removed.
        """
        files = [self.path / CHECKPOINT, *files]  # checkpoint first, so that no later run continues a half-removed one
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
            with suppress(OSError):  # the folder also has files of other programs
                events.rmdir()

    def save(self, values: Mapping[str, np.ndarray], progress: Mapping[str, Any], best: bool = False) -> None:
        """Write a checkpoint, and with `best` also the best checkpoint.

        Both files are written completely before either is renamed.

        Args:
            values: weights and state.
            progress: the other data that a resumed run needs; must be serializable as JSON.
            best: also save it as the best checkpoint.

        Raises:
            OnnxgradError: the checkpoint can't be written; the previous one is still intact.
        """
        if self._communicator.rank:
            return
        data = tensor_bytes(values, {"progress": progress})
        with AtomicWriteGroup(self.path / CHECKPOINT) as switch:
            for name in (BEST,) * best + (CHECKPOINT,):
                switch.stage(self.path / name, methodcaller("write", data), durable=True)
            switch.commit()

    def growth(self, size: int, best: bool) -> int:
        """Return the largest number of bytes by which a run may increase the size of the folder.

        While a checkpoint is written, the folder also contains the previous one.

        Args:
            size: the bytes of weights and state.
            best: True if the best checkpoint is saved, too.
        """
        names = (CHECKPOINT, *[BEST] * best)
        there = sum(file.stat().st_size for name in names if (file := self.path / name).is_file())
        return 2 * len(names) * size - there

    def load(self, best: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the weights and state, and the progress, of the last or the best checkpoint.

        All processes must call this.

        Raises:
            OnnxgradError: the checkpoint can't be read, is damaged, or does not belong to a run.
        """
        found = None
        if self._communicator.rank == 0:
            path = self.path / (BEST if best else CHECKPOINT)
            found = load_checkpoint(path)
            check_run(path, found[1])
        return self._communicator.broadcast(found)

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of the log, decoded."""
        return [line for _, line in _lines(self.path / LOG)]

    @contextmanager
    def log(self, steps: int, forms: Sequence[LogForm] = (), results: Sequence[str] = ()) -> Iterator[Log]:
        """Open the log. Remove its lines about steps after `steps`, because the run takes these steps again.

        Args:
            steps: the number of steps that the run took before.
            forms: the formats of the log in addition to JSON lines.
            results: the names of the results of an evaluation.
        """
        if self._communicator.rank:
            yield Log(None)
            return
        file = self.path / LOG
        kept = [text for text, line in _lines(file) if line["step"] <= steps] if steps else []
        save_bytes("".join(kept).encode(), file)
        log = Log(file, sinks(self.path, forms, steps, results))
        try:
            yield log
        except BaseException:
            with suppress(OnnxgradError):  # report the first error, not one that follows it
                log.write()
            raise
        log.write()


def _lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the complete lines of a log, as text and as decoded JSON. An incomplete last line is left out.

    Raises:
        OnnxgradError: the file can't be read, or a complete line is not a line of a log.
    """
    if not file.exists():
        return []
    if not file.is_file():
        raise unreadable(f"'{file}' is not a log: it is a folder, a device or a pipe", WITHOUT)
    try:
        text = file.read_text("utf-8", errors="replace")
    except OSError as error:
        raise unreadable(f"'{file}' can't be read: {error.strerror}", WITHOUT) from None
    found = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("}\n"):
            continue
        try:
            said = strict_json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not is_log_line(said):
            hint = "correct or remove the line: a run continues without it"
            raise unreadable(f"'{file}', line {number} is not a line of a log", hint)
        found.append((line, said))
    return found


def load_checkpoint(path: Path, tell: Tell = silent) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the weights and state in a checkpoint, and the progress of its run.

    Args:
        path: the file.
        tell: receives a note if the file has no checksums because another program wrote it.

    Raises:
        OnnxgradError: the file is missing, is damaged, is not a checkpoint, or contains no values.
    """
    values, words = load_tensors(path, tell)
    if "progress" not in words:
        raise unreadable(f"'{path}' is not a checkpoint of onnxgrad", "`onnxgrad train` writes them")
    said = words["progress"]
    if isinstance(said, dict) and "nominal" in said:
        message = f"'{path}' is a nominal checkpoint: it has names, shapes and types, but no values"
        raise OnnxgradError(message, code="no_data")
    check_progress(path, said, values)
    return values, said


def check_replaceable(path: Path, files: Iterable[Path]) -> None:
    """Check that a run would not replace files that another program or a user wrote.

    A folder belongs to a run if its checkpoint contains the progress of a run. A folder without a checkpoint belongs to
    a run if it has an empty lock file. A run that is killed before its first checkpoint leaves such a file.

    Args:
        path: the folder.
        files: the files that runs write to it.

    Raises:
        UsageError: a file in `files` exists, and the folder does not belong to a run.
    """
    if not RunFolder(path).begun:
        ours = (path / LOCK).is_file() and not (path / LOCK).stat().st_size
    else:
        try:
            progress = load_words(path / CHECKPOINT).get("progress")
            ours = isinstance(progress, dict) and progress.keys() >= OF_A_RUN.keys()
        except OnnxgradError:
            ours = False
    foreign = None if ours else next((file for file in files if os.path.lexists(file)), None)
    if foreign is not None:
        message = f"`run`: '{foreign}' is not a file of a run of onnxgrad, so it is not replaced"
        raise UsageError(message, "pass another folder as `run`", code="file_exists")


@contextmanager
def run_folder(path: Path, communicator: Communicator | None = None) -> Iterator[RunFolder]:
    """Create a folder, and lock it while the block runs.

    Args:
        path: the folder.
        communicator: connects the processes that train together; only rank 0 locks the folder.

    Raises:
        UsageError: another process has locked the folder.
        OnnxgradError: the folder can't be created, or it contains a pipe or a device.
    """
    if communicator is not None and communicator.rank:
        yield RunFolder(path, communicator)
        return
    with ExitStack() as held:
        try:
            path.mkdir(parents=True, exist_ok=True)
            alone = hold(held.enter_context(opened(path / LOCK)))
        except OSError as error:
            what = "written to" if os.path.isdir(path) else "created"
            hint = "pass another folder as `run`"
            raise unwritable(f"`run`: '{path}' can't be {what}: {error.strerror}", hint) from None
        if not alone:
            raise conflict(f"`run`: another run is using '{path}'", "pass another folder as `run`")
        with suppress(PermissionError):  # a user may be allowed to write in a folder but not to list it
            for file in filter(is_special, path.iterdir()):  # opening it as a log might block forever
                raise unreadable(f"`run`: '{file}' is not a file: it is a device or a pipe", "move it away")
        tidy(path)
        yield RunFolder(path, communicator if communicator is not None and communicator.world > 1 else None)
