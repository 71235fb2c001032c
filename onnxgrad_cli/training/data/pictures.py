"""Picture files as a column of samples, which are read as they are needed: png and jpeg, by pillow.

A picture is turned as its camera says, brought to the channels and the size of the input, and is an array of bytes; its
proportions are kept and its edges cut off alike on both sides, unless it is to be stretched. Files may be a stranger's:
no other formats are opened, and no picture of more pixels than pillow's limit.
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

from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data.picture_layout import Layout
from onnxgrad_cli.training.data.reading import reading

SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})
FORMATS = ("PNG", "JPEG")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels -> what pillow calls them."""

EIGHT_BITS = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})
"""Pillow's kinds of picture with 8 bits a channel at most: others are cut off where they are made these."""

HINT = "leave it out, or save it as png or jpeg of 8 bits a channel"


@dataclass(frozen=True)
class Pictures:
    """A column of pictures, uint8 (N, *layout.shape), which acts as an array that is read slice by slice.

    Attributes:
        source: the folder or file that they are of, for messages.
        files: what each is read from: a file, or its bytes.
        layout: the shape of one.
        resize: what becomes of those of other proportions.
    """

    source: Path
    files: Sequence[Path | bytes]
    layout: Layout
    resize: Resize = "crop"

    dtype = np.dtype(np.uint8)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are, and the shape of one."""
        return len(self), *self.layout.shape

    @property
    def ndim(self) -> int:
        """As many axes as a batch has."""
        return 1 + len(self.layout.shape)

    @property
    def size(self) -> int:
        """How many numbers there are in all."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """How many bytes all of them would take."""
        return self.size

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.take(range(*rows.indices(len(self))))

    def take(self, rows: Iterable[int]) -> np.ndarray:
        """Some pictures, uint8 (n, *layout.shape).

        Raises:
            UsageError: a file can't be read, or is no picture.
        """
        found = list(self._threads.map(self._read, rows))
        return np.stack(found) if found else np.zeros((0, *self.layout.shape), np.uint8)

    def check(self) -> None:
        """Make sure that the files begin as pictures, of no more pixels than pillow's limit.

        Raises:
            UsageError: one does not; the message names it.
        """
        pillow = load_package("PIL.Image", f"reading '{self.source}'")
        for row, file in enumerate(self.files):
            with self._told(row), warnings.catch_warnings():
                warnings.simplefilter("error")
                with pillow.open(_opened(file), formats=FORMATS) as picture:
                    _check(picture, pillow.MAX_IMAGE_PIXELS)

    def digest(self, check: int) -> int:
        """A CRC-32 of names, files, shape and `resize`, that goes on from `check`."""
        check = zlib.crc32(f"{self.shape} {self.resize}".encode(), check)
        for row, file in enumerate(self.files):
            with self._told(row):
                name, content = (file.name, file.read_bytes()) if isinstance(file, Path) else ("", file)
            check = zlib.crc32(content, zlib.crc32(name.encode(errors="surrogateescape"), check))
        return check

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        load_package("PIL.ImageOps", f"reading '{self.source}'")  # before threads import it
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
    """Refuse what pillow would take its time and memory for, or make less of.

    Raises:
        ValueError: it is too large, or has more than 8 bits a channel.
    """
    if most is not None and picture.width * picture.height > most:
        raise ValueError(f"it has {picture.width} x {picture.height} pixels, more than pillow's limit of {most:,}")
    if picture.mode not in EIGHT_BITS:
        raise ValueError(f"it has more than 8 bits a channel ({picture.mode})")


def check_size(name: str, layout: Layout | None, words: str) -> Layout:
    """Make sure that pictures can be brought to the size of an input.

    Raises:
        UsageError: the input takes no pictures, or its size is not fixed.
    """
    if layout is None:
        raise UsageError(
            f"'{name}' is {words}, which takes no pictures",
            "pictures are [N, C, H, W], [N, H, W, C] or [N, H, W], with 1, 3 or 4 channels",
        )
    if not layout.height or not layout.width:
        raise UsageError(
            f"'{name}' is {words}: to which size pictures are to be brought is not said",
            f"fix it with `shapes={name}:DIM,DIM,...`, such as {name}:batch,3,224,224",
        )
    return layout
