"""Handle standard streams that are closed, full, or unable to encode a character."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

STREAM_ERRORS = (errno.EPIPE, errno.EBADF, errno.ENOSPC, errno.EIO)
"""Error numbers with which reading or writing a stream fails if it is closed, full or disconnected."""


def prepare() -> None:
    """Make the standard streams usable. Must be called before any file is opened or any text is printed.

    If the descriptor 0, 1 or 2 is closed, the next file to be opened would get its number, and then receive the output
    of other code. Therefore a closed descriptor is opened on the null device. Reads of a closed stdin and writes to a
    closed stdout still fail. Output to a closed stderr is discarded. Characters that a stream can't encode are written
    as escapes.
    """
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # uses the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0)  # None if it was closed
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_of_a_stream(error: BaseException) -> bool:
    """Return True if an error is about a standard stream. Such errors name no file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in STREAM_ERRORS


def abandon(stream: TextIO) -> None:
    """Redirect a stream that failed to the null device, so that Python does not try to flush it again at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
