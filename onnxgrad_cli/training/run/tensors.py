"""Named arrays and a few words in a safetensors file: what checkpoints and adapters are kept in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import save_bytes

HALVES = "bfloat16"
"""The entry of the metadata with the names of what is bfloat16, which the library can't read into numpy."""


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray], words: Mapping[str, Any]) -> None:
    """Write arrays, whole or not at all, and on the disk when this returns.

    Args:
        path: the file.
        tensors: the arrays, by name.
        words: what the metadata say besides; values are written as JSON.

    Raises:
        OnnxgradError: the file can't be written, or the package safetensors is missing.
    """
    library = _library()
    halves = [name for name, array in tensors.items() if array.dtype == ml_dtypes.bfloat16]
    plain = {name: array.view(np.uint16) if name in halves else array for name, array in tensors.items()}
    said = {key: json.dumps(value) for key, value in {**words, **({HALVES: halves} if halves else {})}.items()}
    data = library.save({name: np.ascontiguousarray(a).reshape(a.shape) for name, a in plain.items()}, said)
    save_bytes(data, path, durable=True)


def load_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays in a file, and what its metadata say.

    Raises:
        OnnxgradError: there is no such file, it is no safetensors file, or the package safetensors is missing.
    """
    library = _library()
    try:
        data = path.read_bytes()
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        said = {key: json.loads(value) for key, value in head.get("__metadata__", {}).items()}
        tensors = library.load(data)
    except OSError as error:
        raise OnnxgradError(f"'{path}' can't be read: {error.strerror}") from None
    except Exception as error:  # the library has kinds of its own, and raises others too
        raise OnnxgradError(f"'{path}' is no safetensors file, or is broken: {error}") from error
    halves = said.pop(HALVES, [])
    return {n: a.view(ml_dtypes.bfloat16) if n in halves else a for n, a in tensors.items()}, said


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise OnnxgradError("the package safetensors is missing", "pip install 'onnxgrad[train]'") from None
    return safetensors.numpy
