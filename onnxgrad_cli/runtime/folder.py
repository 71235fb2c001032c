"""The folder of a run: its checkpoints and its log, held by one process at a time.

A checkpoint is written under a temporary name and renamed, so that whoever is killed at any moment leaves a whole one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.runtime.tensors import load_tensors, save_tensors

CHECKPOINT, BEST, LOG, LOCK = "checkpoint.safetensors", "best.safetensors", "train.jsonl", "lock"


class RunFolder:
    """A folder that this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.path / CHECKPOINT).exists()

    def save(self, values: Mapping[str, np.ndarray], progress: Mapping[str, Any], best: bool = False) -> None:
        """Write a checkpoint.

        Args:
            values: weights and state.
            progress: what else it takes to go on; JSON must hold it.
            best: keep it as the best one, too.

        Raises:
            OnnxgradError: it can't be written; the one before is whole.
        """
        for name in (BEST,) * best + (CHECKPOINT,):
            save_tensors(self.path / name, values, {"progress": progress})

    def load(self, best: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The values and the progress of the last checkpoint, or of the best one.

        Raises:
            OnnxgradError: it can't be read.
        """
        return load_checkpoint(self.path / (BEST if best else CHECKPOINT))

    @contextmanager
    def log(self, steps: int) -> Iterator[IO[str]]:
        """The log, one JSON object a line; what it says of steps after `steps` is forgotten, for they come again."""
        file = self.path / LOG
        kept = [line for line in _lines(file) if json.loads(line)["step"] <= steps] if steps else []
        with file.open("w", encoding="utf-8", buffering=1) as stream:
            stream.writelines(kept)
            yield stream


def _lines(file: Path) -> list[str]:
    """The whole lines of a log: the last one may have been cut."""
    if not file.exists():
        return []
    return [line for line in file.read_text("utf-8").splitlines(keepends=True) if line.endswith("}\n")]


def load_checkpoint(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The values in a checkpoint, and the progress of its run.

    Raises:
        OnnxgradError: there is none, or it is a file of another kind.
    """
    values, words = load_tensors(path)
    if "progress" not in words:
        raise OnnxgradError(f"'{path}' is no checkpoint of onnxgrad", "`onnxgrad train` writes them")
    return values, words["progress"]


@contextmanager
def run_folder(path: Path) -> Iterator[RunFolder]:
    """Make a folder, and hold it as long as the block runs.

    Raises:
        UsageError: another process holds it.
        OnnxgradError: it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK).open("a+")
    except OSError as error:
        raise OnnxgradError(f"--run: '{path}' can't be made: {error.strerror}") from None
    with lock:
        if not _hold(lock):
            raise UsageError(f"--run: another run is going on in '{path}'", "name another folder with --run")
        yield RunFolder(path)


def _hold(lock: IO[str]) -> bool:
    """Lock a file until it is closed, which the system does when the process ends, however it ends."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
