"""The standard streams, whatever they are given as: closed, full, or unable to hold a character."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

STREAM_ERRORS = (errno.EPIPE, errno.EBADF, errno.ENOSPC, errno.EIO)
"""What reading or writing fails with where a stream is closed, full or gone."""


def prepare() -> None:
    """Make the streams such as can be relied on, before anything is opened or said.

    A descriptor that is closed would be given to the next file that is opened, which then gets what others print. In
    its place comes one on which reading or writing fails as on the closed one; but what is said on stderr, which
    nobody has asked for, is swallowed. A character that a stream can't hold is written as an escape.
    """
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest number that is free, which is this one
    sys.stdin = sys.stdin or os.fdopen(0)  # None where it was closed
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_of_a_stream(error: BaseException) -> bool:
    """Whether an error says that a stream can't be read or written: it names no file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in STREAM_ERRORS


def abandon(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere: else it would be tried again at exit, and fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
