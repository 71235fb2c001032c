"""Data in a .safetensors file, whose keys are the names of the inputs. What is wanted of it is read into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files.safetensors_header import read_header
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.reading import Found, reading


def read(path: Path, inputs: InputTypes) -> Found:
    """The arrays of a safetensors file.

    Raises:
        UsageError: it can't be read, or numpy lacks the type of an array.
    """
    with reading(path, "a safetensors file", "write it with safetensors.numpy.save_file"):
        with path.open("rb") as stream:
            read_header(stream)
        with safetensors.safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            arrays = {name: _array(path, file, name) for name in names if name in inputs}
            return Found(arrays, [name for name in names if name not in inputs])


def _array(path: Path, file: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(file.get_tensor(name))
    except AttributeError:  # the library asks numpy for the type
        kind = file.get_slice(name).get_dtype()
        raise UsageError(f"'{path}': '{name}' is of {kind}, which numpy lacks", "save it as F32 or F16") from None
