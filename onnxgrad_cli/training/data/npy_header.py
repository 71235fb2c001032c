"""What an array in numpy's format declares, held against the bytes that are there before memory is taken for it."""

from __future__ import annotations

import math
from typing import IO

import numpy as np


def check_header(file: IO[bytes], size: int) -> None:
    """Make sure that an array declares no more than there is.

    Args:
        file: at its beginning; it is left behind the header.
        size: the bytes of header and array.

    Raises:
        ValueError: it declares more, or is no array. numpy raises other errors too of a header that is none.
    """
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    declared, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if any(dim < 0 for dim in shape):
        raise ValueError(f"it declares an array {list(shape)}")
    if declared > there and not dtype.hasobject:
        raise ValueError(f"it declares an array {list(shape)} of {declared:,} bytes, and has {there:,}")
