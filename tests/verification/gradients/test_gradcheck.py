"""`gradcheck` of an operator that only Python runs, and of a whole model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx.reference.op_run import OpRun

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.errors import CheckFailed
from onnxgrad_cli.verification.gradients.gradcheck import gradcheck


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with registry.scoped():
        yield


class Cube(OpRun):
    op_domain = "my.ops"

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x**3,)


def test_an_operator_that_only_python_runs_can_be_checked() -> None:
    registry.rule("Cube", domain="my.ops")(lambda op, g, y, x: g * 3.0 * x * x)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18, "my.ops": 1]> g (float[N] x) => (float[N] y) { y = my.ops.Cube(x) }'
    )
    point = {"x": np.array([0.5, -1.0, 2.0])}
    assert gradcheck(model, point, order=2, ops=[Cube]) < 1e-6
    registry.rule("Cube", domain="my.ops", override=True)(lambda op, g, y, x: g * 2.0 * x * x)
    with pytest.raises(CheckFailed):
        gradcheck(model, point, ops=[Cube])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradcheck_of_a_whole_model(order: int) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x, float[2] b) => (float[N, 2] y, float[N] z) {
        h = Mul(x, b) s = Sin(h) y = Mul(s, b) k = ReduceProd<keepdims = 0>(s, a) z = Exp(k) }"""
    model = onnx.parser.parse_model(text.replace("(float[N, 2] y", "(float[N, 2] y", 1).replace(
        "{\n", "<int64[1] a = {1}> {\n", 1))  # fmt: skip
    point = {"x": np.array([[0.5, -1.0], [2.0, 0.3]]), "b": np.array([1.0, -0.7])}
    assert gradcheck(model, point, order=order) < 1e-4
