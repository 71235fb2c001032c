"""Write trained weights and adapters into an inference model.

An adapter is added to the weight that it adapts. If the weight is stored as integers, the adapter becomes a separate
branch beside the matrix product (module `branches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.adapters.branches import add_branches, make_adaptable, of_integers
from onnxgrad_cli.adapters.own_file import check_factors
from onnxgrad_cli.adapters.places import Factors
from onnxgrad_cli.adapters.requantize import requantize
from onnxgrad_cli.checkpoints.integers import as_integers
from onnxgrad_cli.checkpoints.stored_weights import read_stored, with_weights
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.modes import put_in_inference
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import Adapter, Quantized, has_derivatives


def merge(
    model: ModelProto,
    adapters: Sequence[Adapter],
    values: Mapping[str, np.ndarray],
    path: Path | None = None,
    state: Mapping[str, np.ndarray] | None = None,
    keep_mode: bool = False,
    quantized: Quantized | None = None,
) -> ModelProto:
    """Return a copy of an inference model with the trained weights, and with adapters merged into the weights.

    The copy is in inference mode, even if the model was exported in training mode: BatchNormalization uses the running
    statistics, and Dropout is off. A model of derivatives keeps its mode, because its derivatives are valid only in
    that mode.

    Args:
        model: the model that the training model was built from; not changed. External data are read only for adapted
            weights.
        adapters: the adapters, such as `describe(training_model).adapters` or those that `load_adapter` returns.
        values: name -> array: the LoRA matrices of the adapters, and weights that were trained in full.
        path: the file that the model was read from; external data are relative to it.
        state: the other values of a trainer. Running statistics, which the model has, are written to it; the rest is
            ignored.
        keep_mode: leave BatchNormalization and Dropout in their mode.
        quantized: the tensors that the training model and the inference model store differently.

    Raises:
        OnnxgradError: a LoRA matrix is missing or does not fit, a weight can't be converted back to integers, or the
            model is not the one that was trained.
    """
    found = _with_floats(model, adapters, values, path, state, quantized)
    if beside := of_integers(model, adapters):
        add_branches(found, beside, values, path)
    return _in_mode(found, keep_mode)


def requantized(
    model: ModelProto,
    adapters: Sequence[Adapter],
    values: Mapping[str, np.ndarray],
    path: Path | None = None,
    state: Mapping[str, np.ndarray] | None = None,
    keep_mode: bool = False,
    quantized: Quantized | None = None,
) -> tuple[ModelProto, dict[str, float]]:
    """Return a copy of an inference model with all adapters merged, even into weights that are stored as integers.

    The arguments are those of `merge`.

    Returns:
        The model, and a map: matrix that is stored as integers -> its rounding error; see `requantize`.

    Raises:
        UsageError: a matrix is stored in a form that can't be quantized again.
        OnnxgradError: a LoRA matrix is missing or does not fit, a weight can't be converted back to integers, or the
            model is not the one that was trained.
    """
    found = _with_floats(model, adapters, values, path, state, quantized)
    lost = requantize(found, of_integers(model, adapters), values, path)
    return _in_mode(found, keep_mode), lost


def _in_mode(model: ModelProto, keep_mode: bool) -> ModelProto:
    """Put a model in inference mode, unless `keep_mode` is True or it is a model of derivatives."""
    if not keep_mode and not has_derivatives(model):
        put_in_inference(model)
    return model


def _with_floats(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], path: Path | None,
    state: Mapping[str, np.ndarray] | None, quantized: Quantized | None,
) -> ModelProto:  # fmt: skip
    """Return a copy of a model with all trained values, except for adapters of weights that are stored as integers."""
    new = as_integers(model, quantized or Quantized(), merged(model, adapters, values, path), path)
    return with_weights(model, new, state or {})


def adaptable(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], keep_mode: bool = False
) -> ModelProto:
    """Return a copy of an inference model that can load adapters at run time. Without an adapter, results don't change.

    Args:
        model: the model that the training model was built from; not changed.
        adapters: the adapters. The matrix products that read their weights get a branch.
        values: name -> array: the LoRA matrices of the adapters, and weights that were trained in full, which can be
            overridden, too.
        keep_mode: leave BatchNormalization and Dropout in their mode.

    Raises:
        UsageError: an adapter uses DoRA, a matrix product can't get a branch, or a weight can't be overridden.
        OnnxgradError: a LoRA matrix is missing or does not fit.
    """
    check_factors(adapters, values)
    found = copied(model)
    make_adaptable(found, adapters, values)
    return _in_mode(found, keep_mode)


def merged(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], path: Path | None = None
) -> dict[str, np.ndarray]:
    """Return a map: weight of a model -> its new value. The arguments are those of `merge`.

    The value of an adapted weight is W + alpha / rank times the product of the LoRA matrices. Values that are not LoRA
    matrices are returned unchanged. Adapted weights that are stored as integers are left out.
    """
    check_factors(adapters, values)
    factors = {name for adapter in adapters for name in adapter.names}
    after = {name: array for name, array in values.items() if name not in factors}
    beside = of_integers(model, adapters)
    adapters = [adapter for adapter in adapters if adapter not in beside]
    before = read_stored(model, {adapter.weight for adapter in adapters}, path)
    for adapter in adapters:
        if adapter.weight not in before:
            hint = "use the model that was adapted; its weight must not be in a function"
            message = f"the model has no weight '{adapter.weight}' to merge its adapter into"
            raise OnnxgradError(message, hint, code="mismatch")
        after[adapter.weight] = _sum(before[adapter.weight], adapter, values)
    return after


def _sum(weight: np.ndarray, adapter: Adapter, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return W + (alpha / rank) B A. With DoRA, scale the sum to the trained magnitudes.

    The result is computed in float64 and rounded once.

    Raises:
        OnnxgradError: the LoRA matrices don't fit the weight.
    """
    a, b, matrix = (array.reshape(len(array), -1) for array in (values[adapter.a], values[adapter.b], weight))
    inputs_first = a.shape == (len(matrix), adapter.rank)
    if inputs_first:
        a, b, matrix = a.T, b.T, matrix.T
    outputs, inputs = matrix.shape
    magnitude = values[adapter.magnitude] if adapter.magnitude else None
    fits = (a.shape, b.shape) == ((adapter.rank, inputs), (outputs, adapter.rank))
    if not fits or (magnitude is not None and magnitude.shape != (outputs,)):
        shapes = [list(values[name].shape) for name in (adapter.a, adapter.b)]
        raise OnnxgradError(
            f"the adapter of '{adapter.weight}' does not fit: the weight is {list(weight.shape)}, but its LoRA "
            f"matrices are {shapes[0]} and {shapes[1]}",
            "use the model that was adapted",
            code="mismatch",
        )
    total = Factors(a, b, adapter.scale, magnitude).added_to(matrix)
    return (total.T if inputs_first else total).reshape(weight.shape).astype(weight.dtype)
