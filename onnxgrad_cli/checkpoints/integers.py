"""Convert weights that were trained as floats back to the integers that the inference model stores.

The training model applies QuantizeLinear to the float weights. The same rounding is applied here, so that the inference
model computes the same results as the training model. The integers of a bias are added directly to products of
integers. The scale of a bias is therefore the product of the scales of the data and of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.autodiff.rules.quantize import RANGES
from onnxgrad_cli.checkpoints.stored_weights import read_stored
from onnxgrad_cli.errors import OnnxgradError, conflict
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import IntegerWeight, Quantized
from onnxgrad_cli.passes.stored_integers import spread

LIMITS: dict[int, tuple[int, int]] = {**RANGES, TensorProto.INT32: (-(2**31), 2**31 - 1)}
"""Integer element type in which models store weights -> the smallest and the largest value."""


def stored_as(model: ModelProto, quantized: Quantized, names: Iterable[str]) -> list[str]:
    """Return the names of the inference model's tensors that store given weights and scales of the training model.

    Args:
        model: the inference model.
        quantized: the tensors that the two models store differently.
        names: the names of weights and scales in the training model.

    Raises:
        UsageError: the scale of a weight is stored apart from its integers, as with MatMulInteger; or `names` has a
            scale of integers that can't be trained.
    """
    weights = {weight.weight: weight for weight in quantized.weights}
    scales = _scales(model, quantized) - set(quantized.scales) if weights else set()
    found: list[str] = []
    for name in names:
        weight = weights.get(name)
        if weight is not None and not (weight.scale or weight.factors):
            raise conflict(
                f"'{name}' can't be written back to its integers '{weight.tensor}': no DequantizeLinear gives their "
                "scale (weights of MatMulInteger and DynamicQuantizeLSTM have none)",
                "quantize the float model statically, with QuantizeLinear and DequantizeLinear, or leave the weight as "
                f"it is with `freeze={name!r}`",
            )
        if name in scales:
            message = f"'{name}' can't be written back: it is the scale of integers that the model stores or takes"
            raise conflict(message, "train the scales that can be trained with `quantization='lsq'`")
        found.append(name if weight is None else weight.tensor)
    return found


def as_integers(
    model: ModelProto, quantized: Quantized, values: Mapping[str, np.ndarray], path: Path | None = None
) -> Arrays:
    """Convert values of a training model's tensors to values of the inference model's tensors.

    Args:
        model: the inference model. Its integers and scales are read; it is not changed.
        quantized: the tensors that the two models store differently.
        values: name in the training model -> weight or scale.
        path: the file that the model was read from; external data are relative to it.

    Returns:
        Name in the inference model -> value, in the element type of the inference model.

    Raises:
        OnnxgradError: a scale is not positive; a bias is too large for its integer type; two weights require different
            values of the same tensor; or the model is not the one that was trained.
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
                message = f"'{name}' would need two values: the nodes that read it were trained separately"
                raise OnnxgradError(message, code="conflict")
            found[name] = its
    return found


def _scales(model: ModelProto, quantized: Quantized) -> set[str]:
    """Return the names of all scales in an inference model."""
    nodes = (node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear"))
    of_weights = {name for weight in quantized.weights for name in (weight.scale, *weight.factors) if name}
    return {*quantized.scales, *of_weights, *(node.input[1] for node in nodes)}


def _check_positive(scales: Iterable[str], values: Mapping[str, np.ndarray]) -> None:
    for name in sorted(scales):
        if name in values and not (np.isfinite(values[name]).all() and (values[name] > 0).all()):
            hint = (
                f"train it with a smaller learning rate, `group={name + ':lr=0.1'!r}`, or freeze it, `freeze={name!r}`"
            )
            message = f"the scale '{name}' is no longer above zero, but {np.min(values[name]):g}"
            raise OnnxgradError(message, hint, code="wrong_value")


def _read(model: ModelProto, weights: Iterable[IntegerWeight], path: Path | None) -> Arrays:
    needed = {name for w in weights for name in (w.tensor, w.scale, w.zero_point, *w.factors) if name}
    found = read_stored(model, needed, path)
    missing = sorted(needed - found.keys())
    if missing:
        raise OnnxgradError(f"the model lacks '{missing[0]}'", "use the model that was trained", code="mismatch")
    return found


def _scale(weight: IntegerWeight, stored: Arrays, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the scale of a weight: the stored one, or the product of its factors if one of the factors was trained."""
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
    """Dequantize the stored integers of a weight that was not trained."""
    steps = stored[weight.tensor].astype(np.float32)
    if weight.zero_point:
        steps = steps - _spread(weight, stored[weight.zero_point], steps.shape)
    return steps * _spread(weight, _scale(weight, stored, {}), steps.shape)


def _rounded(weight: IntegerWeight, array: np.ndarray, scale: np.ndarray, stored: Arrays) -> np.ndarray:
    """Quantize a weight as QuantizeLinear does: round half to even, add the zero point, and saturate.

    Raises:
        OnnxgradError: the weight has a different shape than the stored integers, or a bias is too large for int32.
    """
    integers = stored[weight.tensor]
    if integers.shape != array.shape:
        message = f"'{weight.tensor}' is {list(integers.shape)} in the model, but was trained as {list(array.shape)}"
        raise OnnxgradError(message, "use the model that was trained", code="mismatch")
    steps = np.rint(array.astype(np.float32) / _spread(weight, scale, array.shape))
    if weight.zero_point:
        steps = steps + _spread(weight, stored[weight.zero_point], array.shape)
    dtype = helper.np_dtype_to_tensor_dtype(integers.dtype)
    least, greatest = LIMITS[dtype]
    if dtype == TensorProto.INT32 and not (np.abs(steps.astype(np.float64)) <= greatest).all():
        message = f"'{weight.weight}' does not fit into the integers of '{weight.tensor}': its scale became too small"
        hint = "train the scales of the layer with a smaller learning rate, or freeze them"
        raise OnnxgradError(message, hint, code="wrong_value")
    return np.clip(steps.astype(np.float64), least, greatest).astype(integers.dtype)
