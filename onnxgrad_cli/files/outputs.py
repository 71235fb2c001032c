"""Check the output files that a user names, before any slow work is done.

An output must not be an input, a device, a pipe, or an existing file that onnxgrad did not write. If the user names a
symbolic link, the file that it links to is written.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common.full_disk import FULL, said
from onnxgrad_cli.common.inputs import check_is_no_input, is_in_input
from onnxgrad_cli.errors import UsageError, conflict, unwritable
from onnxgrad_cli.files.external_data import external_tensors, reference_of
from onnxgrad_cli.metadata import VERSION

MOST_LINKS = 40
"""Maximum number of symbolic links that are followed one after the other, as in operating systems."""

SYSTEM, MEMORY = (Path("/dev"), Path("/proc")), Path("/dev/shm")
"""System folders whose files are devices or open files (/dev, /proc), and a folder below them with ordinary files."""

UNMARKED = frozenset({".csv", ".jsonl", ".parquet"})
"""Suffixes of formats in which onnxgrad's name can't be stored, so that the writer of a file is unknown."""

ENDS = 4096
"""Number of bytes at the beginning, and at the end, of a file in which to search for onnxgrad's name."""


ANOTHER = "choose another place"
"""The hint of the error that a file can't be written. It names no option, because the file may come from any option."""


@contextmanager
def told(out: Path) -> Iterator[None]:
    """Convert errors of the operating system about writing a file to an `OnnxgradError`."""
    try:
        yield
    except OSError as error:
        hint = f"free some space, or {ANOTHER}" if error.errno in FULL else ANOTHER
        raise unwritable(f"'{out}' can't be written: {said(error)}", hint) from error


def resolve_output(out: Path, streams: bool = False) -> Path:
    """Return the file to write if a user names `out`: if it is a symbolic link, the file that it links to.

    Use this function only for names that the user typed. For other names, such as those in a run's folder, links must
    not be followed, because an attacker may have created them.

    Args:
        out: the name.
        streams: True if the option accepts '-' for standard output, so that the hint can mention it.

    Raises:
        OnnxgradError: `out` is, or links to, a device, a pipe, a socket or an open file; or links form a loop.
    """
    place, is_file = out, True
    with told(out):
        for _ in range(MOST_LINKS):
            place = Path(os.path.realpath(place.parent), place.name)
            is_file &= not any(map(place.is_relative_to, SYSTEM)) or place.is_relative_to(MEMORY)
            if not place.is_symlink():
                break
            place = place.parent / place.readlink()
        else:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if not is_file or is_special(out):
            hint = "name a file; -o - writes to standard output" if streams else "name a file"
            what = "it is, or leads to, a device, a pipe or a socket"
            raise unwritable(f"'{out}' is not a file: {what}", hint)
    return place if out.is_symlink() else out


def check_target(out: Path, model: ModelProto | None = None, source: Path | None = None, force: bool = False) -> None:
    """Check that `out` may be written, before any slow work is done.

    Args:
        model, source: the model that was read, and its file. The file, the model's external data and all other inputs
            (see `common.inputs`) must not be overwritten.
        force: replace a file that onnxgrad did not write, or whose writer is unknown.

    Raises:
        UsageError: `out` is an input, or exists, was not written by onnxgrad, and `force` is False.
        OnnxgradError: `out` can't be written.
    """
    resolve_output(out)
    read: list[Path] = []
    if source is not None and out.exists():
        data = [source.parent / reference_of(tensor).location for tensor in external_tensors(model)] if model else []
        read = [source, *dict.fromkeys(data)]
    check_is_no_input(out, read)
    if out.is_dir():
        raise unwritable(f"'{out}' is a directory", f"name a file in it: {out / 'model.train.onnx'}")
    if not out.parent.is_dir():
        raise unwritable(f"there is no folder '{out.parent}' to write '{out.name}' to", "create it first")
    if not os.access(out.parent, os.W_OK):
        raise unwritable(f"'{out}' can't be written: {_why_not(out.parent)}", ANOTHER)
    if out.is_file() and not is_ours(out):
        if is_in_input(out):
            raise conflict(f"'{out}' is in a folder of input files, which are never overwritten", "name another folder")
        if not force:
            whose = "" if out.suffix.lower() in UNMARKED else ", and onnxgrad did not write it"
            raise UsageError(f"'{out}' exists{whose}", "replace it with `force=True`", code="file_exists")


def check_apart(files: Iterable[Path]) -> None:
    """Check that all output files are different. A symbolic link counts as a file of its own: it would be replaced.

    Raises:
        UsageError: two of them are the same file.
    """
    places: set[Path] = set()
    for file in files:
        place = Path(os.path.realpath(file.parent), file.name)
        if place in places:
            raise conflict(f"'{file}' would be written twice", "give each file its own name")
        places.add(place)


def is_special(path: Path) -> bool:
    """Return True if a path is, or links to, something other than a file or folder, such as a device or a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def is_ours(path: Path) -> bool:
    """Return True if onnxgrad wrote a file, or if the file is empty.

    A model has a mark in its metadata, usually near the end of the file; training information and functions may follow.
    A report has onnxgrad's name at the beginning or the end, and an adapter file at the end.
    """
    if is_model(path):
        return mentions(path, VERSION.encode())
    with path.open("rb") as file:
        head = file.read(ENDS)
        file.seek(max(path.stat().st_size - ENDS, 0))
        return not head or b"onnxgrad" in head or b"onnxgrad" in file.read(ENDS)


def is_model(path: Path) -> bool:
    """Return True if a file begins as every ONNX model does."""
    with path.open("rb") as file:
        return file.read(1) == b"\x08"


def mentions(path: Path, words: bytes) -> bool:
    """Return True if a file contains `words`. The file must not be empty. It is searched from the end."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.rfind(words) >= 0


def check_folder(folder: Path, option: str) -> None:
    """Check that files may be written to a folder, before any slow work is done. The folder need not exist yet.

    Raises:
        OnnxgradError: the folder can't be created or written to, or is a file. The message names `option`.
    """
    place = folder.absolute()
    there = next(each for each in (place, *place.parents) if each.exists())
    if not there.is_dir():
        what = f"'{folder}' is not a folder: '{there}' is a file"
        raise unwritable(f"{option}: {what}", "name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        what = "written to" if there == place else "created"
        raise unwritable(f"{option}: '{folder}' can't be {what}: {_why_not(there)}", "name another folder")


def _why_not(folder: Path) -> str:
    """Return the reason why a folder can't be written to."""
    only_read = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
    return "its file system is read-only" if only_read else "permission denied"


def make_folder(folder: Path, option: str) -> None:
    """Create a folder if it doesn't exist.

    Raises:
        OnnxgradError: the folder can't be created. The message names the option that requires it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(f"{option}: '{folder}' can't be created: {error.strerror}") from None
