"""Read PNG and JPEG files with pillow as a column of samples. A file is read when a batch needs it.

The layout of a picture follows from the shape of the input and is never guessed. A picture is rotated by its Exif
orientation, converted to the channels and the size of the input, and returned as an array of bytes. By default it is
cropped at the center, so that its aspect ratio is kept. It can be stretched instead. Files may be from an untrusted
source, so other formats and pictures with more pixels than pillow's limit are refused.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.data.read_failures import reading
from onnxgrad_cli.errors import ambiguous, missing_value, wrong_shape
from onnxgrad_cli.ir.types import in_words, shape_of

CHANNELS = (1, 3, 4)
"""The possible numbers of channels: 1 for grey, 3 for red, green and blue, 4 with transparency."""


@dataclass(frozen=True)
class PictureLayout:
    """The layout that an input requires of pictures.

    Attributes:
        channels, height, width: the sizes of a picture; 0 for a height or width that the model doesn't fix.
        axis: the channel axis of a batch, 1 or 3; None for grey pictures without a channel axis.
    """

    channels: int
    height: int
    width: int
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a picture."""
        sizes = [self.height, self.width]
        if self.axis is not None:
            sizes.insert(self.axis - 1, self.channels)
        return tuple(sizes)


def layout_of(value_type: TypeProto) -> PictureLayout | None:
    """Return the layout of an input [N, C, H, W], [N, H, W, C] or [N, H, W], or None if it can't take pictures.

    Raises:
        UsageError: both the second and the last axis could be the channel axis.
    """
    shape = shape_of(value_type) or ()
    if len(shape) == 3:
        return PictureLayout(1, _size(shape[1]), _size(shape[2]), None)
    if len(shape) != 4:
        return None
    first, last = shape[1] in CHANNELS, shape[3] in CHANNELS
    if first and last:
        hint = "save arrays of this shape instead of pictures"
        raise ambiguous(f"the input is {in_words(value_type)}: its second or its last axis may be the channels", hint)
    if not first and not last:
        return None
    axis = 1 if first else 3
    height, width = (shape[2], shape[3]) if first else (shape[1], shape[2])
    return PictureLayout(_size(shape[axis]), _size(height), _size(width), axis)


def _size(dim: int | str) -> int:
    return dim if isinstance(dim, int) else 0


SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})
FORMATS = ("PNG", "JPEG")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Number of channels -> pillow's mode for them."""

EIGHT_BITS = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})
"""Pillow's modes with at most 8 bits per channel. Other modes are refused, because pillow would clip their values."""

HINT = "leave it out, or save it as PNG or JPEG with 8 bits per channel"


@dataclass(frozen=True)
class Pictures:
    """A column of pictures, uint8 (N, *layout.shape). It has the interface of an array, but reads pictures on access.

    Attributes:
        source: the folder or file that has the pictures, for messages.
        files: the path of each picture, or its encoded bytes.
        layout: the layout of the input.
        resize: how to resize pictures whose aspect ratio differs from the input's.
    """

    source: Path
    files: Sequence[Path | bytes]
    layout: PictureLayout
    resize: Resize = "crop"

    dtype = np.dtype(np.uint8)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of pictures, and the shape of a picture."""
        return len(self), *self.layout.shape

    @property
    def ndim(self) -> int:
        """The number of axes of a batch."""
        return 1 + len(self.layout.shape)

    @property
    def size(self) -> int:
        """The number of values in all pictures."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The number of bytes that all pictures would take in memory."""
        return self.size

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.take(range(*rows.indices(len(self))))

    def take(self, rows: Iterable[int]) -> np.ndarray:
        """Read the pictures with the indices `rows`, and return them as uint8 (n, *layout.shape).

        Raises:
            UsageError: a file can't be read, or is not a picture.
        """
        found = list(self._threads.map(self._read, rows))
        return np.stack(found) if found else np.zeros((0, *self.layout.shape), np.uint8)

    def check(self) -> None:
        """Check the headers of all files. Pictures are not decoded.

        Raises:
            UsageError: a file is not a picture, has more pixels than pillow's limit, or has more than 8 bits per
                channel. The message names the file.
        """
        pillow = load_package("PIL.Image", f"reading '{self.source}'")
        for row, file in enumerate(self.files):
            with self._told(row), warnings.catch_warnings():
                warnings.simplefilter("error")
                with pillow.open(_opened(file), formats=FORMATS) as picture:
                    _check(picture, pillow.MAX_IMAGE_PIXELS)

    def digest(self, check: int) -> int:
        """Update the CRC-32 `check` with the names and contents of the files, the shape and `resize`, and return it."""
        check = zlib.crc32(f"{self.shape} {self.resize}".encode(), check)
        for row, file in enumerate(self.files):
            with self._told(row):
                name, content = (file.name, file.read_bytes()) if isinstance(file, Path) else ("", file)
            check = zlib.crc32(content, zlib.crc32(name.encode(errors="surrogateescape"), check))
        return check

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        load_package("PIL.ImageOps", f"reading '{self.source}'")  # import it before the threads do
        return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "pictures")

    def _told(self, row: int) -> Any:
        file = self.files[row]
        name = file if isinstance(file, Path) else Path(f"{self.source}, sample {row}")
        return reading(name, "a picture", HINT)

    def _read(self, row: int) -> np.ndarray:
        pillow, operations = (load_package(f"PIL.{name}", f"reading '{self.source}'") for name in ("Image", "ImageOps"))
        size = self.layout.width, self.layout.height
        with self._told(row), pillow.open(_opened(self.files[row]), formats=FORMATS) as picture:
            _check(picture, pillow.MAX_IMAGE_PIXELS)
            picture.load()
            upright = operations.exif_transpose(picture).convert(MODES[self.layout.channels])
            method = pillow.Resampling.BILINEAR
            cut = self.resize == "crop"
            found = operations.fit(upright, size, method) if cut else upright.resize(size, method)
            array = np.asarray(found, np.uint8)
        if self.layout.axis == 1:
            return np.ascontiguousarray(array.reshape(*array.shape[:2], -1).transpose(2, 0, 1))
        return array.reshape(self.layout.shape)


def _opened(file: Path | bytes) -> Path | BytesIO:
    return file if isinstance(file, Path) else BytesIO(file)


def _check(picture: Any, most: int | None) -> None:
    """Raise an error for a picture that would take much time and memory to decode, or that 8 bits can't represent.

    Raises:
        ValueError: the picture has more than `most` pixels, or more than 8 bits per channel.
    """
    if most is not None and picture.width * picture.height > most:
        raise ValueError(f"it has {picture.width} x {picture.height} pixels, more than pillow's limit of {most:,}")
    if picture.mode not in EIGHT_BITS:
        raise ValueError(f"it has more than 8 bits per channel ({picture.mode})")


def check_size(name: str, layout: PictureLayout | None, words: str) -> PictureLayout:
    """Check that pictures can be resized for an input, and return its layout.

    Args:
        name: the input.
        layout: its layout; None if it can't take pictures.
        words: the type of the input in words, for messages.

    Raises:
        UsageError: the input can't take pictures, or its height or width is not fixed.
    """
    if layout is None:
        hint = "inputs of pictures are [N, C, H, W], [N, H, W, C] or [N, H, W], with 1, 3 or 4 channels"
        raise wrong_shape(f"'{name}' is {words}, which can't take pictures", hint)
    if not layout.height or not layout.width:
        hint = f"fix it with `shapes={name}:DIM,DIM,...`, such as {name}:batch,3,224,224"
        raise missing_value(f"'{name}' is {words}, which does not fix the size of pictures", hint)
    return layout
