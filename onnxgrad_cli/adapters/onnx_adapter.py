"""Read and write adapters in onnxruntime's format `.onnx_adapter`, which Olive and onnxruntime-genai use, too.

The file is a flatbuffer of named tensors. At run time, each tensor overrides the initializer with the same name in a
model that `branches.make_adaptable` has written. The tensors of an adapter are `<module>.lora_A.weight` [in, rank] and
`<module>.lora_B.weight` [rank, out]; B is already multiplied by alpha / rank. The file can also hold weights that were
trained in full.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.adapters.branches import arrays_of, factors_of, refuse_magnitudes
from onnxgrad_cli.adapters.own_file import check_factors
from onnxgrad_cli.adapters.places import AdapterSite, keys, misfit, places, together
from onnxgrad_cli.checkpoints.base_model_digest import untrained_digest
from onnxgrad_cli.checkpoints.stored_weights import stored_tensors
from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.errors import OnnxgradError, suggest, unreadable
from onnxgrad_cli.execution.session import load_onnxruntime
from onnxgrad_cli.metadata import Adapter

MAGIC = b"TORT"
"""The identifier of the format: the fifth to eighth byte of a file."""

TYPES = frozenset({"float16", "float32", "float64"})
"""The dtypes of weights that both numpy and onnxruntime's Python API support."""

A, B = ".lora_A.weight", ".lora_B.weight"


def is_onnx_adapter(path: Path) -> bool:
    """Return True if a file has onnxruntime's adapter format, and False if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(8)[4:] == MAGIC
    except (OSError, ValueError):  # ValueError: the name has a NUL
        return False


def onnx_adapter_bytes(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of an .onnx_adapter file.

    Args:
        model: the inference model.
        adapters: its adapters.
        values: name -> array: the LoRA matrices of the adapters, and weights that were trained in full.

    Raises:
        UsageError: an adapter uses DoRA.
        OnnxgradError: a LoRA matrix is missing or does not fit, or the file format doesn't support a dtype.
    """
    check_factors(adapters, values)
    refuse_magnitudes(adapters, "`adapter`")
    own = {adapter.weight: adapter for adapter in adapters}
    factors = {name for adapter in adapters for name in adapter.names}
    tensors = {name: array for name, array in values.items() if name not in factors}
    for key, (place, *_) in keys(places(model, own.keys())).items():
        found = place.of(own[place.weight], values)
        tensors[key + A], tensors[key + B] = arrays_of(place, found, found.scale)
    strange = next((name for name, array in tensors.items() if array.dtype.name not in TYPES), None)
    if strange is not None:
        message = f"'{strange}' is {tensors[strange].dtype}, which an .onnx_adapter file can't hold"
        raise OnnxgradError(message, "pass a file that ends in .safetensors", code="wrong_type")
    runtime = load_onnxruntime()
    written = runtime.AdapterFormat()
    written.set_parameters({
        name: runtime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensors[name])) for name in sorted(tensors)
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter"
        written.export_adapter(str(file))
        base = untrained_digest(model, tensors)
        return file.read_bytes() + f"onnxgrad {tool_version()} base {base}".encode()  # marks files of onnxgrad


def base_of(path: Path) -> str:
    """Return the digest of the base model, which onnxgrad appends to its files; "" for other programs' files."""
    found = re.search(rb"onnxgrad \S+ base ([0-9a-f.-]{8,24})\Z", path.read_bytes())
    return found[1].decode() if found else ""


def load_onnx_adapter(path: Path, model: ModelProto) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """Read the adapters of a model from a file.

    Returns:
        The adapters; and a map name -> array of their LoRA matrices and of weights that were trained in full.

    Raises:
        OnnxgradError: the file is damaged, or the model has no matrix product or weight to which one of its tensors
            belongs.
    """
    tensors = _read(path)
    found: list[tuple[AdapterSite, Adapter, dict[str, np.ndarray]]] = []
    known = places(model)
    named = keys(known)
    for key, readers in named.items():
        if key + A in tensors and key + B in tensors:
            place, a, b = readers[0], tensors.pop(key + A), tensors.pop(key + B)
            _check(path, key, place, a, b)
            factors = factors_of(place, a, b, 1.0)
            found.append((place, *place.adapter(factors, len(factors.a))))
    stored = {name: list(tensor.dims) for tensor, name in stored_tensors(model.graph)}
    for name, array in tensors.items():
        if stored.get(name) != list(array.shape):
            message = f"'{path}' holds '{name}' of shape {list(array.shape)}, but the model has no place for it"
            hint = suggest(name, [key + end for key in named for end in (A, B)], "LoRA matrices")
            raise OnnxgradError(message, hint, code="unknown_name")
    adapters, values = together(found, known)
    return adapters, {**values, **tensors}


def _read(path: Path) -> dict[str, np.ndarray]:
    """Read a file with onnxruntime, which refuses files with impossible sizes. Return name -> tensor.

    Raises:
        OnnxgradError: onnxruntime can't read the file.
    """
    runtime = load_onnxruntime()
    try:
        file = runtime.AdapterFormat.read_adapter(str(path))
        return {name: value.numpy().copy() for name, value in file.get_parameters().items()}
    except Exception as error:  # onnxruntime's exception classes are not public
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise unreadable(f"'{path}' is not an adapter of onnxruntime, or is damaged: {why}") from None


def _check(path: Path, key: str, place: AdapterSite, a: np.ndarray, b: np.ndarray) -> None:
    """Check that the LoRA matrices A and B have the shapes that a matrix product requires.

    Raises:
        OnnxgradError: they have other shapes.
    """
    (size_in, size_out), ones = place.shape, place.kernel
    rank = a.shape[1 if place.leads else 0] if a.ndim == 2 + len(ones) else 0
    shapes = ((size_in, rank), (rank, size_out)) if place.leads else ((rank, size_in), (size_out, rank))
    if rank < 1 or [a.shape, b.shape] != [(*shape, *ones) for shape in shapes]:
        raise misfit(path, key, place.shape, a, b)
