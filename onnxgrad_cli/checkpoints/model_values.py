"""Read weights from an ONNX file that onnxgrad wrote: a trained model, a model of derivatives, or a training model.

The weights are written back to the model that they came from. A weight must have the same name, element type and shape
there. If a weight does not fit, nothing is written. Tensors that were not trained must be equal in both models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.checkpoints.base_model_digest import tensor_digest
from onnxgrad_cli.checkpoints.stored_weights import read_stored, stored_tensors, writable
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import own_model
from onnxgrad_cli.files.start_values import HeldValues, lacking, places, values_beside
from onnxgrad_cli.ir.graph import is_generated
from onnxgrad_cli.ir.types import FLOATS, is_external
from onnxgrad_cli.metadata import ROLES, describe, read_tensors

NEVER_WEIGHTS = frozenset({TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING})
"""Element types that weights never have: those of shapes, indices, masks and text."""


def untrained_digests(model: ModelProto, trained: Collection[str]) -> dict[str, str] | None:
    """Return a map: original tensor that was not trained -> its digest, for a model of derivatives.

    The original tensors are the float tensors that the model had before onnxgrad added derivatives to it.

    Returns:
        The map; None for a model without added derivatives. Tensors with external data, which are not read, are left
        out.
    """
    record = read_tensors(model)
    if record is None:
        return None
    names = {*record.names}.difference(trained)
    return {name: tensor_digest(t) for t, name in stored_tensors(model.graph) if name in names and not is_external(t)}


def check_fits(
    source: Path, model: ModelProto, path: Path | None, held: HeldValues, untrained: Mapping[str, str], tell: Tell
) -> None:
    """Check that weights from a file fit a model. Report weights of the model for which the file has no values.

    Args:
        source: the file that the weights come from.
        model, path: the model that takes the weights, and the file that it was read from.
        held: the weights and state in the file.
        untrained: tensor in the file that was not trained -> its digest. The model may lack some of these tensors.
        tell: receives a note about weights for which the file has no values; they keep the model's values.

    Raises:
        OnnxgradError: the model lacks a weight, a weight has a different type or shape, or an untrained tensor has
            other values in the model.
    """
    apart = {name for adapter in held.adapters for name in adapter.names}
    apart.update(weight.weight for weight in held.quantized.weights)
    weights = {name: held.values[name] for name in held.weights if name not in apart}
    heads = {name: (tensor.data_type, tuple(tensor.dims)) for tensor, name in stored_tensors(model.graph)}
    missing = sorted(weights.keys() - heads.keys() - writable(model))
    if missing:
        raise _foreign(
            f"'{source}' does not fit the model, which has no weight {listed(missing)}",
            "; weights of quantized layers, and renamed weights, can be restored only from the checkpoint of the run",
        )
    strange = [name for name, array in weights.items() if name in heads and heads[name] != _head(array)]
    if strange:
        name = strange[0]
        more = f", and {len(strange) - 1} more differ" if len(strange) > 1 else ""
        raise _foreign(
            f"'{source}' does not fit the model: '{name}' is {_words(*_head(weights[name]))} in the file and "
            f"{_words(*heads[name])} in the model{more}"
        )
    own = read_stored(model, untrained.keys(), path)
    changed = [name for name, array in own.items() if tensor_digest(array) != untrained[name]]
    if changed:
        have = "has" if len(changed) == 1 else "have"
        raise _foreign(
            f"'{source}' belongs to another model: {listed(changed)} {have} different values in the model, but {have} "
            "not been trained"
        )
    taken = {*held.values, *untrained, *(adapter.weight for adapter in held.adapters)}
    kept = [n for n, (kind, _) in heads.items() if kind in FLOATS and n not in taken and not is_generated(n)]
    if kept:
        tell(f"note: '{source}' has no values for {listed(kept)}: the model keeps its own", 0)


@dataclass(frozen=True)
class ModelValues:
    """The values that were read from an ONNX file.

    Attributes:
        held: the weights and state.
        untrained: name of a tensor that was not trained -> its digest.
    """

    held: HeldValues
    untrained: dict[str, str]


def read_model_values(source: Path, model: ModelProto) -> ModelValues:
    """Read the weights in an ONNX file.

    Args:
        source: the file.
        model: the model that takes the weights.

    Raises:
        UsageError: onnxgrad wrote the file, but the model in it has no weights, such as an initialization model.
        OnnxgradError: the file can't be read, or has no weights.
    """
    found, place = own_model(source)
    own = _own_names(found, model)
    if any(entry.key == ROLES for entry in found.metadata_props):
        values = _of_training(source, found, place, own)
    else:
        arrays = read_stored(found, own, place)
        values = ModelValues(HeldValues(arrays, tuple(arrays)), {})
    if not values.held.weights:
        hint = "name a trained model, or the checkpoint of a run"
        raise OnnxgradError(f"'{source}' holds no weights", hint, code="no_data")
    return values


def _of_training(source: Path, found: ModelProto, place: Path | None, own: Collection[str]) -> ModelValues:
    """Read the weights and state of a training model from the model itself, or from the file of weights beside it.

    Raises:
        OnnxgradError: the weights are inputs of the model, and there is no file of weights beside it.
    """
    roles = describe(found)
    named = [name for name, role in roles.inputs.items() if role in ("weight", "state")]
    stored = read_stored(found, {*named, *own}, place)
    absent = lacking(found, roles)
    if absent and not (place and places(place)[0].is_file()):
        message = f"'{source}' holds no weights: they are inputs of its model, such as '{absent[0]}'"
        raise OnnxgradError(message, "pass the checkpoint that holds their values", code="no_data")
    values = {name: stored[name] for name in named if name in stored}
    values |= values_beside(place, absent) if absent else {}
    values |= roles.begun(values)
    weights = [name for name in named if roles.inputs[name] == "weight"]
    others = {name: stored[name] for name in own if name in stored and name not in values}
    digests = {name: tensor_digest(array) for name, array in others.items()}
    return ModelValues(HeldValues(values, tuple(weights), roles.adapters, roles.averages, roles.quantized), digests)


def _own_names(found: ModelProto, model: ModelProto) -> list[str]:
    """Return the names of a model's tensors that come from its base model and can be weights, as floats or integers.

    An integer tensor counts if `model` has a tensor of the same name, type and shape. If the file has no record of its
    base model, integer matrices count, too. Other integer tensors are indices and the like. In a model of derivatives,
    literals inside functions have generated names; they count only if `model` has tensors with these names.

    Args:
        found: the model in the file.
        model: the model that takes the weights.
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


def _foreign(message: str, more: str = "") -> OnnxgradError:
    """Return the error for weights that do not belong to the model."""
    hint = "name the model that was trained, or the model from which the model in the file was made"
    return OnnxgradError(message, hint + more, code="mismatch")


def _head(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    return helper.np_dtype_to_tensor_dtype(array.dtype), array.shape


def _words(kind: int, dims: tuple[int, ...]) -> str:
    return f"{helper.tensor_dtype_to_np_dtype(kind)}{list(dims)}"
