"""Losses of class numbers: ignored and invalid labels, classes along other axes, and tokens."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from tests.facts import raises
from tests.losses.test_same_shape import built, causal_lm, draw, run, value_and_gradient


@pytest.mark.parametrize("label", [-1, -3])
def test_a_negative_label_is_seen(label: int) -> None:
    x = np.ones((2, 3), np.float32)
    value, gradient = value_and_gradient("cross-entropy", x, np.array([label, 1]))
    assert np.isnan(value)
    assert np.isnan(gradient[0]).all()


def test_a_label_beyond_the_classes_is_an_error() -> None:
    for label in (3, -4):
        with pytest.raises(Exception, match="GatherElements"):
            value_and_gradient("cross-entropy", np.ones((2, 3), np.float32), np.array([label, 1]))


def test_samples_that_are_ignored_touch_nothing() -> None:
    x = np.array([[-np.inf, 1.0], [0.5, 1.0]], np.float32)
    value, gradient = value_and_gradient("cross-entropy", x, np.array([-100, 1]))
    np.testing.assert_allclose(value, np.log(1 + np.exp(-0.5)), rtol=1e-6)
    np.testing.assert_array_equal(gradient[0], [0, 0])


def test_a_batch_that_is_ignored_touches_nothing() -> None:
    value, gradient = value_and_gradient("cross-entropy", np.ones((2, 3), np.float32), np.array([-100, -100]))
    assert np.isnan(value)
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_classes_of_pixels_are_judged_by_written_out_logarithms() -> None:
    """Where axes follow that of the classes; with one Exp, however large the logits are, and down to none of them."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 5, 3, 4)).astype(np.float32) * 1000, rng.integers(0, 5, (2, 3, 4))
    x[0, 1, 0, 0], y[0, 0, 0] = -np.inf, 2
    options = Options(losses=(LossSpec("cross-entropy"),), grad_of_input=("x",))
    model = built(x.shape, options, dtype=TensorProto.FLOAT)
    ops = [node.op_type for node in onnx.load_from_string(model).graph.node]
    assert ops.count("Exp") == 1
    assert "LogSoftmax" not in ops
    value, gradient = run(model, {"x": x, "label": y})
    leaf = torch.tensor(x, requires_grad=True)
    wanted = F.cross_entropy(leaf, torch.tensor(y))
    wanted.backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=1e-7)


@pytest.mark.parametrize("tokens", [[[-100, -100, -100]], [[2, -100, -100]], [[2]]])
def test_where_no_token_is_predicted_nothing_is_touched(tokens: list[list[int]]) -> None:
    value, gradient = value_and_gradient("causal-lm", np.ones((1, len(tokens[0]), 4), np.float32), np.array(tokens))
    assert np.isnan(value)
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_logits_of_16_bits_are_judged_in_float32(dtype: int) -> None:
    """Such logits are exact numbers of float32, and the gradient alone is rounded."""
    options = Options(losses=(LossSpec("causal-lm"),), grad_of_input=("x",))
    x = draw("normal", (2, 40, 60), 0).astype(helper.tensor_dtype_to_np_dtype(dtype))
    y = draw("token", x.shape, 1, -1)
    model = onnx.load_from_string(built(x.shape, options, dtype=dtype))
    value, gradient = ReferenceEvaluator(model).run(["loss", "x_grad"], {"x": x, "label": y})
    leaf = torch.tensor(x.astype(np.float32), requires_grad=True)
    wanted = causal_lm(leaf, torch.tensor(y), "mean")
    wanted.backward()
    assert value.dtype == np.float32 and gradient.dtype == x.dtype and leaf.grad is not None
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient.astype(np.float32), leaf.grad.numpy(), rtol=2.0**-7, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("cross-entropy", {"class_axis": 2}, ("wrong_value", "loss_options=class-axis=2", "p", "2")),
        ("nll", {"class_axis": -2}, ("wrong_value", "loss_options=class-axis=-2", "p", "2")),
        ("log", {"class_axis": 0}, ("wrong_value", "loss_options=class-axis=0", "p", "2")),
        ("causal-lm", {}, ("wrong_shape", "3", "p", "5")),
    ],
)
def test_an_axis_that_there_is_not(name: str, given: dict[str, int], expected: tuple[str, ...]) -> None:
    with raises(UsageError, *expected):
        built((4, 5), Options(losses=(LossSpec(name),), grad_of_input=("x",), loss_options=given))
