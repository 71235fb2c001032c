"""Warnings about normalizations that use statistics of their own batch."""

from __future__ import annotations

import onnx

from onnxgrad_cli.builder import build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options


def test_a_constant_that_is_subtracted_is_no_mean() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y)
        <float[2] w = {1, 2}> { h = Mul (x, w) zero = RandomUniform <shape = [2], seed = 1.0> () y = Sub (h, zero) }""")
    assert build(model, Options(losses=(LossSpec("mse"),))).training.trained == ["w"]


def test_a_normalization_by_the_batch_that_it_normalizes_is_named_once() -> None:
    """The subtraction on the way to its variance is a part of it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y)
        <float[2, 2] w = {1, 2, 3, 5}, float[2] scale = {1, 2}, float[2] shift = {0, 1}, int64[1] first = {0}> {
          h = MatMul(x, w)
          mean = ReduceMean<keepdims = 0>(h, first)
          d = Sub(h, mean)
          q = Mul(d, d)
          var = ReduceMean<keepdims = 0>(q, first)
          y = BatchNormalization(h, scale, shift, mean, var)
        }""")
    model.graph.node[-1].name, model.graph.node[2].name = "norm", "minus"
    cautions = [str(caution) for caution in build(model, Options(losses=(LossSpec("mse"),))).training.cautions]
    assert len([text for text in cautions if "'norm'" in text]) == 1
    assert not [text for text in cautions if "'minus'" in text]
