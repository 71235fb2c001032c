"""Data in an .npz file, whose keys are the names of the inputs.

Only the arrays that are inputs are read, and these into memory: a zip archive can't be mapped. Data larger than memory
are better kept as a folder of .npy files.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from onnxgrad_cli.common.memory import free_memory
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.npy_header import check_header
from onnxgrad_cli.training.data.reading import Found, check_regular, reading

MOST = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""How many bytes one byte of an archive stands for at most, by each compression that numpy writes.

Source: RFC 1951 (258 in 2 bits). Of others, BZIP2 and LZMA, a kilobyte stands for gigabytes.
"""

BEGINNINGS = (b"PK\x03\x04", b"PK\x05\x06", np.lib.format.MAGIC_PREFIX)
"""Of an archive, of an empty one, and of an array alone. numpy takes what begins otherwise for a pickle, and advises to
trust it."""

SLACK = 1024
"""Bytes that are not counted: an archive's smallest blocks."""


def read(path: Path, inputs: InputTypes) -> Found:
    """The arrays of an .npz file that are inputs.

    Raises:
        UsageError: it can't be read.
    """
    arrays, others = arrays_of(path, inputs)
    return Found(arrays, others)


def arrays_of(path: Path, inputs: InputTypes | None = None) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of an .npz file that are inputs, or without `inputs` all of them; and the names of the others.

    Raises:
        UsageError: it can't be read.
    """
    check_regular(path)
    hint = "write one with numpy.savez(FILE, name=array, ...)"
    with reading(path, "an .npz file", hint):
        with path.open("rb") as file:
            if not file.read(len(np.lib.format.MAGIC_PREFIX)).startswith(BEGINNINGS):
                raise ValueError("it does not begin as one, a zip archive")
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, without a name")
        if len(set(archive.files)) < len(archive.files):
            raise ValueError("two of its arrays have one name")
    arrays, others = {}, []
    with archive:
        for name in archive.files:
            if inputs is not None and name not in inputs:
                others.append(name)
                continue
            with reading(path, f"an .npz file with an array '{name}'", hint):
                _check_size(archive, name)
                arrays[name] = archive[name]
    return arrays, others


def _check_size(archive: np.lib.npyio.NpzFile, name: str) -> None:
    """Hold what an array declares against the bytes that are there, before memory is taken for it.

    Raises:
        ValueError: it declares more, or is no array, or is compressed as numpy compresses none.
        MemoryError: it is larger than the memory that is free.
    """
    held = archive.zip
    assert held is not None  # as long as it is open
    info = held.getinfo(f"{name}.npy" if f"{name}.npy" in held.namelist() else name)
    if info.compress_type not in MOST:
        raise ValueError("it is compressed in a way that numpy does not write")
    if info.file_size > MOST[info.compress_type] * info.compress_size + SLACK:
        raise ValueError(f"{info.compress_size:,} bytes can't hold the {info.file_size:,} that they are said to")
    if info.file_size > free_memory():  # which the system would tell by ending the process
        raise MemoryError
    with held.open(info) as file:
        check_header(file, info.file_size)
