"""Every gradient has a name of its own, also if weights share it or it is zero."""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.builder import build
from onnxgrad_cli.options import Options
from tests.passes.test_pipeline import LINEAR, parse, run


def test_a_zero_gradient_is_filled_and_said() -> None:
    built = build(parse(LINEAR), Options(grad_of_input=("x",)))
    assert built.training.gradients == {"w": "w_grad", "x": "x_grad"}
    text = """
    g (float[N, 2] x, float[N, 2] z) => (float[N, 2] y) <float[2] w = {1, 2}>
    { r = Floor(z) a = Mul(x, w) y = Add(a, r) }
    """
    built = build(parse(text), Options(grad_of_input=("z",)))
    assert ("zero gradient", "z") in [(caution.kind, caution.subject) for caution in built.training.cautions]
    x = np.ones((2, 2), np.float32)
    result = run(built.model, {"x": x, "z": x, "label": x})
    assert result["z_grad"].shape == (2, 2)
    assert not result["z_grad"].any()


def test_a_gradient_shared_by_weights_has_a_name_for_each() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y) <float[2] a = {1, 2}, float[2] b = {3, 4}, float[2] c = {5, 6}>
    { h = Add(x, a) i = Add(h, b) y = Add(i, c) }
    """
    x = np.ones((2, 2), np.float32)
    result = run(build(parse(text)).model, {"x": x, "label": x})
    np.testing.assert_array_equal(result["a_grad"], result["b_grad"])
    np.testing.assert_array_equal(result["a_grad"], result["c_grad"])
