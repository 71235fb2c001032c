"""What the readers of all formats share: a file that can't be read is told in the user's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Union

import numpy as np

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.data.lists import Lists

if TYPE_CHECKING:
    from onnxgrad_cli.training.data.pictures import Pictures

OBJECTS = "save numbers, as many for each sample: array.astype(float), or numpy.stack(list(array)) of a list of arrays"
"""What to do about an array of Python objects, which numpy reads only by running what the file says."""


Column = Union[np.ndarray, Lists, "Pictures"]
"""The samples of an input: an array, or what is read or padded batch by batch."""


class Found(NamedTuple):
    """What a reader has read.

    Attributes:
        arrays: the columns of the inputs it found.
        others: the names of what else there is.
        names: input -> the names of its classes, where the data tell them.
        order: input -> the columns of a table that it took as they stood there, see `columns.Choice`.
    """

    arrays: Mapping[str, Column]
    others: list[str]
    names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    order: Mapping[str, Sequence[str]] = MappingProxyType({})


@contextmanager
def reading(path: Path, form: str, hint: str, *kinds: type[Exception]) -> Iterator[None]:
    """Tell what a reader raises as one error: the file, the format, the reason.

    Args:
        path: the file.
        form: what it should be, with its article.
        hint: how to make one that is.
        *kinds: what is raised of a broken file, where the block has code of ours too; by default anything: no library
            names all that its parsers raise.

    Raises:
        UsageError: the file can't be read, or is broken.
        OnnxgradError: it is too large for the memory.
    """
    caught: tuple[type[Exception], ...] = (OSError, *(kinds or (Exception,)))
    try:
        yield
    except OnnxgradError:
        raise
    except MemoryError:
        raise OnnxgradError(
            f"there is not enough memory to read '{path}'",
            "a folder of .npy files, one for each input, is read from the disk as it is needed",
        ) from None
    except caught as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow raises it of broken files too, without
            raise UsageError(f"'{path}' can't be read: {error.strerror}", "check the file") from None
        reason = str(error).strip() or type(error).__name__
        hint = OBJECTS if "Object arrays" in reason or "Python objects" in reason else hint
        raise UsageError(f"'{path}' can't be read as {form}: {reason}", hint) from None


def check_regular(path: Path) -> None:
    """Make sure that what a path leads to, if anything, is a file that ends: no device may go on for ever, and no pipe.

    Raises:
        UsageError: it is none, or no file can be called so.
    """
    with reading(path, "a file", "check its name"):
        odd = path.exists() and not path.is_file()
    if odd:
        raise UsageError(f"'{path}' is no file: it is a device, a pipe or a folder", "copy its data to a file")
