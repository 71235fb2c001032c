"""Write and read the initial values of a training model whose weights are inputs, as a .bin and a .json file.

JavaScript can't feed an initializer, so a model for JavaScript has weights and state as inputs without stored values.
JavaScript reads their initial values from the two files, and needs no parser for them. For each input, the JSON gives
its offset in the .bin file, its shape, and the name of the typed array for its elements. Arrays of zeros have the last
offsets, and are not stored: a reader allocates `bytes` zeros, and copies the .bin file to their beginning. A .bin file
of trained values is complete.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.common.strict_json import decoded
from onnxgrad_cli.errors import OnnxgradError, conflict, mismatch, missing_file, missing_value, unreadable
from onnxgrad_cli.files.outputs import check_target, is_ours
from onnxgrad_cli.files.transaction import AtomicWriteGroup
from onnxgrad_cli.ir.types import Arrays, dtype_of, shape_of
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import Adapter, Quantized, Roles, describe

KEPT = frozenset({"weight", "state"})
"""The roles of a training model's inputs whose start values are stored in a file beside the model."""

ROLES, VALUES = ".json", ".bin"
"""The suffixes of the files with start values and their description. Otherwise their names equal the model's name."""

ALIGNMENT = 8
"""Alignment of arrays in bytes. A typed array in JavaScript must start at a multiple of its element size."""

TYPED_ARRAYS = {
    "float32": "Float32Array", "float64": "Float64Array", "float16": "Uint16Array", "bfloat16": "Uint16Array",
    "int8": "Int8Array", "int16": "Int16Array", "int32": "Int32Array", "int64": "BigInt64Array", "bool": "Uint8Array",
    "uint8": "Uint8Array", "uint16": "Uint16Array", "uint32": "Uint32Array", "uint64": "BigUint64Array",
}  # fmt: skip
"""Element type -> the JavaScript typed array that holds its elements."""


@dataclass(frozen=True)
class HeldValues:
    """Trained or initial values that were read from a file.

    Attributes:
        values: name -> array, for weights and state.
        weights: the names of the trained tensors.
        adapters: the low-rank adapters among the weights.
        averages: weight -> the name of the state with its moving average.
        quantized: the weights that the inference model stores as integers.
    """

    values: Arrays
    weights: tuple[str, ...]
    adapters: tuple[Adapter, ...] = ()
    averages: dict[str, str] = field(default_factory=dict)
    quantized: Quantized = field(default_factory=Quantized)


# -- writing ----------------------------------------------------------------------------------------------------------


def places(model: Path) -> tuple[Path, Path]:
    """Return the paths of the JSON file and the .bin file that belong to the file of a training model."""
    return model.with_suffix(ROLES), model.with_suffix(VALUES)


def check_places(model: Path, force: bool = False) -> None:
    """Check that the JSON file and the .bin file beside a model may be written.

    A .bin file has no header that shows which program wrote it. It may be replaced if onnxgrad wrote the JSON file
    beside it.

    Raises:
        UsageError: a file is the model itself, or was not written by onnxgrad.
        OnnxgradError: a file can't be written.
    """
    roles, values = places(model)
    if model in (roles, values):
        raise conflict(
            f"the file of the weights beside the model would also be called '{model}'",
            "choose a name that ends in .onnx",
        )
    check_target(roles, force=force)
    check_target(values, force=force or (roles.is_file() and is_ours(roles)))


def stage_values(
    switch: AtomicWriteGroup, model: ModelProto, values: Mapping[str, np.ndarray], path: Path, opened: str = ""
) -> list[Path]:
    """Add the JSON file and the .bin file with the initial values of a training model to a group of files to write.

    Args:
        switch: the group of files, which is written atomically. The model is its head.
        model: the training model.
        values: name -> initial value, for weights and state.
        path: the final path of the model.
        opened: the name of the file that JavaScript opens, if it is not `path` but the model in another format.

    Returns:
        The paths of the JSON file and of the .bin file.
    """
    ordered = sorted(values, key=lambda name: not values[name].any())  # zeros come last
    offsets, stored, end = {}, 0, 0
    for name in ordered:
        offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = offsets[name] + values[name].nbytes
        stored = end if values[name].any() else stored
    data = bytearray(stored)
    for name in ordered:
        if values[name].any():
            data[offsets[name] : offsets[name] + values[name].nbytes] = little_endian(values[name])
    roles_file, values_file = places(path)
    files = {"model": opened or path.name, "values": values_file.name}
    digest = hashlib.sha256(data).hexdigest()
    said = _said(model, offsets, {**files, "bytes": end, "stored": stored, "sha256": digest})
    switch.stage(roles_file, lambda file: file.write(_lines(said).encode()))
    switch.stage(values_file, lambda file: file.write(data))
    return [roles_file, values_file]


def little_endian(array: np.ndarray) -> bytes:
    """Return the elements of an array in row-major order, in little-endian byte order."""
    kind = array.dtype
    return array.astype(kind.newbyteorder("<")).tobytes() if kind != ml_dtypes.bfloat16 else array.tobytes()


def _said(model: ModelProto, offsets: Mapping[str, int], files: Mapping[str, Any]) -> dict[str, Any]:
    roles = describe(model)
    rates = [name for name, role in roles.inputs.items() if role == "learning rate"]
    inputs: dict[str, Any] = {}
    for value in model.graph.input:
        if value.name in roles.inputs:
            inputs[value.name] = {"role": roles.inputs[value.name], **_typed(value)}
        if value.name in offsets:
            inputs[value.name]["offset"] = offsets[value.name]
    for name, successor in roles.successors.items():
        inputs[name]["next"] = successor
    for name, gradient in roles.gradients.items():
        inputs[name]["gradient"] = gradient
    for name, slot in roles.slots.items():
        inputs[name]["slot"] = slot.kind
    return {
        "onnxgrad": tool_version(),
        **files,
        "loss": roles.loss,
        "reduction": roles.reduction,
        "losses": [asdict(term) for term in roles.losses],
        "learning_rate": rates[0] if rates else None,
        "optimizer": roles.optimizer or None,
        "inputs": inputs,
        "outputs": {v.name: {"role": roles.outputs[v.name].role, **_typed(v)} for v in model.graph.output},
        "averages": roles.averages,
        "adapters": [asdict(adapter) for adapter in roles.adapters],
        "quantized": asdict(roles.quantized),
    }


def _typed(value: ValueInfoProto) -> dict[str, Any]:
    """Return the description of an input or output: element type, typed array and sizes.

    A size without a name is null.
    """
    kind = helper.tensor_dtype_to_np_dtype(dtype_of(value.type)).name if dtype_of(value.type) else "unknown"
    kind = "string" if kind.startswith(("object", "str")) else kind
    dims = [None if dim == "?" else dim for dim in shape_of(value.type) or ()]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    size = {"size": math.prod(sizes)} if len(sizes) == len(dims) else {}
    return {"type": kind, "array": TYPED_ARRAYS.get(kind), "dims": dims, **size}


def _lines(said: Mapping[str, Any]) -> str:
    """Format a description as JSON, with a line for each entry, and for each input and output."""
    entries = []
    for key, value in said.items():
        text = strict_json.dumps(value)
        if key in ("inputs", "outputs"):
            each = (f"  {strict_json.dumps(name)}: {strict_json.dumps(port)}" for name, port in value.items())
            text = "{\n" + ",\n".join(each) + "\n }"
        entries.append(f" {strict_json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


# -- reading ----------------------------------------------------------------------------------------------------------


def is_values(path: Path) -> bool:
    """Return True if a path has the suffix of a file with start values (.bin) or of its description (.json)."""
    return path.suffix in (ROLES, VALUES)


def read_values(path: Path, roles: Path | None = None) -> HeldValues:
    """Read trained or initial values from a .bin file and the JSON file that describes it.

    Args:
        path: the .bin file; or the JSON file beside a training model, for the initial values.
        roles: the JSON file that describes the .bin file; by default the one with the same name beside it.

    Raises:
        OnnxgradError: a file is missing, can't be read or is damaged, or the .bin file has a different length than the
            JSON file says.
    """
    described = roles or path.with_suffix(ROLES)
    if not described.is_file():
        hint = "name the file that `onnxgrad build --weights inputs` wrote beside the training model with `roles`"
        raise missing_file(f"'{described}' is missing, which describes the bytes of '{path}'", hint)
    said = _json(described)
    try:
        values = described.with_name(Path(said["values"]).name) if path.suffix == ROLES else path
        data = _stored(values, said, start=path.suffix == ROLES)
        arrays = {
            name: _array(data, entry, said["bytes"]) for name, entry in said["inputs"].items() if "offset" in entry
        }
        weights = tuple(name for name in arrays if said["inputs"][name]["role"] == "weight")
        adapters, averages = (
            decoded(kind, said[name], name)
            for kind, name in ((tuple[Adapter, ...], "adapters"), (dict[str, str], "averages"))
        )
        return HeldValues(arrays, weights, adapters, averages, decoded(Quantized, said["quantized"], "quantized"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        hint = "copy it again from the folder of the training model"
        raise unreadable(f"'{described}' does not describe the values of a training model: {error!r}", hint) from None


def _json(path: Path) -> Any:
    try:
        return strict_json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise unreadable(f"'{path}' is not JSON: {error}") from None
    except OSError as error:
        raise unreadable(f"'{path}' can't be read: {error.strerror}") from None


def _stored(path: Path, said: Mapping[str, Any], start: bool) -> bytes:
    """Read the bytes of a .bin file. With `start`, they must be the initial values, which the checksum shows."""
    if path.exists() and not path.is_file():
        raise unreadable(f"'{path}' is not a file of values, but a folder or a device", "name the file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(f"'{path}' can't be read: {error.strerror}") from None
    if len(data) == said["stored"] and hashlib.sha256(data).hexdigest() == said["sha256"]:
        return data
    if start:
        hint = "to read trained values with `onnxgrad export`, name their .bin file"
        raise OnnxgradError(
            f"'{path}' does not contain the initial values: its checksum differs", hint, code="mismatch"
        )
    if len(data) != said["bytes"]:
        hint = "it was cut off, or belongs to another training model"
        raise OnnxgradError(
            f"'{path}' has {len(data)} bytes, but the values of the model have {said['bytes']}", hint, code="mismatch"
        )
    return data


def _array(data: bytes, entry: Mapping[str, Any], end: int) -> np.ndarray:
    """Return the array that an entry of the JSON file describes.

    An array beyond the end of `data` is zero. It takes no memory, so that a wrong JSON file with huge sizes does no
    harm.
    """
    dtype = np.dtype(ml_dtypes.bfloat16 if entry["type"] == "bfloat16" else entry["type"])
    if TYPED_ARRAYS.get(dtype.name) is None or any(size < 0 for size in entry["dims"]) or entry["offset"] < 0:
        raise ValueError(dict(entry))
    if entry["offset"] + math.prod(entry["dims"]) * dtype.itemsize > end:
        raise ValueError(f"{dict(entry)} is beyond the end of the data, {end} bytes")
    if entry["offset"] >= len(data) or not math.prod(entry["dims"]):
        return np.broadcast_to(np.zeros((), dtype), entry["dims"])
    stored = dtype if dtype == ml_dtypes.bfloat16 else dtype.newbyteorder("<")
    found = np.frombuffer(data, stored, math.prod(entry["dims"]), entry["offset"])
    return np.asarray(found, dtype).reshape(entry["dims"])


def lacking(model: ModelProto, roles: Roles) -> list[str]:
    """Return the weights and state of a training model that have neither a stored nor a described initial value."""
    stored = {tensor.name for tensor in model.graph.initializer} | roles.slots.keys()
    return [name for name, role in roles.inputs.items() if role in KEPT and name not in stored]


def values_beside(path: Path | None, names: Iterable[str]) -> Arrays:
    """Read the values of weights and state from the files beside a training model.

    Args:
        path: the model's file.
        names: the inputs that have no value in the model.

    Raises:
        UsageError: the model was not read from a file, or the values belong to another model.
        OnnxgradError: a file is missing or can't be read.
    """
    names = list(names)
    hint = "keep the files of `onnxgrad build --weights inputs` in one folder, and name the model's file"
    weights = f"the weights of the training model, such as '{names[0]}', are inputs"
    if path is None:
        raise missing_value(
            f"{weights}, and their values are in files beside the model, but the model was not read from a file", hint
        )
    if not places(path)[0].is_file():
        raise missing_file(f"{weights}, but '{places(path)[0]}' with their values is missing", hint)
    found = read_values(places(path)[0]).values
    for name in names:
        if name not in found:
            raise mismatch(f"'{places(path)[0]}' belongs to another training model: it has no '{name}'", hint)
    return found


def with_values(model: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Return a copy of a training model in which inputs without a stored value get the one in `values`."""
    copy = copied(model)
    stored = {tensor.name for tensor in model.graph.initializer}
    copy.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in values.items() if name not in stored)
    return copy
