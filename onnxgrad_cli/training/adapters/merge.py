"""An inference model with what training has found: adapters folded into the weights they belong to, or beside them.

Those of weights that are stored as integers stay beside them; see `branches`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.modes import put_in_inference
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.metadata import Adapter, Quantized, has_derivatives
from onnxgrad_cli.training.adapters.branches import add_branches, make_adaptable, of_integers
from onnxgrad_cli.training.adapters.places import Factors
from onnxgrad_cli.training.adapters.requantize import Rounded, requantize
from onnxgrad_cli.training.run.export import read_stored, with_weights
from onnxgrad_cli.training.run.integers import as_integers


def merge(
    model: ModelProto,
    adapters: Sequence[Adapter],
    values: Mapping[str, np.ndarray],
    path: Path | None = None,
    state: Mapping[str, np.ndarray] | None = None,
    keep_mode: bool = False,
    quantized: Quantized | None = None,
) -> ModelProto:
    """A copy of an inference model with what training has found: its weights, with adapters merged into them.

    It is in inference mode, in whichever it came: BatchNormalization uses the running statistics, Dropout is off. A
    model of derivatives keeps the mode that these were written for.

    Args:
        model: the model that the training model was built from; not changed. Of external data only the adapted
            weights are read.
        adapters: as `describe(training_model).adapters` or `load_adapter` has them.
        values: the factors by name, and weights that were trained in full.
        path: where the model was read from; external data are relative to it.
        state: what a trainer holds besides, of which the model takes what it has (running statistics).
        keep_mode: leave BatchNormalization and Dropout in the mode in which the model came.
        quantized: which of `values` the model stores as integers.

    Raises:
        OnnxgradError: a factor is missing or does not fit, a weight can't be stored as the integers it was, or this is
            another model.
    """
    beside = of_integers(model, adapters)
    found = _with_floats(model, adapters, values, path, state, quantized)
    for adapter in beside:
        _check_whole(adapter, values)
    if beside:
        add_branches(found, beside, values, path)
    if not keep_mode and not has_derivatives(found):
        put_in_inference(found)
    return found


def requantized(
    model: ModelProto,
    adapters: Sequence[Adapter],
    values: Mapping[str, np.ndarray],
    path: Path | None = None,
    state: Mapping[str, np.ndarray] | None = None,
    keep_mode: bool = False,
    quantized: Quantized | None = None,
) -> tuple[ModelProto, list[Rounded]]:
    """A copy of an inference model with adapters merged into all their weights, integers too; see `merge`.

    Returns:
        The model, and what was lost of each matrix of integers.

    Raises:
        UsageError: a matrix is stored in a form that can't be rounded anew.
        OnnxgradError: see `merge`.
    """
    found = _with_floats(model, adapters, values, path, state, quantized)
    lost = requantize(found, of_integers(model, adapters), values, path)
    if not keep_mode and not has_derivatives(found):
        put_in_inference(found)
    return found, lost


def _with_floats(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], path: Path | None,
    state: Mapping[str, np.ndarray] | None, quantized: Quantized | None,
) -> ModelProto:  # fmt: skip
    """A copy of a model with all that was trained but adapters of integers; see `merge`."""
    new = as_integers(model, quantized or Quantized(), merged(model, adapters, values, path), path)
    return with_weights(model, new, state or {})


def adaptable(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], keep_mode: bool = False
) -> ModelProto:
    """A copy of an inference model that takes adapters while it runs: it computes what it did, until it is given one.

    Args:
        model: the model that the training model was built from; not changed.
        adapters: those that say which products take one.
        values: the factors by name, and weights that were trained in full, which can be replaced too.
        keep_mode: see `merge`.

    Raises:
        UsageError: a product or a weight can't be adapted at run time.
        OnnxgradError: a factor is missing or does not fit.
    """
    for adapter in adapters:
        _check_whole(adapter, values)
    found = copied(model)
    make_adaptable(found, adapters, values)
    if not keep_mode and not has_derivatives(found):
        put_in_inference(found)
    return found


def merged(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], path: Path | None = None
) -> dict[str, np.ndarray]:
    """The new values of the model's own weights: W + alpha / rank times the product of the factors, and those of
    `values` that are no factors, as they are; see `merge`. Of what is stored as integers there is no new value."""
    factors = {name for adapter in adapters for name in adapter.names}
    after = {name: array for name, array in values.items() if name not in factors}
    beside = of_integers(model, adapters)
    adapters = [adapter for adapter in adapters if adapter not in beside]
    before = _read(model, {adapter.weight for adapter in adapters}, path)
    for adapter in adapters:
        after[adapter.weight] = _sum(before[adapter.weight], adapter, values)
    return after


def _read(model: ModelProto, names: Collection[str], path: Path | None) -> dict[str, np.ndarray]:
    found = read_stored(model, names, path)
    missing = sorted(set(names) - found.keys())
    if missing:
        raise OnnxgradError(
            f"the model has no weight '{missing[0]}' to merge its adapter into",
            "it stands in a function, or this is another model than the one that was adapted",
        )
    return found


def _check_whole(adapter: Adapter, values: Mapping[str, np.ndarray]) -> None:
    for name in adapter.names:
        if name not in values:
            raise OnnxgradError(f"the adapter of '{adapter.weight}' is incomplete: there is no '{name}'")


def _sum(weight: np.ndarray, adapter: Adapter, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """W + alpha / rank times the product of the factors, with DoRA at the lengths it trained; rounded once."""
    _check_whole(adapter, values)
    a, b = values[adapter.a], values[adapter.b]
    rank, dims = adapter.rank, weight.shape
    shapes = [(*dims[:1], rank, *dims[2:]), (rank, *dims[1:])]
    left, right = (a, b) if a.shape == shapes[0] else (b, a)
    outputs = dims[1] if left is a else dims[0]
    fits = [left.shape, right.shape] == shapes
    if not fits or (adapter.magnitude and values[adapter.magnitude].shape != (outputs,)):
        raise OnnxgradError(
            f"the adapter of '{adapter.weight}' does not fit: the weight is {list(dims)}, its factors are "
            f"{list(a.shape)} and {list(b.shape)}",
            "this is another model than the one that was adapted",
        )
    inputs_first = left is a
    left, right, matrix = left.reshape(-1, rank), right.reshape(rank, -1), weight.reshape(dims[0], -1)
    magnitude = values[adapter.magnitude] if adapter.magnitude else None
    if inputs_first:
        total = Factors(left.T, right.T, adapter.scale, magnitude).added_to(matrix.T).T
    else:
        total = Factors(right, left, adapter.scale, magnitude).added_to(matrix)
    return total.reshape(dims).astype(weight.dtype)
