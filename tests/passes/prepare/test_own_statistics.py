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
