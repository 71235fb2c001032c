"""Data in a folder of .npy files that are called as the inputs; they are mapped, so they may be larger than memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.npy_header import check_header
from onnxgrad_cli.training.data.reading import Found, check_regular, reading


def read(path: Path, inputs: InputTypes) -> Found:
    """The arrays of a folder. The slashes in an input's name are folders in it.

    Raises:
        UsageError: a file can't be read.
    """
    with reading(path, "a folder of .npy files", "check its permissions"):
        files = {file.relative_to(path).as_posix().removesuffix(".npy"): file for file in sorted(path.rglob("*.npy"))}
    arrays = {name: mapped(file) for name, file in files.items() if name in inputs}
    return Found(arrays, [name for name in files if name not in inputs])


def mapped(file: Path) -> np.ndarray:
    """The array in an .npy file, mapped.

    Raises:
        UsageError: it can't be read.
    """
    check_regular(file)
    with reading(file, "an .npy file", "write one with numpy.save(FILE, array)"):
        with file.open("rb") as stream:
            check_header(stream, file.stat().st_size)
        return np.load(file, mmap_mode="r", allow_pickle=False)
