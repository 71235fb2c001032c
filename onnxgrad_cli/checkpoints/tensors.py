"""Read and write safetensors files of named arrays and metadata, the format of checkpoints and adapters.

The metadata have a checksum for each array, and one for all other entries. So a bit that flipped on a disk or in a copy
causes an error instead of a different model. Any reader of safetensors can read the files. If another program has
rewritten a file without the checksums, it is read with a warning that damage would not be noticed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, unreadable
from onnxgrad_cli.files import save_bytes
from onnxgrad_cli.files.safetensors_header import read_header

HALVES = "bfloat16"
"""The metadata key of the names of bfloat16 arrays.

These arrays are stored as uint16, because safetensors can't read bfloat16 into numpy.
"""

CHECKSUMS = "checksums"
"""The metadata key of the checksums.

In the entry, 'tensors' maps each name to the CRC-32 of the array, and 'words' is the CRC-32 of the other entries.
"""

FEW_BITS = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})
"""The names of the dtypes with several values per byte in ONNX. safetensors doesn't support them."""

KNOWN = frozenset({"progress", "onnxgrad.adapters", "onnxgrad.base", HALVES, CHECKSUMS})
"""The metadata keys of onnxgrad's files. If a file has one of these and an unknown key, that key must be damaged."""


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray], words: Mapping[str, Any]) -> None:
    """Write arrays and metadata to a file. The file is replaced atomically and flushed to the disk.

    Args:
        path: the file.
        tensors: the arrays, by name.
        words: metadata: key in `KNOWN` -> value, which is written as JSON.

    Raises:
        OnnxgradError: the file can't be written, or an array has a dtype of `FEW_BITS`.
    """
    save_bytes(tensor_bytes(tensors, words), path, durable=True)


def tensor_bytes(tensors: Mapping[str, np.ndarray], words: Mapping[str, Any]) -> bytes:
    """Return the bytes of the file that `save_tensors` writes.

    Raises:
        OnnxgradError: an array has a dtype of `FEW_BITS`.
    """
    few = next((name for name, array in tensors.items() if str(array.dtype) in FEW_BITS), "")
    if few:
        hint = "keep it an initializer that is not an input of the model"
        message = f"'{few}' has the type {tensors[few].dtype}, which safetensors does not support"
        raise OnnxgradError(message, hint, code="wrong_type")
    halves = [name for name, array in tensors.items() if array.dtype == ml_dtypes.bfloat16]
    bits = {name: tensors[name].view(np.uint16) for name in halves}
    plain = {**tensors, **bits}
    plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in plain.items()}
    said = {key: json.dumps(value) for key, value in {**words, **({HALVES: halves} if halves else {})}.items()}
    checksums = {"words": _of_words(said), "tensors": {name: _of_array(array) for name, array in plain.items()}}
    data = safetensors.numpy.save(plain, {**said, CHECKSUMS: json.dumps(checksums)})
    return _in_order(data)


def _in_order(data: bytes) -> bytes:
    """Return the bytes of a file with its metadata sorted. The library writes them in arbitrary order."""
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    head["__metadata__"] = dict(sorted(head["__metadata__"].items()))
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # align the arrays to 8 bytes
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(data)[start:]))


def load_tensors(path: Path, tell: Tell = silent) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays of a file, and onnxgrad's metadata entries, parsed from JSON.

    Args:
        path: the file.
        tell: receives a warning if the file has onnxgrad's metadata but no checksums, because another program rewrote
            it.

    Raises:
        OnnxgradError: the file doesn't exist, is not a safetensors file, or is damaged.
    """
    data = read_bytes(path)
    with parsing(path):
        said = read_header(BytesIO(data)).get("__metadata__", {})
        tensors = safetensors.numpy.load(data)
    _check(path, tensors, said, tell)
    words = _words(path, said)
    halves = words.pop(HALVES, [])
    shorts = {name for name, array in tensors.items() if array.dtype == np.uint16}
    if not isinstance(halves, list) or not all(isinstance(name, str) and name in shorts for name in halves):
        raise _damaged(path, f"its entry '{HALVES}' does not fit its arrays")
    return {**tensors, **{name: tensors[name].view(ml_dtypes.bfloat16) for name in halves}}, words


def is_safetensors(path: Path) -> bool:
    """Return True if a file begins like a safetensors file: with a length in eight bytes and a JSON object.

    Source: https://github.com/huggingface/safetensors#format.
    """
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def load_words(path: Path) -> dict[str, Any]:
    """Read onnxgrad's metadata entries in a file, parsed from JSON. Checksums are not verified.

    A file of another program has none.

    Raises:
        OnnxgradError: the file can't be read, or is not a safetensors file.
    """
    check_is_file(path)
    with parsing(path), path.open("rb") as file:
        said = read_header(file).get("__metadata__", {})
    return _words(path, said)


def check_is_file(path: Path) -> None:
    """Raise an error if a path leads to a folder or a device.

    Raises:
        OnnxgradError: the path exists and is not a file.
    """
    if path.exists() and not path.is_file():
        raise unreadable(f"'{path}' is not a file of tensors: it is a folder or a device", "name the file")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Read the bytes of a safetensors file, or of a file that belongs to it, such as a configuration.

    Args:
        path: the file.
        most: the largest allowed size, in bytes; None for any size.

    Raises:
        OnnxgradError: the file can't be read, or is larger.
    """
    with parsing(path):
        if most is not None and path.stat().st_size > most:
            raise unreadable(f"'{path}' is too large: it has {path.stat().st_size} bytes")
        check_is_file(path)
        return path.read_bytes()


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Convert the exceptions of a parser to errors that name the file."""
    try:
        yield
    except OnnxgradError:
        raise
    except MemoryError:
        hint = "free some memory, or use a machine with more"
        raise OnnxgradError(f"there is not enough memory to read '{path}'", hint, code="no_memory") from None
    except OSError as error:
        raise unreadable(f"'{path}' can't be read: {error.strerror or error}") from None
    except Exception as error:  # the library raises its own exceptions and others
        raise unreadable(f"'{path}' is not a safetensors file, or is broken: {error}") from error


def _words(path: Path, said: Mapping[str, str]) -> dict[str, Any]:
    """Return onnxgrad's metadata entries, except for the checksums, parsed from JSON."""
    try:
        return {key: strict_json.loads(value) for key, value in said.items() if key in KNOWN - {CHECKSUMS}}
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"its metadata are not JSON: {error}") from None


def _check(path: Path, tensors: Mapping[str, np.ndarray], said: Mapping[str, str], tell: Tell) -> None:
    """Verify the checksums of a file. If a file with entries of onnxgrad has none, warn that damage is not noticed.

    Raises:
        OnnxgradError: a checksum doesn't match or can't be read; or the file has no checksums, but both known and
            unknown entries, which means damage.
    """
    if CHECKSUMS not in said:
        strange = said.keys() - KNOWN
        if strange and strange != said.keys():
            raise _damaged(path, f"its metadata have an unknown entry {min(strange)!r}")
        if said and not strange:
            tell(f"'{path}' has no checksums, because another program wrote it: damage would not be noticed", 0)
        return
    try:
        checksums = strict_json.loads(said[CHECKSUMS])
        words, arrays = checksums["words"], dict(checksums["tensors"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, "its checksums can't be read") from None
    if words != _of_words({key: value for key, value in said.items() if key != CHECKSUMS}):
        raise _damaged(path, "the checksum of its metadata does not match")
    found = {name: _of_array(array) for name, array in tensors.items()}
    wrong = next((name for name in {**found, **arrays} if found.get(name) != arrays.get(name)), None)
    if wrong is not None:
        raise _damaged(path, f"the checksum of '{wrong}' does not match")


def _damaged(path: Path, why: str) -> OnnxgradError:
    return unreadable(
        f"'{path}' is damaged: {why}",
        "use another copy or an earlier checkpoint; if a program changed the file on purpose, it must remove the "
        f"entry '{CHECKSUMS}' from the metadata",
    )


def _of_array(array: np.ndarray) -> str:
    """Return the checksum of an array's dtype, shape and bytes."""
    head = f"{array.dtype.str}{list(array.shape)}".encode()
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, zlib.crc32(head)):08x}"


def _of_words(said: Mapping[str, str]) -> str:
    """Return the checksum of metadata entries. Their order doesn't matter."""
    return f"{zlib.crc32(json.dumps(dict(said), sort_keys=True).encode()):08x}"
