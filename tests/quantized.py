"""Small models quantized by onnxruntime's quantizer, and learned step sizes in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import torch
from onnx import ModelProto, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import Tensor

from onnxgrad_cli.ir.types import Arrays

CONV = """<ir_version: 10, opset_import: ["": {opset}]> net (float[n, 2, 8, 8] x) => (float[n, 5] y) {{
    c = Conv <pads = [1, 1, 1, 1]> (x, conv_weight, conv_bias)
    r = Relu(c)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    f = Flatten(p)
    y = Gemm <transB = 1> (f, fc_weight, fc_bias)
}}"""
SHAPES = {"conv_weight": (4, 2, 3, 3), "conv_bias": (4,), "fc_weight": (5, 64), "fc_bias": (5,)}
RNG = np.random.default_rng(5)
WEIGHTS = {name: RNG.normal(0, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}
X = RNG.normal(size=(6, 2, 8, 8)).astype(np.float32)


class _Samples(CalibrationDataReader):
    def __init__(self) -> None:
        self._left = [{"x": X}]

    def get_next(self) -> Arrays | None:
        return self._left.pop() if self._left else None


def quantized(
    folder: Path,
    activations: str = "QUInt8",
    weights: str = "QUInt8",
    opset: int = 21,
    operators: bool = False,
    **given: Any,
) -> ModelProto:
    """Return a quantized model of a convolution and a matrix product, in QDQ form or with integer operators."""
    model = onnx.parser.parse_model(CONV.format(opset=opset))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in WEIGHTS.items())
    onnx.save(model, folder / "float.onnx")
    kinds = {"activation_type": QuantType[activations], "weight_type": QuantType[weights]}
    form = QuantFormat.QOperator if operators else QuantFormat.QDQ
    quantize_static(folder / "float.onnx", folder / "quantized.onnx", _Samples(), quant_format=form, **kinds, **given)
    return onnx.load(folder / "quantized.onnx")


def stored(model: ModelProto) -> Arrays:
    """Return the initializers of a model."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


class LearnedStep(torch.autograd.Function):
    """The quantizer of S. Esser et al., Learned Step Size Quantization, ICLR 2020, equations 1 to 3."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, s: Tensor, zero: Tensor, low: int, high: int, shared: float) -> Tensor:
        steps = v / s
        whole = torch.round(steps) + zero
        ctx.save_for_backward(steps, whole, zero, s)
        ctx.form = low, high, (shared * high) ** -0.5
        return (whole.clamp(low, high) - zero) * s

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        steps, whole, zero, s = ctx.saved_tensors
        low, high, factor = ctx.form
        inside = (whole >= low) & (whole <= high)
        of_scale = torch.where(inside, whole - zero - steps, whole.clamp(low, high) - zero)
        return g * inside, (g * of_scale).sum_to_size(s.shape) * factor, None, None, None, None


def learned(v: Tensor, s: Tensor, zero: Any, limits: tuple[int, int], shared: float, axis: int | None = None) -> Tensor:
    """Return `v` quantized and dequantized with learned scales.

    Args:
        v: the values.
        s: a single scale, or a scale for each position of `axis`.
        zero: the zero points.
        limits: the smallest and the largest quantized value.
        shared: the number of values that share a scale.
        axis: the axis of the scales.
    """
    shape = [-1 if i == axis else 1 for i in range(v.ndim)] if s.numel() > 1 else []
    zeros = torch.tensor(np.asarray(zero).astype(np.float32)).reshape(shape)
    return LearnedStep.apply(v, s.reshape(shape), zeros, *limits, shared)  # type: ignore[no-any-return]
