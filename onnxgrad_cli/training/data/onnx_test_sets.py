"""Data as ONNX publishes them with its models: folders test_data_set_0, ... with input_0.pb, input_1.pb, ...

Each set is a batch; the batches are joined. The files follow the inputs of the model, unless their tensors are named
after the inputs of the model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import in_words, is_external
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.reading import Found, check_regular, reading

PREFIX = "test_data_set_"


def folders(path: Path) -> list[Path]:
    """The sets that a folder is or holds, by number."""
    if path.name.startswith(PREFIX):
        return [path]
    return sorted((f for f in path.glob(f"{PREFIX}*") if f.is_dir()), key=lambda f: _number(f.name, PREFIX))


def read(path: Path, inputs: InputTypes) -> Found:
    """The inputs of all sets.

    Raises:
        UsageError: a file can't be read, a set lacks what another has, or they differ in more than their batch.
    """
    sets = [_read_set(folder, inputs) for folder in folders(path)]
    arrays: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for each in sets for name in each):
        if not all(name in each for each in sets):
            raise UsageError(f"'{path}': not every set has a tensor for '{name}'", "complete the sets, or remove some")
        parts = [each[name] for each in sets]
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            shapes = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts[:4])
            raise UsageError(
                f"'{path}': '{name}' differs between the sets: {shapes}", "take sets of one shape and type"
            )
        if not parts[0].ndim and np.unique(parts).size > 1:
            raise UsageError(
                f"'{path}': '{name}' is one number, and another in each set", "take sets where it is the same"
            )
        arrays[name] = np.concatenate(parts) if parts[0].ndim else parts[0]
    return Found(arrays, [])


def _read_set(folder: Path, inputs: InputTypes) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("input_*.pb"), key=lambda file: _number(file.stem, "input_"))
    if not files:
        raise UsageError(f"'{folder}' holds no file input_0.pb", "a set has one file for each input")
    tensors = [_tensor(file) for file in files]
    names = [name for name, _ in tensors]
    if len(set(names)) < len(names) or not set(names) <= set(inputs):
        if len(files) > len(inputs):
            wanted = ", ".join(f"{name} {in_words(value_type)}" for name, value_type in inputs.items())
            raise UsageError(
                f"'{folder}' has {len(files)} inputs, {len(inputs)} are fed: {wanted}", "remove the others"
            )
        names = list(inputs)[: len(files)]
    return {name: array for name, (_, array) in zip(names, tensors, strict=True)}


def _tensor(file: Path) -> tuple[str, np.ndarray]:
    check_regular(file)
    with reading(file, "a tensor", "write it with onnx.save_tensor"):
        tensor = TensorProto()
        tensor.ParseFromString(file.read_bytes())
        if not tensor.data_type:
            raise ValueError("it has no element type")
        if is_external(tensor):
            raise ValueError("its values stand in another file")
        return tensor.name, numpy_helper.to_array(tensor)


def _number(name: str, prefix: str) -> tuple[int, str]:
    rest = name.removeprefix(prefix)
    number = number_in(rest)
    return (10**18 if number is None else number), rest
