"""Angles written out by Div, Atan and Where, as by exporters, have the derivatives of PyTorch's atan2 everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad_cli.cli import run

torch = pytest.importorskip("torch")

QUADRANTS = """
    a = Atan(q) up = Greater(y, zero) more = Add(a, pi) less = Sub(a, pi) other = Where(up, more, less)
    left = Less(x, zero) angle = Where(left, other, a)
"""
FORMS = {
    "quotient": "q = Div(y, x)" + QUADRANTS,
    "reciprocal": "r = Reciprocal(x) q = Mul(r, y)" + QUADRANTS,
    "origin": "q = Div(y, x)" + QUADRANTS.replace("angle", "raw") + "no = IsNaN(raw) angle = Where(no, zero, raw)",
}
"""The bodies that PyTorch's older exporter writes, one with a Reciprocal, and its newer exporter writes."""

DIRECTIONS = [(y, x) for y in (-2.0, -1e-3, 0.0, 0.5, 3.0) for x in (-1.0, -1e-3, 0.0, 2.0) if y or x]
"""Every quadrant and axis."""


def model(form: str, folder: Path, y: str = "N", x: str = "N") -> Path:
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[{y}] y, float[{x}] x) => (float[{y}] angle)
    <float zero = {{0.0}}, float pi = {{3.141592653589793}}> {{ {FORMS[form]} }}
    """
    onnx.save(onnx.parser.parse_model(text), folder / "angle.onnx")
    return folder / "angle.onnx"


def derived(folder: Path, source: Path, kind: str, **data: np.ndarray) -> dict[str, np.ndarray]:
    made = folder / "made.onnx"
    assert run(["derive", str(source), "--kind", kind, "-o", str(made)]) == 0
    session = onnxruntime.InferenceSession(made)
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, data), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_every_direction(form: str, tmp_path: Path) -> None:
    points = np.float32(DIRECTIONS)
    g = np.linspace(1, 2, len(points), dtype=np.float32)
    y, x = np.ascontiguousarray(points[:, 0]), np.ascontiguousarray(points[:, 1])
    got = derived(tmp_path, model(form, tmp_path), "vjp", y=y, x=x, angle_grad=g)
    leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (y, x)]
    torch.atan2(*leaves).backward(torch.tensor(g))
    for name, leaf in zip(("y", "x"), leaves, strict=True):
        np.testing.assert_allclose(got[f"{name}_grad"], leaf.grad.numpy(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_in_every_direction(form: str, tmp_path: Path) -> None:
    points = np.float32(DIRECTIONS)
    y, x = np.ascontiguousarray(points[:, 0]), np.ascontiguousarray(points[:, 1])
    vectors = np.float32(np.random.default_rng(0).standard_normal((2, len(points))))
    feeds = {"y": y, "x": x, "y_vector": vectors[0], "x_vector": vectors[1]}
    got = derived(tmp_path, model(form, tmp_path), "hvp", **feeds)
    wanted = torch.autograd.functional.hvp(
        lambda y, x: torch.atan2(y, x).sum(),
        (torch.tensor(y).double(), torch.tensor(x).double()),
        tuple(torch.tensor(v).double() for v in vectors),
    )[1]
    np.testing.assert_allclose(got["y_hvp"], wanted[0].numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got["x_hvp"], wanted[1].numpy(), rtol=1e-4, atol=1e-4)


def test_operands_that_are_broadcast(tmp_path: Path) -> None:
    y, x = np.float32([[1, -2, 0], [0.5, 3, -1]]), np.float32([0, -1, 2])
    source = model("quotient", tmp_path, y="2, 3", x="3")
    got = derived(tmp_path, source, "vjp", y=y, x=x, angle_grad=np.ones_like(y))
    leaves = [torch.tensor(v, requires_grad=True) for v in (y, x)]
    torch.atan2(*leaves).sum().backward()
    for name, leaf in zip(("y", "x"), leaves, strict=True):
        np.testing.assert_allclose(got[f"{name}_grad"], leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_the_origin_and_the_ends_of_the_range(tmp_path: Path) -> None:
    """0 at the origin, as in PyTorch; the true gradient where the squares leave the range of float32."""
    y, x = np.float32([0, 1e-25, 3e25, 0]), np.float32([0, 1e-25, 4e25, -1e30])
    source = model("origin", tmp_path)
    got = derived(tmp_path, source, "vjp", y=y, x=x, angle_grad=np.ones_like(y))
    r2 = np.float64(y) ** 2 + np.float64(x) ** 2 + (x == 0)
    np.testing.assert_allclose(got["y_grad"], x / r2, rtol=1e-5)
    np.testing.assert_allclose(got["x_grad"], -y / r2, rtol=1e-5)


def test_a_quotient_that_is_read_elsewhere_keeps_the_gradient_of_its_nodes(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[N] y, float[N] x) => (float[N] s) { q = Div(y, x) a = Atan(q) s = Add(a, q) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "sum.onnx")
    y, x = np.float32([1, -2, 0.5]), np.float32([3, -1, -2])
    got = derived(tmp_path, tmp_path / "sum.onnx", "vjp", y=y, x=x, s_grad=np.ones(3, np.float32))
    leaves = [torch.tensor(v, requires_grad=True) for v in (y, x)]
    (torch.atan(leaves[0] / leaves[1]) + leaves[0] / leaves[1]).sum().backward()
    np.testing.assert_allclose(got["y_grad"], leaves[0].grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(got["x_grad"], leaves[1].grad.numpy(), rtol=1e-5)
