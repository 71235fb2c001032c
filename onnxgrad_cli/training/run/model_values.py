"""Weights from an ONNX file that onnxgrad wrote: a trained model, a model of derivatives, or a training model.

Weights return to the model that they came from by name, element type and shape. Nothing is written if one does not
fit. Tensors that were not trained must be the same in both models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import own_model
from onnxgrad_cli.files.start_values import HeldValues, lacking, places, values_beside
from onnxgrad_cli.ir.graph import is_generated
from onnxgrad_cli.ir.types import FLOATS, is_external
from onnxgrad_cli.metadata import ROLES, describe, read_tensors
from onnxgrad_cli.training.run.base import tensor_digest
from onnxgrad_cli.training.run.export import read_stored, stored_tensors, writable

NEVER_WEIGHTS = frozenset({TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING})
"""Element types of shapes, indices, masks and words."""

BASE = "name the model that was trained, or that the model in the file was made from"


def untrained_digests(model: ModelProto, trained: Collection[str]) -> dict[str, str] | None:
    """Return a digest of each tensor that a model of derivatives has from its base model and that was not trained.

    Returns:
        Name -> digest; None for a model without added derivatives. External data are not read, and have no digest.
    """
    record = read_tensors(model)
    if record is None:
        return None
    names = {*record.names}.difference(trained)
    return {name: tensor_digest(t) for t, name in stored_tensors(model.graph) if name in names and not is_external(t)}


def check_fits(
    source: Path, model: ModelProto, path: Path | None, held: HeldValues, untrained: Mapping[str, str], tell: Tell
) -> None:
    """Make sure that weights from another file belong to a model, and report weights that keep the model's values.

    Args:
        source: the file that the weights come from.
        model, path: the model that takes the weights, and the file that it was read from.
        held: what the file holds.
        untrained: the digests of tensors that were not trained, by name; the model need not have all of them.
        tell: takes a line about weights that the file has no values for.

    Raises:
        OnnxgradError: the model has no place for a weight, or one of another type or shape, or has other values of
            what was not trained; all are listed.
    """
    apart = {name for adapter in held.adapters for name in adapter.names}
    apart.update(weight.weight for weight in held.quantized.weights)
    weights = {name: held.values[name] for name in held.weights if name not in apart}
    heads = {name: (tensor.data_type, tuple(tensor.dims)) for tensor, name in stored_tensors(model.graph)}
    missing = sorted(weights.keys() - heads.keys() - writable(model))
    if missing:
        raise OnnxgradError(
            f"'{source}' does not fit the model, which has no weight {listed(missing)}",
            f"{BASE}; weights beside matrices of integers, and those that were renamed, return from the checkpoint of "
            "the run alone",
        )
    strange = [name for name, array in weights.items() if name in heads and heads[name] != _head(array)]
    if strange:
        name = strange[0]
        more = f", and {len(strange) - 1} more differ" if len(strange) > 1 else ""
        raise OnnxgradError(
            f"'{source}' does not fit the model: '{name}' is {_words(*_head(weights[name]))} in the file and "
            f"{_words(*heads[name])} in the model{more}",
            BASE,
        )
    own = read_stored(model, untrained.keys(), path)
    changed = [name for name, array in own.items() if tensor_digest(array) != untrained[name]]
    if changed:
        raise OnnxgradError(
            f"'{source}' is of another model: {listed(changed)} {_have(changed)} other values there, and "
            f"{_have(changed)} not been trained",
            BASE,
        )
    taken = {*held.values, *untrained, *(adapter.weight for adapter in held.adapters)}
    kept = [n for n, (kind, _) in heads.items() if kind in FLOATS and n not in taken and not is_generated(n)]
    if kept:
        tell(f"note: '{source}' has no values for {listed(kept)}: the model keeps its own", 0)


@dataclass(frozen=True)
class ModelValues:
    """The weights in an ONNX file.

    Attributes:
        held: weights and state.
        untrained: the digests of tensors that were not trained, by name.
    """

    held: HeldValues
    untrained: dict[str, str]


def read_model_values(source: Path, model: ModelProto) -> ModelValues:
    """Read the weights in an ONNX file.

    Args:
        source: the file.
        model: the model that takes the weights.

    Raises:
        UsageError: the file is a part of a training that holds no weights.
        OnnxgradError: it can't be read, or holds no weights.
    """
    found, place = own_model(source)
    own = _own_names(found, model)
    if any(entry.key == ROLES for entry in found.metadata_props):
        values = _of_training(source, found, place, own)
    else:
        arrays = read_stored(found, own, place)
        values = ModelValues(HeldValues(arrays, tuple(arrays)), {})
    if not values.held.weights:
        raise OnnxgradError(f"'{source}' holds no weights", "name a trained model, or the checkpoint of a run")
    return values


def _of_training(source: Path, found: ModelProto, place: Path | None, own: Collection[str]) -> ModelValues:
    """The weights of a training model."""
    roles = describe(found)
    named = [name for name, role in roles.inputs.items() if role in ("weight", "state")]
    stored = read_stored(found, {*named, *own}, place)
    absent = lacking(found, roles)
    if absent and not (place and places(place)[0].is_file()):
        raise OnnxgradError(
            f"'{source}' holds no weights: they are its inputs, such as '{absent[0]}'",
            "name the checkpoint that holds their values",
        )
    values = {name: stored[name] for name in named if name in stored}
    values |= values_beside(place, absent) if absent else {}
    values |= roles.begun(values)
    weights = [name for name in named if roles.inputs[name] == "weight"]
    others = {name: stored[name] for name in own if name in stored and name not in values}
    digests = {name: tensor_digest(array) for name, array in others.items()}
    return ModelValues(HeldValues(values, tuple(weights), roles.adapters, roles.averages, roles.quantized), digests)


def _own_names(found: ModelProto, model: ModelProto) -> list[str]:
    """The tensors in a file that are values of the model that it was made from: floats, and integers for weights.

    Integers that no other model has are indices and the like. Literals of functions get names in derivatives.
    """
    record = read_tensors(found)
    heads = {name: (tensor.data_type, tuple(tensor.dims)) for tensor, name in stored_tensors(model.graph)}
    names = []
    for tensor, name in stored_tensors(found.graph):
        head = (tensor.data_type, tuple(tensor.dims))
        if is_generated(name) or tensor.data_type in NEVER_WEIGHTS:
            continue
        if tensor.data_type in FLOATS:
            own = record is None or (name in record.names and (name in heads or name not in record.literals))
        else:
            own = heads.get(name) == head or (record is None and len(head[1]) > 1 and math.prod(head[1]) > 1)
        if own:
            names.append(name)
    return names


def _head(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    return helper.np_dtype_to_tensor_dtype(array.dtype), array.shape


def _words(kind: int, dims: tuple[int, ...]) -> str:
    return f"{helper.tensor_dtype_to_np_dtype(kind)}{list(dims)}"


def _have(names: Collection[str]) -> str:
    return "has" if len(names) == 1 else "have"
