"""Reductions where the derivative is not plain: ties, zeros in a product, a norm of zero, infinities."""

import numpy as np
import pytest
import torch

from onnxgrad_cli.execution.executor import Executor
from tests.harness import Case, const, fed, forward_model, sample, with_gradient

rng = np.random.default_rng(5)
TIES = np.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-1.0, 0.0, -1.0, 0.0]])
ZEROS = np.array([[1.0, 0.0, 3.0, 2.0], [0.0, 2.0, 0.0, 2.0], [-1.0, 4.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0]])


def gradient(kind: str, x: np.ndarray, g: np.ndarray, symbolic: bool, order: int = 1) -> np.ndarray:
    """The gradient of g . kind(x, axis 1); of order 2, that of the squared norm of the gradient."""
    return gradient_of(Case(kind, [x, const([1])], {"keepdims": 0}), g, symbolic, order)


def gradient_of(case: Case, g: np.ndarray, symbolic: bool, order: int = 1) -> np.ndarray:
    model = with_gradient(forward_model(case, symbolic), ["x0"], ["y0"], "g_")
    feeds = {**sample(case), "g_y0": g}
    if order == 2:
        feeds["h_g_grad_x0"] = 2 * Executor(model)(fed(model, feeds))["g_grad_x0"]
        model = with_gradient(model, ["x0"], ["g_grad_x0"], "h_")
    return Executor(model)(fed(model, feeds))["g_grad_x0" if order == 1 else "h_grad_x0"]


def expected(function, x: np.ndarray, g: np.ndarray, order: int = 1) -> np.ndarray:
    leaf = torch.tensor(x, requires_grad=True)
    (first,) = torch.autograd.grad(function(leaf), leaf, torch.tensor(g), create_graph=True)
    if order == 1:
        return first.detach().numpy()
    if not first.requires_grad:
        return np.zeros_like(x)
    (second,) = torch.autograd.grad((first * first).sum(), leaf)
    return second.numpy()


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("kind", "x", "function"),
    [
        ("ReduceMax", TIES, lambda x: x.amax(1)),
        ("ReduceMin", TIES, lambda x: x.amin(1)),
        ("ReduceProd", ZEROS, lambda x: x.prod(1)),
        ("ReduceL1", ZEROS, lambda x: x.norm(1, 1)),
        ("ReduceL2", ZEROS, lambda x: x.norm(2, 1)),
        ("ReduceLogSumExp", 300 * ZEROS, lambda x: x.logsumexp(1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conventions_are_those_of_pytorch(kind, x, function, symbolic) -> None:
    g = rng.standard_normal(len(x))
    np.testing.assert_allclose(gradient(kind, x, g, symbolic), expected(function, x, g), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_product_with_zeros_has_its_second_derivative(symbolic: bool) -> None:
    g = rng.standard_normal(len(ZEROS))
    found = gradient("ReduceProd", ZEROS, g, symbolic, order=2)
    np.testing.assert_allclose(found, expected(lambda x: x.prod(1), ZEROS, g, 2), rtol=1e-12, atol=1e-15)


def test_a_mean_in_float16_over_more_than_float16_can_count() -> None:
    x, g = np.ones((1, 100_000), np.float16), np.array([1000.0], np.float16)
    found = gradient("ReduceMean", x, g, symbolic=True)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, np.full(x.shape, 0.01), rtol=1e-3)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 70])
@pytest.mark.thinned(4)
def test_a_running_product_is_differentiated_as_pytorch_does(length, exclusive, reverse, order, symbolic) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.flip(1) if reverse else x
        if exclusive:
            x = torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], 1)
        y = x.cumprod(1)
        return y.flip(1) if reverse else y

    x = rng.uniform(0.8, 1.25, (3, length))
    x[1, length // 2] = x[2, 0] = x[2, length // 2] = 0.0
    case = Case("CumProd", [x, const(1)], {"exclusive": exclusive, "reverse": reverse}, opset=26)
    g = rng.standard_normal(x.shape)
    wanted = expected(function, x, g, order)
    scale = max(float(np.abs(wanted).max()), 1.0)
    np.testing.assert_allclose(gradient_of(case, g, symbolic, order), wanted, rtol=0, atol=1e-12 * scale)


def test_a_tie_of_more_elements_than_float16_can_count() -> None:
    x, g = np.ones((1, 100_000), np.float16), np.array([1000.0], np.float16)
    found = gradient("ReduceMax", x, g, symbolic=False)
    np.testing.assert_allclose(found, np.full(x.shape, 0.01), rtol=1e-3)
