"""The file that a user names for a result: of a link the one that it leads to, and never a device or a pipe."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files.switch import is_special, told

MOST_LINKS = 40
"""Links that systems follow, one after the other."""

SYSTEM, MEMORY = (Path("/dev"), Path("/proc")), Path("/dev/shm")
"""Where names are those of devices and of open files, and a folder there that holds plain files."""


def followed(out: Path, streams: bool = False) -> Path:
    """The file that is written where a user names `out`: of a link, the file that it leads to, so that the link stays.

    Names that nobody has typed are no such, as those of files in a run's folder: a stranger may have left links there.

    Args:
        out: the name.
        streams: whether '-' would be standard output, which the hint then names.

    Raises:
        UsageError: it is, or leads to, a device, a pipe, a socket or a file that is open; see `check_is_file`.
        OnnxgradError: links lead to each other.
    """
    check_is_file(out, streams)
    return list(_steps(out))[-1] if out.is_symlink() else out


def check_is_file(out: Path, streams: bool = False) -> None:
    """Refuse what is no place for a file: nothing can be renamed to a device or to a file that is open.

    Args:
        out: what is to be written.
        streams: see `followed`.

    Raises:
        UsageError: it is, or leads to, a device, a pipe or a socket, or leads through where systems keep them.
        OnnxgradError: links lead to each other.
    """
    with told(out):
        steps = list(_steps(out))
        if any(map(_is_of_the_system, steps)) or is_special(out):
            hint = "name a file; -o - writes to standard output" if streams else "name a file"
            raise UsageError(f"'{out}' is no file: it is, or leads to, a device, a pipe or a socket", hint)


def _steps(out: Path) -> Iterator[Path]:
    """A path, and link by link what it leads to, each in the folder that it really lies in."""
    for _ in range(MOST_LINKS):
        out = Path(os.path.realpath(out.parent), out.name)
        yield out
        if not out.is_symlink():
            return
        out = out.parent / out.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_of_the_system(path: Path) -> bool:
    return any(map(path.is_relative_to, SYSTEM)) and not path.is_relative_to(MEMORY)
