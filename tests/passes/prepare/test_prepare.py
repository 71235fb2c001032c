"""The form that a model has after preparation."""

from __future__ import annotations

import onnx
import pytest

from onnxgrad_cli.builder import build


@pytest.mark.parametrize(("to", "runs"), [(16, True), (1, False)])
def test_a_cast_alone_makes_a_model_one_of_bfloat16(to: int, runs: bool) -> None:
    text = f"""<ir_version: 9, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y)
        <float[2, 2] w = {{1, 2, 3, 4}}> {{ h = Cast<to = {to}>(x) f = Cast<to = 1>(h) y = MatMul(f, w) }}"""
    model = onnx.parser.parse_model(text)
    assert build(model).graph.runs_bfloat16 == runs
