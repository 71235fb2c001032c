"""What the operating system says where nothing more can be written, in the user's terms."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from onnxgrad_cli.errors import OnnxgradError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk is full, a quota used up, a file as long as it may be."""

UNWRITABLE = (*FULL, errno.EROFS)
"""What is nobody's fault, wherever it comes from."""


def said(error: OSError) -> str:
    """Why a file can't be written."""
    return "no space is left" if error.errno in FULL else str(error.strerror)


def check_space(files: Iterable[tuple[Path, int]], hint: str) -> None:
    """Make sure that the disks have room for files that a long command writes at its end.

    Args:
        files: folders that exist, each with the bytes that are to be written there.
        hint: what to do where there is no room.

    Raises:
        OnnxgradError: a disk has less space than its files take.
    """
    needed: dict[int, int] = {}
    for folder, size in files:
        disk = os.stat(folder).st_dev
        needed[disk] = needed.get(disk, 0) + size
        free = shutil.disk_usage(folder).free
        if free < needed[disk]:
            raise OnnxgradError(
                f"there is no space for what will be written to '{folder}': {needed[disk]:,} bytes, {free:,} are free",
                hint,
            )
