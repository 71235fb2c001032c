"""What the readers of all formats share: a file that can't be read is told in the user's terms."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxgrad_cli.errors import UsageError

BROKEN = (ValueError, EOFError, zipfile.BadZipFile, zlib.error)
"""What numpy and the standard library raise of a broken file."""


OBJECTS = "save numbers, as many for each sample: array.astype(float), or numpy.stack(list(array)) of a list of arrays"
"""What to do about an array of Python objects, which numpy reads only by running what the file says."""


class Found(NamedTuple):
    """What a reader has read: the arrays of the inputs it found, and the names of what else there is."""

    arrays: dict[str, np.ndarray]
    others: list[str]


@contextmanager
def reading(path: Path, form: str, hint: str, *kinds: type[Exception]) -> Iterator[None]:
    """Tell what a reader raises as one error: the file, the format, the reason.

    Raises:
        UsageError: the file can't be read, or is broken.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"'{path}' can't be read: {error.strerror or error}", "check the file") from None
    except tuple(kinds) + BROKEN as error:
        reason = str(error).strip() or type(error).__name__
        hint = OBJECTS if "Object arrays" in reason or "Python objects" in reason else hint
        raise UsageError(f"'{path}' can't be read as {form}: {reason}", hint) from None


def library(name: str, extra: str, path: Path) -> Any:
    """A module that is no part of the installation.

    Raises:
        UsageError: it is missing.
    """
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UsageError(
            f"'{path}' can't be read without the package {package}", f"pip install 'onnxgrad[{extra}]'"
        ) from None
