"""Read ONNX test sets, which are published with models: folders test_data_set_0, ... with input_0.pb, input_1.pb, ...

Each set is a batch; the batches are concatenated. A tensor belongs to the input with its name. If the names don't fit,
the files belong to the model's inputs in order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.loaded_columns import LoadedColumns
from onnxgrad_cli.data.read_failures import check_regular, reading
from onnxgrad_cli.errors import mismatch, missing_file, missing_value
from onnxgrad_cli.ir.types import is_external

PREFIX = "test_data_set_"


def folders(path: Path) -> list[Path]:
    """Return the test sets at a path: the path if it is a test set, otherwise the test sets in it, sorted by number."""
    if path.name.startswith(PREFIX):
        return [path]
    return sorted((f for f in path.glob(f"{PREFIX}*") if f.is_dir()), key=lambda f: _number(f.name, PREFIX))


def read(path: Path, inputs: InputTypes) -> LoadedColumns:
    """Read the inputs of all test sets, concatenated along the batch.

    Raises:
        UsageError: a file can't be read, a set lacks an input that another has, or the sets differ in dtype or in an
            axis other than the batch.
    """
    sets = [_read_set(folder, inputs) for folder in folders(path)]
    arrays: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for each in sets for name in each):
        if not all(name in each for each in sets):
            raise missing_value(f"'{path}': not every set has a tensor for '{name}'", "complete the sets")
        parts = [each[name] for each in sets]
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            shapes = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts[:4])
            hint = "use sets with the same shape and type"
            raise mismatch(f"'{path}': '{name}' differs between the sets: {shapes}", hint)
        if not parts[0].ndim and np.unique(parts).size > 1:
            raise mismatch(f"'{path}': the number '{name}' differs between the sets", "use sets with the same number")
        arrays[name] = np.concatenate(parts) if parts[0].ndim else parts[0]
    return LoadedColumns(arrays, [])


def _read_set(folder: Path, inputs: InputTypes) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("input_*.pb"), key=lambda file: _number(file.stem, "input_"))
    if not files:
        hint = "save one file for each input: input_0.pb, input_1.pb, ..."
        raise missing_file(f"'{folder}' holds no file input_0.pb", hint)
    tensors = [_tensor(file) for file in files]
    names = [name for name, _ in tensors]
    if len(set(names)) < len(names) or not set(names) <= set(inputs):
        if len(files) > len(inputs):
            message = f"'{folder}' has {len(files)} inputs, but the model takes {len(inputs)}: {', '.join(inputs)}"
            raise mismatch(message, "remove the additional files")
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
            raise ValueError("its values are in another file")
        return tensor.name, numpy_helper.to_array(tensor)


def _number(name: str, prefix: str) -> tuple[int, str]:
    rest = name.removeprefix(prefix)
    number = number_in(rest)
    return (10**18 if number is None else number), rest
