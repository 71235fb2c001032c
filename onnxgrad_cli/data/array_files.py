"""Read the arrays of a model's inputs from an .npz file, a folder of .npy files, or a .safetensors file.

An array belongs to the input that has the same name; other arrays are skipped. The files of a folder are memory-mapped,
so they may be larger than memory. .npz and .safetensors files are read into memory. Before memory is allocated for an
array, its declared size is compared with the number of bytes in the file.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors

from onnxgrad_cli.common.memory import free_memory
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.loaded_columns import LoadedColumns
from onnxgrad_cli.data.read_failures import check_regular, reading
from onnxgrad_cli.errors import wrong_type
from onnxgrad_cli.files.safetensors_header import read_header


def read_npy_folder(path: Path, inputs: InputTypes) -> LoadedColumns:
    """Memory-map the .npy files of a folder that are named after inputs: `FOLDER/encoder/x.npy` for `encoder/x`.

    Raises:
        UsageError: a file can't be read.
    """
    with reading(path, "a folder of .npy files", "check its permissions"):
        files = {file.relative_to(path).as_posix().removesuffix(".npy"): file for file in sorted(path.rglob("*.npy"))}
    arrays = {name: mapped(file) for name, file in files.items() if name in inputs}
    return LoadedColumns(arrays, [name for name in files if name not in inputs])


def mapped(file: Path) -> np.ndarray:
    """Memory-map the array in an .npy file.

    Raises:
        UsageError: the file can't be read.
    """
    check_regular(file)
    with reading(file, "an .npy file", "write one with numpy.save(FILE, array)"):
        with file.open("rb") as stream:
            check_header(stream, file.stat().st_size)
        return np.load(file, mmap_mode="r", allow_pickle=False)


def check_header(file: IO[bytes], size: int) -> None:
    """Check that an .npy file has all bytes that its header declares.

    Args:
        file: the file, at its start. It is read up to the end of the header.
        size: the size of the file in bytes, including the header.

    Raises:
        ValueError: the header declares more bytes, or the file is not an array. For some invalid headers numpy raises
            other errors.
    """
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    declared, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if any(dim < 0 for dim in shape):
        raise ValueError(f"it declares an array of the invalid shape {list(shape)}")
    if declared > there and not dtype.hasobject:
        raise ValueError(f"it declares {declared:,} bytes for the shape {list(shape)}, but has only {there:,}")


MAX_COMPRESSION = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""Zip compression method that numpy writes -> the largest possible ratio of uncompressed to compressed bytes.

Source: RFC 1951 (258 bytes in 2 bits). The other methods, BZIP2 and LZMA, can expand a kilobyte to gigabytes.
"""

BEGINNINGS = (b"PK\x03\x04", b"PK\x05\x06", np.lib.format.MAGIC_PREFIX)
"""The first bytes of a zip archive, of an empty zip archive, and of an .npy file.

Files that begin differently are refused before numpy reads them. numpy would take them for pickles, and its error
message would advise the user to trust the file.
"""

SLACK = 1024
"""Number of bytes by which an array may exceed the size that the ratio in `MAX_COMPRESSION` allows."""


def read_npz(path: Path, inputs: InputTypes) -> LoadedColumns:
    """Read the arrays of an .npz file that are named after inputs; see `arrays_of`."""
    return LoadedColumns(*arrays_of(path, inputs))


def arrays_of(path: Path, inputs: InputTypes | None = None) -> tuple[dict[str, np.ndarray], list[str]]:
    """Read the arrays of an .npz file that are named after inputs. Return them, and the names of the other arrays.

    If `inputs` is None, all arrays are read.

    Raises:
        UsageError: the file can't be read.
    """
    check_regular(path)
    hint = "write one with numpy.savez(FILE, name=array, ...)"
    with reading(path, "an .npz file", hint):
        with path.open("rb") as file:
            if not file.read(len(np.lib.format.MAGIC_PREFIX)).startswith(BEGINNINGS):
                raise ValueError("it does not start like a zip archive")
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array without a name")
        if len(set(archive.files)) < len(archive.files):
            raise ValueError("two of its arrays have the same name")
    arrays = {}
    with archive:
        for name in archive.files if inputs is None else filter(inputs.__contains__, archive.files):
            with reading(path, f"an .npz file with an array '{name}'", hint):
                _check_size(archive, name)
                arrays[name] = archive[name]
    return arrays, [name for name in archive.files if name not in arrays]


def _check_size(archive: np.lib.npyio.NpzFile, name: str) -> None:
    """Check that the declared size of an array fits the archive's bytes and the free memory, before allocating memory.

    Raises:
        ValueError: the entry declares more bytes than the archive can hold, is not an array, or is compressed by a
            method that numpy does not use.
        MemoryError: the array is larger than the free memory.
    """
    held = archive.zip
    assert held is not None  # the archive is open
    info = held.getinfo(f"{name}.npy" if f"{name}.npy" in held.namelist() else name)
    if info.compress_type not in MAX_COMPRESSION:
        raise ValueError("it is compressed in a way that numpy does not write")
    if info.file_size > MAX_COMPRESSION[info.compress_type] * info.compress_size + SLACK:
        raise ValueError(f"it declares {info.file_size:,} bytes, too many for {info.compress_size:,} compressed bytes")
    if info.file_size > free_memory():  # otherwise the system might kill the process
        raise MemoryError
    with held.open(info) as file:
        check_header(file, info.file_size)


def read_safetensors(path: Path, inputs: InputTypes) -> LoadedColumns:
    """Read the arrays of a safetensors file that are named after inputs.

    Raises:
        UsageError: the file can't be read, or numpy lacks the dtype of an array.
    """
    with reading(path, "a safetensors file", "write it with safetensors.numpy.save_file"):
        with path.open("rb") as stream:
            read_header(stream)
        with safetensors.safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            arrays = {name: _array(path, file, name) for name in names if name in inputs}
            return LoadedColumns(arrays, [name for name in names if name not in inputs])


def _array(path: Path, file: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(file.get_tensor(name))
    except AttributeError:  # safetensors looks the dtype up as an attribute of numpy
        message = f"'{path}': '{name}' has the type {file.get_slice(name).get_dtype()}, which numpy lacks"
        raise wrong_type(message, "save it as F32 or F16") from None
