"""Weights that were trained as floats, stored as the integers that the inference model has in their place.

What was trained is what QuantizeLinear made of the float, so that the integers are those that it gives: the inference
model computes what the training model did. The integers of a bias are added to products of integers as they are, so
that their scale follows those of the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.autodiff.rules.quantize import RANGES
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.steps import spread
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import IntegerWeight, Quantized
from onnxgrad_cli.training.run.export import read_stored

LIMITS: dict[int, tuple[int, int]] = {**RANGES, TensorProto.INT32: (-(2**31), 2**31 - 1)}
"""The least and the greatest value of each integer type that a model stores weights in."""


def stored_as(model: ModelProto, quantized: Quantized, names: Iterable[str]) -> list[str]:
    """The tensors of an inference model that hold what is called so in its training model.

    Raises:
        UsageError: the scale of a weight is none that the model stores for it alone, or a scale was chosen that others
            go by.
    """
    weights = {weight.weight: weight for weight in quantized.weights}
    scales = _scales(model, quantized) - set(quantized.scales) if weights else set()
    found: list[str] = []
    for name in names:
        weight = weights.get(name)
        if weight is not None and not _has_scale(weight):
            raise UsageError(
                f"'{name}' can't be written back: it is stored as the integers '{weight.tensor}', whose scale stands "
                "apart from them, as with MatMulInteger or DynamicQuantizeLSTM",
                "quantize the float model statically, with QuantizeLinear and DequantizeLinear, or leave the weight as "
                f"it is with `freeze={name!r}`",
            )
        if name in scales:
            raise UsageError(
                f"'{name}' can't be written back: it is the scale of integers that the model stores or takes",
                "`quantization='lsq'` trains the scales that can be",
            )
        found.append(name if weight is None else weight.tensor)
    return found


def as_integers(
    model: ModelProto, quantized: Quantized, values: Mapping[str, np.ndarray], path: Path | None = None
) -> Arrays:
    """The values of an inference model's own tensors, where `values` has those of the training model.

    Args:
        model: the inference model, whose stored integers and scales are read; not changed.
        quantized: what it stores as integers.
        values: weights and scales by the names that they have in the training model.
        path: where the model was read from; external data are relative to it.

    Returns:
        The values by name, in the types of the model.

    Raises:
        OnnxgradError: a scale is not above zero, a bias is too large for its integers, two weights want the same tensor
            to be different, or this is another model than the one that was trained.
    """
    _check_positive(_scales(model, quantized), values)
    floats = {weight.weight for weight in quantized.weights}
    found = {name: array for name, array in values.items() if name not in floats}
    for copy, one in quantized.copies.items():
        if one in found:
            found[copy] = np.ascontiguousarray(found[one].T) if copy in quantized.transposed else found[one]
    changed = [w for w in quantized.weights if not values.keys().isdisjoint((w.weight, w.scale, *w.factors))]
    stored = _read(model, changed, path)
    for weight in changed:
        scale = _scale(weight, stored, values)
        array = values.get(weight.weight)
        if array is None:
            array = _floats(weight, stored)
        new = {weight.tensor: _rounded(weight, array, scale, stored)}
        if weight.scale and not values.keys().isdisjoint(weight.factors):
            new[weight.scale] = scale
        for name, its in new.items():
            if name in found and not np.array_equal(found[name], its):
                raise OnnxgradError(f"'{name}' would have to hold two things: what reads it was trained apart")
            found[name] = its
    return found


def _has_scale(weight: IntegerWeight) -> bool:
    return bool(weight.scale or weight.factors)


def _scales(model: ModelProto, quantized: Quantized) -> set[str]:
    """The scales that an inference model has."""
    nodes = (node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear"))
    of_weights = {name for weight in quantized.weights for name in (weight.scale, *weight.factors) if name}
    return {*quantized.scales, *of_weights, *(node.input[1] for node in nodes)}


def _check_positive(scales: Iterable[str], values: Mapping[str, np.ndarray]) -> None:
    for name in sorted(scales):
        if name in values and not (np.isfinite(values[name]).all() and (values[name] > 0).all()):
            raise OnnxgradError(
                f"the scale '{name}' is no longer above zero, but {np.min(values[name]):g}",
                f"train it at a smaller rate, `group={name + ':lr=0.1'!r}`, or not at all, `freeze={name!r}`",
            )


def _read(model: ModelProto, weights: Iterable[IntegerWeight], path: Path | None) -> Arrays:
    needed = {name for w in weights for name in (w.tensor, w.scale, w.zero_point, *w.factors) if name}
    found = read_stored(model, needed, path)
    missing = sorted(needed - found.keys())
    if missing:
        raise OnnxgradError(
            f"the model stores no '{missing[0]}'", "this is another model than the one that was trained"
        )
    return found


def _scale(weight: IntegerWeight, stored: Arrays, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The scale of a weight: its own, or the product of those that it follows."""
    if weight.scale in values:
        return values[weight.scale]
    if weight.scale and values.keys().isdisjoint(weight.factors):
        return stored[weight.scale]
    product = np.array([weight.times], np.float32)
    for name in weight.factors:
        product = product * values.get(name, stored[name]).reshape(-1)
    if not weight.scale:
        return product
    own = stored[weight.scale]
    return np.broadcast_to(product, own.size).reshape(own.shape).astype(own.dtype)


def _spread(weight: IntegerWeight, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    axis = weight.axis if len(shape) > 1 else 0
    return spread(values.astype(np.float32), shape, axis, weight.block_size)


def _floats(weight: IntegerWeight, stored: Arrays) -> np.ndarray:
    """What the integers of a weight that was not trained stand for."""
    steps = stored[weight.tensor].astype(np.float32)
    if weight.zero_point:
        steps = steps - _spread(weight, stored[weight.zero_point], steps.shape)
    return steps * _spread(weight, _scale(weight, stored, {}), steps.shape)


def _rounded(weight: IntegerWeight, array: np.ndarray, scale: np.ndarray, stored: Arrays) -> np.ndarray:
    """What QuantizeLinear gives: rounded to even, moved by the zero point, and saturated."""
    integers = stored[weight.tensor]
    if integers.shape != array.shape:
        raise OnnxgradError(
            f"'{weight.tensor}' is {list(integers.shape)} in the model, {list(array.shape)} as it was trained",
            "this is another model than the one that was trained",
        )
    steps = np.rint(array.astype(np.float32) / _spread(weight, scale, array.shape))
    if weight.zero_point:
        steps = steps + _spread(weight, stored[weight.zero_point], array.shape)
    dtype = helper.np_dtype_to_tensor_dtype(integers.dtype)
    least, greatest = LIMITS[dtype]
    if dtype == TensorProto.INT32 and not (np.abs(steps.astype(np.float64)) <= greatest).all():
        raise OnnxgradError(
            f"'{weight.weight}' does not fit into the integers of '{weight.tensor}': its scale became too small",
            "train the scales of the layer with a smaller learning rate, or not at all",
        )
    return np.clip(steps.astype(np.float64), least, greatest).astype(integers.dtype)
