"""Data in a .safetensors file, whose keys are the names of the inputs. What is wanted of it is read into memory."""

from __future__ import annotations

from pathlib import Path

from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.reading import Found, library, reading


def read(path: Path, inputs: InputTypes) -> Found:
    """The arrays of a safetensors file.

    Raises:
        UsageError: it can't be read, or the package safetensors is missing.
    """
    safetensors = library("safetensors", "train", path)
    with (
        reading(path, "a safetensors file", "write it with safetensors.numpy.save_file"),
        safetensors.safe_open(path, framework="numpy") as file,
    ):
        names = list(file.keys())
        return Found({n: file.get_tensor(n) for n in names if n in inputs}, [n for n in names if n not in inputs])
