"""Einsum and the determinant against PyTorch's autograd, and the determinant where a matrix is singular."""

import itertools

import numpy as np
import pytest
import torch

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from tests.harness import Case, fed, forward_model, sample, with_gradient

rng = np.random.default_rng(11)


def gradients(case: Case, seed: np.ndarray, symbolic: bool = False) -> list[np.ndarray]:
    model, feeds = forward_model(case, symbolic), sample(case)
    names = [name for name in feeds if feeds[name].dtype.kind == "f"]
    model = with_gradient(model, names, ["y0"], "g_")
    found = Executor(model, case.executor)(fed(model, {**feeds, "g_y0": seed}))
    return [found[f"g_grad_{name}"] for name in names]


def of_det(x: np.ndarray, g: np.ndarray, along: np.ndarray | None = None, symbolic: bool = False) -> np.ndarray:
    """The gradient of g . det(x); with `along`, the gradient of along . that."""
    case = Case("Det", [x])
    model = with_gradient(forward_model(case, symbolic), ["x0"], ["y0"], "g_")
    if along is not None:
        model = with_gradient(model, ["x0"], ["g_grad_x0"], "h_")
    found = Executor(model)(fed(model, {"x0": x, "g_y0": g, "h_g_grad_x0": along}))
    return found["g_grad_x0" if along is None else "h_grad_x0"]


def determinant(x: list[list[int]]) -> int:
    """Of integers, by the sum over permutations: exact."""
    total = 0
    for order in itertools.permutations(range(len(x))):
        sign = (-1) ** sum(a > b for a, b in itertools.combinations(order, 2))
        total += sign * int(np.prod([x[i][j] for i, j in enumerate(order)], dtype=object))
    return total


def cofactors(x: list[list[int]]) -> np.ndarray:
    others = [[k for k in range(len(x)) if k != i] for i in range(len(x))]
    minors = [[[[x[a][b] for b in cols] for a in rows] for cols in others] for rows in others]
    return np.array([[(-1) ** (i + j) * determinant(m) for j, m in enumerate(row)] for i, row in enumerate(minors)])


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_the_determinant_of_a_singular_matrix_has_its_cofactors(rank: int, symbolic: bool) -> None:
    x = rng.integers(-4, 5, (4, rank)) @ rng.integers(-4, 5, (rank, 4))
    found = of_det(x.astype(float), np.array(2.0), symbolic=symbolic)
    np.testing.assert_allclose(found, 2 * cofactors(x.tolist()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_the_second_derivative_at_a_singular_matrix(rank: int) -> None:
    x = rng.integers(-4, 5, (4, rank)) @ rng.integers(-4, 5, (rank, 4))
    along, expected = rng.integers(-4, 5, (4, 4)), np.zeros((4, 4))
    for i, j in np.ndindex(4, 4):
        unit = np.zeros((4, 4), int)
        unit[i, j] = 1
        ahead, behind = (cofactors((x + way * unit).tolist()) for way in (1, -1))
        expected[i, j] = float((along * (ahead - behind)).sum()) / 2  # exact: it is linear in each element
    found = of_det(x.astype(float), np.array(1.0), along.astype(float))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_determinant_against_pytorch(size: int) -> None:
    x, g, along = rng.standard_normal((2, size, size)), rng.standard_normal(2), rng.standard_normal((2, size, size))
    leaf = torch.tensor(x, requires_grad=True)
    (first,) = torch.autograd.grad(torch.linalg.det(leaf), leaf, torch.tensor(g), create_graph=True)
    (second,) = torch.autograd.grad(first, leaf, torch.tensor(along))
    for found, wanted in ((of_det(x, g), first.detach()), (of_det(x, g, along), second)):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-9, atol=1e-12 * float(wanted.abs().max()))


@pytest.mark.parametrize("size", [2, 8, 16, 32])
def test_the_determinant_in_float32_on_onnxruntime(size: int) -> None:
    x = (rng.standard_normal((size, size)) * 1.6 / np.sqrt(size)).astype(np.float32)
    found = gradients(Case("Det", [x]), np.ones((), np.float32))[0]
    wide = x.astype(np.float64)
    expected = np.linalg.det(wide) * np.linalg.inv(wide).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_determinant_too_large_for_its_minors_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="elements"):
        gradients(Case("Det", [(200, 200)]), np.ones(()))


EQUATIONS = [
    ("ii->i", [(4, 4)]),
    ("ii->", [(4, 4)]),
    ("ijij->ji", [(2, 3, 2, 3)]),
    ("...ii->...i", [(2, 3, 3)]),
    ("iij,jkk->ik", [(2, 2, 3), (3, 4, 4)]),
    ("abc,cd,def->abef", [(2, 3, 4), (4, 5), (5, 2, 3)]),
    ("bA,Ac->bc", [(2, 3), (3, 4)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (1, 5, 4, 2)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]),
    ("ij,kl->", [(2, 3), (4, 2)]),
    ("i,j,k", [(2,), (3,), (4,)]),
    ("bhid,bhjd->bhij", [(2, 2, 3, 4), (2, 2, 5, 4)]),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_einsum_against_pytorch(equation: str, shapes: list[tuple[int, ...]], symbolic: bool) -> None:
    case = Case("Einsum", shapes, {"equation": equation})
    leaves = [torch.tensor(x, requires_grad=True) for x in sample(case).values()]
    y = torch.einsum(equation, *leaves)
    seed = rng.standard_normal(y.shape)
    expected = torch.autograd.grad(y, leaves, torch.tensor(seed))
    for found, wanted in zip(gradients(case, seed, symbolic), expected, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("symbolic", [False, True])
def test_the_inverse_against_pytorch(symbolic: bool) -> None:
    x, seed = rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 4))
    leaf = torch.tensor(x, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.linalg.inv(leaf), leaf, torch.tensor(seed))
    (found,) = gradients(Case("Inverse", [x], domain="com.microsoft"), seed, symbolic)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-9, atol=1e-12 * float(expected.abs().max()))
