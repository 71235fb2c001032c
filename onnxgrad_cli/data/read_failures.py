"""Convert failures to read a file to errors that name the file, the format and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxgrad_cli.errors import OnnxgradError, missing_file, unreadable

OBJECTS = (
    "save an array of numbers, with the same shape for each sample: array.astype(float), "
    "or numpy.stack(list(array)) if the elements are arrays"
)
"""The hint for an array of Python objects. numpy stores it as a pickle, and loading a pickle can run any code."""


@contextmanager
def reading(path: Path, form: str, hint: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert the exceptions of a reader to an error that names the file, the format and the reason.

    Args:
        path: the file.
        form: the format that the file should have, with an article, such as 'an .npz file'.
        hint: advice on writing a file of this format.
        *kinds: the exceptions to convert. The default is any exception, because libraries don't document all exceptions
            of their parsers. If the block also runs code of this project, pass those that a broken file causes.

    Raises:
        OnnxgradError: the file can't be read, is broken, or is too large for the memory.
    """
    caught: tuple[type[Exception], ...] = (OSError, *(kinds or (Exception,)))
    try:
        yield
    except OnnxgradError:
        raise
    except MemoryError:
        hint = "save a folder of .npy files, one for each input: it is read from the disk in parts"
        raise OnnxgradError(f"there is not enough memory to read '{path}'", hint, code="no_memory") from None
    except caught as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow's OSErrors for broken files have no errno
            hint = "check the file"
            raise unreadable(f"'{path}' can't be read: {error.strerror}", hint) from None
        reason = str(error).strip() or type(error).__name__
        hint = OBJECTS if "Object arrays" in reason or "Python objects" in reason else hint
        raise unreadable(f"'{path}' can't be read as {form}: {reason}", hint) from None


def check_there(path: Path) -> None:
    """Raise an error if a path of data does not exist.

    Raises:
        OnnxgradError: there is no such file or folder.
    """
    with reading(path, "data", "check its name"):
        there = path.exists()
    if not there:
        raise missing_file(f"no such file or folder: '{path}'")


def check_regular(path: Path) -> None:
    """Check that a path is a regular file or does not exist. Reading a device or a pipe might never end.

    Raises:
        OnnxgradError: the path is a device, a pipe or a folder, or can't be the name of a file.
    """
    with reading(path, "a file", "check its name"):
        odd = path.exists() and not path.is_file()
    if odd:
        raise unreadable(f"'{path}' is not a file: it is a device, a pipe or a folder", "copy its data to a file")
