"""The values of a training model whose weights are inputs, beside it: bytes, and a JSON that says what they are.

JavaScript can't feed an initializer, so that there weights and state must be inputs without stored values. What they
hold before the first step it reads without a parser: each input has its offset in the bytes, its shape, and the name of
the typed array that its elements make. What is zero before the first step stands last and is left out of the file:
who reads it makes `bytes` zeros and copies the file over their beginning. A file of trained values is whole.
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
from onnxgrad_cli.common.typed_json import decoded
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files.switch import Switch
from onnxgrad_cli.files.writing import check_target, is_ours
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import Arrays, dtype_of, shape_of
from onnxgrad_cli.metadata import Adapter, Quantized, Roles, describe, tool_version

KEPT = frozenset({"weight", "state"})
"""The roles of inputs whose values lie beside the model."""

ROLES, VALUES = ".json", ".bin"
"""What the names of the two files end with, in place of the model's suffix."""

ALIGNMENT = 8
"""Bytes. Each array starts at a multiple: a typed array in JavaScript starts at one of its element's size."""

TYPED_ARRAYS = {
    "float32": "Float32Array", "float64": "Float64Array", "float16": "Uint16Array", "bfloat16": "Uint16Array",
    "int8": "Int8Array", "int16": "Int16Array", "int32": "Int32Array", "int64": "BigInt64Array", "bool": "Uint8Array",
    "uint8": "Uint8Array", "uint16": "Uint16Array", "uint32": "Uint32Array", "uint64": "BigUint64Array",
}  # fmt: skip
"""Element type -> the array of JavaScript that holds such elements; the types are called as its runtimes call them."""


@dataclass(frozen=True)
class HeldValues:
    """What files of values hold.

    Attributes:
        values: weights and state, by name.
        weights: the names of what is trained.
        adapters: the low-rank adapters among the weights.
        averages: weight -> the state with its moving average.
        quantized: what the inference model stores as integers.
    """

    values: Arrays
    weights: tuple[str, ...]
    adapters: tuple[Adapter, ...] = ()
    averages: dict[str, str] = field(default_factory=dict)
    quantized: Quantized = field(default_factory=Quantized)


# -- writing ----------------------------------------------------------------------------------------------------------


def places(model: Path) -> tuple[Path, Path]:
    """The JSON and the bytes that belong to a training model's file."""
    return model.with_suffix(ROLES), model.with_suffix(VALUES)


def check_places(model: Path, force: bool = False) -> None:
    """Make sure that the files beside a model may be written.

    Bytes have no head that says who wrote them: they are ours where a JSON of ours stands beside.

    Raises:
        UsageError: one is the model itself, or a file that onnxgrad did not write.
        OnnxgradError: one can't be written.
    """
    roles, values = places(model)
    if model in (roles, values):
        raise UsageError(f"'{model}' is what its values or their description would be called", "end it in .onnx")
    check_target(roles, force=force)
    check_target(values, force=force or (roles.is_file() and is_ours(roles)))


def stage_values(
    switch: Switch, model: ModelProto, values: Mapping[str, np.ndarray], path: Path, opened: str = ""
) -> list[Path]:
    """Write the values of a training model's inputs and what they are; both files take their names with the model.

    Args:
        switch: lets the files take their names; its head is the model, to which they are bound.
        model: the training model.
        values: weights and state before the first step, by name.
        path: where the model goes.
        opened: the name of the file that JavaScript opens, if it is another form of the model.

    Returns:
        The files: the JSON, then the bytes.
    """
    ordered = sorted(values, key=lambda name: not values[name].any())  # what is zero comes last
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
    """The elements in row-major order, the low byte of each first."""
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
    """The element type, the typed array of JavaScript and the sizes; a size without a name is null."""
    kind = helper.tensor_dtype_to_np_dtype(dtype_of(value.type)).name if dtype_of(value.type) else "unknown"
    kind = "string" if kind.startswith(("object", "str")) else kind
    dims = [None if dim == "?" else dim for dim in shape_of(value.type) or ()]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    size = {"size": math.prod(sizes)} if len(sizes) == len(dims) else {}
    return {"type": kind, "array": TYPED_ARRAYS.get(kind), "dims": dims, **size}


def _lines(said: Mapping[str, Any]) -> str:
    """JSON with each entry, and each input and output, on a line of its own."""
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
    """Whether a file is called as one of values, or as their description."""
    return path.suffix in (ROLES, VALUES)


def read_values(path: Path, roles: Path | None = None) -> HeldValues:
    """The values in a file of a training, or of its start.

    Args:
        path: the bytes; or the JSON beside a training model, which names those of the start.
        roles: the JSON that says what the bytes are; by default the one of the same name beside them.

    Raises:
        UsageError: there is no such JSON.
        OnnxgradError: a file can't be read, is damaged, or is not of the length that the JSON says.
    """
    described = roles or path.with_suffix(ROLES)
    if not described.is_file():
        hint = "name the one that `onnxgrad build --weights inputs` has written beside the training model with `roles`"
        raise UsageError(f"there is no '{described}' that says what '{path}' holds", hint)
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
        hint = "take it anew from the folder of the training model"
        raise OnnxgradError(
            f"'{described}' does not describe the values of a training model: {error!r}", hint
        ) from None


def _json(path: Path) -> Any:
    try:
        return strict_json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise OnnxgradError(f"'{path}' is no JSON: {error}") from None
    except OSError as error:
        raise OnnxgradError(f"'{path}' can't be read: {error.strerror}") from None


def _stored(path: Path, said: Mapping[str, Any], start: bool) -> bytes:
    """The bytes of all values; a file of the start leaves out what is zero behind the last one that is not."""
    if path.exists() and not path.is_file():
        raise OnnxgradError(f"'{path}' is no file of values: it is a folder or a device", "name the file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OnnxgradError(f"'{path}' can't be read: {error.strerror}") from None
    if len(data) == said["stored"] and hashlib.sha256(data).hexdigest() == said["sha256"]:
        return data
    if start:
        hint = "`onnxgrad export` takes trained values by the name of their own file, the .bin"
        raise OnnxgradError(f"'{path}' does not hold the values of the start: its checksum is another", hint)
    if len(data) != said["bytes"]:
        hint = "it was cut off, or is of another training model"
        raise OnnxgradError(f"'{path}' has {len(data)} bytes, and the values of the model {said['bytes']}", hint)
    return data


def _array(data: bytes, entry: Mapping[str, Any], end: int) -> np.ndarray:
    """An array at its place; one behind all that is stored is zero, and takes no memory, whatever its sizes claim."""
    dtype = np.dtype(ml_dtypes.bfloat16 if entry["type"] == "bfloat16" else entry["type"])
    if TYPED_ARRAYS.get(dtype.name) is None or any(size < 0 for size in entry["dims"]) or entry["offset"] < 0:
        raise ValueError(dict(entry))
    if entry["offset"] + math.prod(entry["dims"]) * dtype.itemsize > end:
        raise ValueError(f"{dict(entry)} lies behind the {end} bytes that there are")
    if entry["offset"] >= len(data) or not math.prod(entry["dims"]):
        return np.broadcast_to(np.zeros((), dtype), entry["dims"])
    stored = dtype if dtype == ml_dtypes.bfloat16 else dtype.newbyteorder("<")
    found = np.frombuffer(data, stored, math.prod(entry["dims"]), entry["offset"])
    return np.asarray(found, dtype).reshape(entry["dims"])


def lacking(model: ModelProto, roles: Roles) -> list[str]:
    """The weights and state of a training model that have no value, neither a stored nor a described one."""
    stored = {tensor.name for tensor in model.graph.initializer} | roles.slots.keys()
    return [name for name, role in roles.inputs.items() if role in KEPT and name not in stored]


def values_beside(path: Path | None, names: Iterable[str]) -> Arrays:
    """The values of weights and state that lie beside a training model.

    Args:
        path: the model's file.
        names: the inputs that have no value in it.

    Raises:
        UsageError: there are none, or not all of these.
        OnnxgradError: they can't be read.
    """
    names = list(names)
    hint = "keep what `onnxgrad build --weights inputs` writes together, and name the model's file"
    if path is None or not places(path)[0].is_file():
        where = f"there is no '{places(path)[0]}' with their values" if path else "their values lie beside its file"
        raise UsageError(f"the weights of the training model, such as '{names[0]}', are inputs, and {where}", hint)
    found = read_values(places(path)[0]).values
    for name in names:
        if name not in found:
            raise UsageError(f"'{places(path)[0]}' is of another training model: it has no '{name}'", hint)
    return found


def with_values(model: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """A copy of a training model, with values stored for those of its inputs that have none."""
    copy = copied(model)
    stored = {tensor.name for tensor in model.graph.initializer}
    copy.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in values.items() if name not in stored)
    return copy
