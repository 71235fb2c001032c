"""Describe the operating system's errors about full disks to users, and check for free space."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from onnxgrad_cli.errors import unwritable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers: the disk is full, the quota is used up, or the file has reached its maximum size."""

UNWRITABLE = (*FULL, errno.EROFS)
"""Error numbers of full disks and read-only file systems. They never indicate a bug in onnxgrad."""


def said(error: OSError) -> str:
    """Return the reason why a file can't be written, as text for a message."""
    return "no space is left" if error.errno in FULL else str(error.strerror)


def check_space(files: Iterable[tuple[Path, int]], hint: str) -> None:
    """Check that the disks have space for files that a long command will write at its end.

    Args:
        files: pairs (existing folder, number of bytes to be written there).
        hint: the remedy if there is no space.

    Raises:
        OnnxgradError: a disk does not have enough space.
    """
    needed: dict[int, int] = {}
    for folder, size in files:
        disk = os.stat(folder).st_dev
        needed[disk] = needed.get(disk, 0) + size
        free = shutil.disk_usage(folder).free
        if free < needed[disk]:
            raise unwritable(
                f"there is too little space in '{folder}': {needed[disk]:,} bytes will be written, but only {free:,} "
                "are free",
                hint,
            )
