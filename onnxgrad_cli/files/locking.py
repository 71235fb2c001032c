"""Locks on files, which the system lets go of when a process ends, however it ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

NO_LINK: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""A lock may lie in a folder that a stranger has made: no link is followed, and no pipe waited for."""


def opened(path: Path) -> IO[str]:
    """A file to lock, which is made where it is missing.

    Raises:
        OSError: it can't be made, or is a link or a pipe.
    """
    return open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | NO_LINK, 0o666))


def hold(file: IO[Any]) -> bool:
    """Lock a file until it is closed; False where another process, or another opening of the file, holds it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
