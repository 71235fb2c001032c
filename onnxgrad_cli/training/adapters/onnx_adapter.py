"""Adapters in the format of onnxruntime, `.onnx_adapter`, which Olive and onnxruntime-genai have too.

A flatbuffer of named tensors, each of which overrides the initializer of its name in a model that
`branches.make_adaptable` has written: `<module>.lora_A.weight` of [in, rank] and `<module>.lora_B.weight` of
[rank, out], which has been multiplied with alpha / rank. It can hold weights that were trained in full, too.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.errors import OnnxgradError, suggest
from onnxgrad_cli.execution.session import load_onnxruntime
from onnxgrad_cli.metadata import Adapter, tool_version
from onnxgrad_cli.training.adapters.branches import arrays_of, factors_of, refuse_magnitudes
from onnxgrad_cli.training.adapters.own_file import check_factors
from onnxgrad_cli.training.adapters.places import Place, keys, places
from onnxgrad_cli.training.adapters.together import together
from onnxgrad_cli.training.run.base import untrained_digest
from onnxgrad_cli.training.run.export import stored_tensors

MAGIC = b"TORT"
"""The identifier of such a file, at its fifth byte."""

TYPES = frozenset({"float16", "float32", "float64"})
"""What numpy and onnxruntime both know, of the types that weights have."""

A, B = ".lora_A.weight", ".lora_B.weight"


def is_onnx_adapter(path: Path) -> bool:
    """Whether a file is one of onnxruntime's adapters; what can't be read is none."""
    try:
        with path.open("rb") as file:
            return file.read(8)[4:] == MAGIC
    except (OSError, ValueError):  # the latter for a NUL in the name
        return False


def onnx_adapter_bytes(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> bytes:
    """The file for adapters of a model.

    Args:
        model: the inference model.
        adapters: its adapters.
        values: their factors, and weights that were trained in full.

    Raises:
        UsageError: an adapter has more than two factors.
        OnnxgradError: a factor is missing or does not fit, or the type of one has no place there.
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
        raise OnnxgradError(
            f"'{strange}' is of {tensors[strange].dtype}, which an .onnx_adapter can't hold here",
            "name a file that ends in .safetensors",
        )
    runtime = load_onnxruntime()
    written = runtime.AdapterFormat()
    written.set_parameters({
        name: runtime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensors[name])) for name in sorted(tensors)
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter"
        written.export_adapter(str(file))
        base = untrained_digest(model, tensors)
        return file.read_bytes() + f"onnxgrad {tool_version()} base {base}".encode()  # so that we know it as ours


def base_of(path: Path) -> str:
    """What follows the tensors of a file that is ours, of the model that they were trained on; "" elsewhere."""
    found = re.search(rb"onnxgrad \S+ base ([0-9a-f.-]{8,24})\Z", path.read_bytes())
    return found[1].decode() if found else ""


def load_onnx_adapter(path: Path, model: ModelProto) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters in a file, as they belong to a model, and values of weights that it holds besides.

    Raises:
        OnnxgradError: the file is damaged, or holds what the model has no place for.
    """
    tensors = _read(path)
    found: list[tuple[Place, Adapter, dict[str, np.ndarray]]] = []
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
            raise OnnxgradError(
                f"'{path}' holds '{name}' of {list(array.shape)}, and the model has no place for it",
                suggest(name, [key + end for key in named for end in (A, B)], "factors"),
            )
    adapters, values = together(found, known)
    return adapters, {**values, **tensors}


def _read(path: Path) -> dict[str, np.ndarray]:
    """The tensors, by name; what lies behind sizes that can't be right, onnxruntime refuses."""
    runtime = load_onnxruntime()
    try:
        file = runtime.AdapterFormat.read_adapter(str(path))
        return {name: value.numpy().copy() for name, value in file.get_parameters().items()}
    except Exception as error:  # of kinds that are not public
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OnnxgradError(f"'{path}' is no adapter of onnxruntime, or is damaged: {why}") from None


def _check(path: Path, key: str, place: Place, a: np.ndarray, b: np.ndarray) -> None:
    """Make sure that factors are a pair that fits a product."""
    (size_in, size_out), ones = place.shape, place.kernel
    rank = a.shape[1 if place.leads else 0] if a.ndim == 2 + len(ones) else 0
    shapes = ((size_in, rank), (rank, size_out)) if place.leads else ((rank, size_in), (size_out, rank))
    if rank < 1 or [a.shape, b.shape] != [(*shape, *ones) for shape in shapes]:
        raise OnnxgradError(
            f"'{path}' does not fit the model: '{key}' goes from {size_in} to {size_out}, "
            f"its factors are {list(a.shape)} and {list(b.shape)}",
            "it is of another model, or of quantized factors, which are not read",
        )
