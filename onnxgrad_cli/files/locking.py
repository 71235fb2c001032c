"""Locks on files, which the system lets go of when a process ends, however it ends."""

from __future__ import annotations

import os
from typing import IO, Any


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
