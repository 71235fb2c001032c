"""Named arrays and a few words in a safetensors file: what checkpoints and adapters are kept in.

The metadata hold a checksum of each array and one of the words, so that a bit that a disk or a copy has turned is an
error and not another model. Any reader of safetensors reads the file; who writes one without checksums is believed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import save_bytes
from onnxgrad_cli.files.safetensors_header import read_header

HALVES = "bfloat16"
"""The entry of the metadata with the names of what is bfloat16, which the library can't read into numpy."""

CHECKSUMS = "checksums"
"""The entry with a CRC-32 of each array's bytes, by name, and as 'words' one of the other entries."""

FEW_BITS = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})
"""Types of numpy that share bytes in ONNX, and that the library does not know."""

KNOWN = frozenset({"progress", "onnxgrad.adapters", "onnxgrad.base", HALVES, CHECKSUMS})
"""The entries that files of onnxgrad have: another one is one of these whose name was damaged."""


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray], words: Mapping[str, Any]) -> None:
    """Write arrays, whole or not at all, and on the disk when this returns.

    Args:
        path: the file.
        tensors: the arrays, by name.
        words: what the metadata say besides, entries of `KNOWN`; values are written as JSON.

    Raises:
        OnnxgradError: the file can't be written.
    """
    save_bytes(tensor_bytes(tensors, words), path, durable=True)


def tensor_bytes(tensors: Mapping[str, np.ndarray], words: Mapping[str, Any]) -> bytes:
    """What `save_tensors` writes.

    Raises:
        OnnxgradError: the form has no such type: one of four bits.
    """
    few = next((name for name, array in tensors.items() if str(array.dtype) in FEW_BITS), "")
    if few:
        raise OnnxgradError(
            f"'{few}' is of {tensors[few].dtype}, which safetensors does not store",
            "leave it an initializer, which no input of the model overrides",
        )
    halves = [name for name, array in tensors.items() if array.dtype == ml_dtypes.bfloat16]
    bits = {name: tensors[name].view(np.uint16) for name in halves}
    plain = {**tensors, **bits}
    plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in plain.items()}
    said = {key: json.dumps(value) for key, value in {**words, **({HALVES: halves} if halves else {})}.items()}
    checksums = {"words": _of_words(said), "tensors": {name: _of_array(array) for name, array in plain.items()}}
    data = safetensors.numpy.save(plain, {**said, CHECKSUMS: json.dumps(checksums)})
    return _in_order(data)


def _in_order(data: bytes) -> bytes:
    """The same file with the entries of its metadata in order: the library writes them as they come, anew each time."""
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    head["__metadata__"] = dict(sorted(head["__metadata__"].items()))
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(data)[start:]))


def load_tensors(path: Path, tell: Tell = silent) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays in a file, and what its metadata say.

    Args:
        path: the file.
        tell: takes a line where another program has written the file, without checksums.

    Raises:
        OnnxgradError: there is no such file, it is no safetensors file, or it is damaged.
    """
    data = read_bytes(path)
    with _parsing(path):
        said = read_header(BytesIO(data)).get("__metadata__", {})
        tensors = safetensors.numpy.load(data)
    _check(path, tensors, said, tell)
    words = _words(path, said)
    halves = words.pop(HALVES, [])
    if not _are_names(halves, {name for name, array in tensors.items() if array.dtype == np.uint16}):
        raise _damaged(path, f"its entry '{HALVES}' does not fit its arrays")
    halves = set(halves)
    return {n: a.view(ml_dtypes.bfloat16) if n in halves else a for n, a in tensors.items()}, words


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as one of safetensors does: eight bytes of a length, and an object in JSON.

    Source: https://github.com/huggingface/safetensors#format.
    """
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def load_words(path: Path) -> dict[str, Any]:
    """Return what the metadata of a file say, without its arrays and without a look at checksums.

    Raises:
        OnnxgradError: it can't be read, or is no safetensors file.
    """
    check_is_file(path)
    with _parsing(path), path.open("rb") as file:
        said = read_header(file).get("__metadata__", {})
    return _words(path, said)


def holds_weights_alone(path: Path) -> bool:
    """Whether the metadata of a file say nothing that onnxgrad knows: another program wrote it, of tensors alone.

    Raises:
        OnnxgradError: it can't be read.
    """
    return not load_words(path)


def check_is_file(path: Path) -> None:
    """Refuse a folder or a device in the place of a file of tensors.

    Raises:
        OnnxgradError: it is one.
    """
    if path.exists() and not path.is_file():
        raise OnnxgradError(f"'{path}' is no file of tensors: it is a folder or a device", "name the file")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """What is in a file of tensors, or one beside it.

    Args:
        path: the file.
        most: how many bytes it may have.

    Raises:
        OnnxgradError: it can't be read, or is larger.
    """
    try:
        if most is not None and path.stat().st_size > most:
            raise OnnxgradError(f"'{path}' is larger than such a file is: {path.stat().st_size} bytes")
        check_is_file(path)
        return path.read_bytes()
    except MemoryError:
        raise OnnxgradError(
            f"there is not enough memory to read '{path}'", "free some, or use a larger machine"
        ) from None
    except (OSError, ValueError) as error:  # the latter for a NUL in the name
        raise OnnxgradError(f"'{path}' can't be read: {getattr(error, 'strerror', None) or error}") from None


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Name the file in errors of its parsers."""
    try:
        yield
    except MemoryError:
        raise OnnxgradError(
            f"there is not enough memory to read '{path}'", "free some, or use a larger machine"
        ) from None
    except OSError as error:
        raise OnnxgradError(f"'{path}' can't be read: {error.strerror}") from None
    except Exception as error:  # the library has kinds of its own, and raises others too
        raise OnnxgradError(f"'{path}' is no safetensors file, or is broken: {error}") from error


def _words(path: Path, said: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of onnxgrad, parsed."""
    try:
        return {key: strict_json.loads(value) for key, value in said.items() if key in KNOWN - {CHECKSUMS}}
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"its metadata are no JSON: {error}") from None


def _check(path: Path, tensors: Mapping[str, np.ndarray], said: Mapping[str, str], tell: Tell) -> None:
    """Make sure that a file of onnxgrad is as it was written; a file of another kind is not looked at."""
    if CHECKSUMS not in said:
        _check_foreign(path, said, tell)
        return
    try:
        checksums = strict_json.loads(said[CHECKSUMS])
        words, arrays = checksums["words"], dict(checksums["tensors"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, "its checksums can't be read") from None
    if words != _of_words({key: value for key, value in said.items() if key != CHECKSUMS}):
        raise _damaged(path, "its metadata have another checksum than they were written with")
    found = {name: _of_array(array) for name, array in tensors.items()}
    wrong = next((name for name in {**found, **arrays} if found.get(name) != arrays.get(name)), None)
    if wrong is not None:
        raise _damaged(path, f"'{wrong}' has another checksum than it was written with")


def _check_foreign(path: Path, said: Mapping[str, str], tell: Tell) -> None:
    """Tell of a file without checksums that it may be damaged, unless it is none of onnxgrad's at all."""
    strange = said.keys() - KNOWN
    if not KNOWN & said.keys():
        return
    if strange:
        raise _damaged(path, f"its metadata have an entry {min(strange)!r}")
    tell(f"'{path}' has no checksums, for another program wrote it: damage would not be noticed", 0)


def _damaged(path: Path, why: str) -> OnnxgradError:
    return OnnxgradError(
        f"'{path}' is damaged: {why}",
        "take another copy or an earlier checkpoint; a program that changes such a file leaves the entry "
        f"'{CHECKSUMS}' out of its metadata",
    )


def _of_array(array: np.ndarray) -> str:
    """The checksum of an array, its type and shape included."""
    head = f"{array.dtype.str}{list(array.shape)}".encode()
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, zlib.crc32(head)):08x}"


def _of_words(said: Mapping[str, str]) -> str:
    """The checksum of entries, in whichever order a file has them."""
    return f"{zlib.crc32(json.dumps(dict(said), sort_keys=True).encode()):08x}"


def _are_names(value: object, known: Collection[str]) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name in known for name in value)
