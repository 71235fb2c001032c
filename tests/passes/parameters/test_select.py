"""Which tensors are trained by default, which are constants by role, and how the patterns override it."""

import numpy as np
import onnx
import pytest

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.options import Options
from onnxgrad_cli.record import Training


def training(text: str, **options: object) -> Training:
    header = '<ir_version: 10, opset_import: ["" : 18]>'
    return build(onnx.parser.parse_model(header + text), Options(**options)).training  # type: ignore[arg-type]


LINEAR = """
g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}>
{ h = MatMul(x, w) y = Add(h, b) }
"""


def test_every_weight_on_the_path_is_trained_in_order() -> None:
    assert training(LINEAR).trained == ["w", "b"]


def test_a_bias_of_one_element_is_a_weight_and_a_scale_is_not() -> None:
    found = training("""
    g (float[N, 3] x) => (float[N, 1] y) <float[3, 1] w = {1, 2, 3}, float[1] b = {1}, float[1] scale = {0.5}>
    { h = MatMul(x, w) s = Add(h, b) y = Mul(s, scale) }
    """)
    assert found.trained == ["w", "b"]
    assert "one-element constant of Mul" in found.not_trained["scale"]


def test_scalars_are_constants_unless_named() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}, float temperature = {0.5}, float unused = {1}>
    { h = Mul(x, w) y = Div(h, temperature) }
    """
    found = training(text)
    assert found.trained == ["w"]
    assert "scalar constant of Div" in found.not_trained["temperature"]
    assert found.not_trained["unused"] == "no differentiable path ties it to the loss"
    assert training(text, train=("temp*",)).trained == ["temperature"]


def test_running_statistics_are_not_trained() -> None:
    found = training("""
    g (float[N, 2] x) => (float[N, 2] y)
    <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
    { y = BatchNormalization(x, s, b, mean, var) }
    """)
    assert found.trained == ["s", "b"]
    assert found.not_trained["mean"] == "running mean of a BatchNormalization"
    assert found.not_trained["var"] == "running variance of a BatchNormalization"


def test_weights_in_constant_nodes_count() -> None:
    found = training("""
    g (float[N, 2] x) => (float[N, 2] y)
    { w = Constant<value: tensor = float[2, 2] {1, 2, 3, 4}>() y = MatMul(x, w) }
    """)
    assert found.trained == ["w"]


def test_a_tied_weight_gets_one_gradient_through_both_uses() -> None:
    text = """
    g (float[1, 2] x) => (float[1, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
    { h = MatMul(x, w) t = Transpose<perm = [1, 0]>(w) y = MatMul(h, t) }
    """
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 18]>' + text)
    built = build(model, Options(label="target"))
    assert built.training.trained == ["w"]
    import onnxruntime

    session = onnxruntime.InferenceSession(built.model.SerializeToString())
    x, target = np.array([[1.0, -2.0]], np.float32), np.array([[0.5, 0.25]], np.float32)
    (gradient,) = session.run(["w_grad"], {"x": x, "target": target})
    w = np.array([[1.0, 2.0], [3.0, 4.0]])
    error = x @ w @ w.T - target  # loss = mean(error^2), two elements
    expected = x.T @ error @ w + error.T @ x @ w
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_frequencies_before_a_sine_are_a_table() -> None:
    found = training("""
    g (float[N, 1] t) => (float[N, 2] y) <float[1, 2] f = {1, 0.1}, float[2, 2] w = {1, 2, 3, 4}>
    { p = Mul(t, f) s = Sin(p) y = MatMul(s, w) }
    """)
    assert found.trained == ["w"]
    assert "frequencies" in found.not_trained["f"]


def test_patterns() -> None:
    assert training(LINEAR, freeze=("b",)).trained == ["w"]
    assert training(LINEAR, freeze=("b",)).not_trained == {"b": "frozen by `freeze`"}
    assert training(LINEAR, train=("*",), freeze=("w",)).trained == ["b"]
    assert training(LINEAR, grad_of_input=("x",)).grad_of_input == ["x"]
    with pytest.raises(UsageError, match="`freeze`: 'bias' matches no float weight"):
        training(LINEAR, freeze=("bias",))
    with pytest.raises(UnsupportedError, match="no weight is left to train"):
        training(LINEAR, freeze=("*",))


def test_nothing_to_train() -> None:
    with pytest.raises(UnsupportedError, match="no float initializer"):
        training("g (float[N] x) => (float[N] y) { y = Relu(x) }")
    assert training("g (float[N] x) => (float[N] y) { y = Relu(x) }", grad_of_input=("*",)).grad_of_input == ["x"]
