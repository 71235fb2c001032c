"""Resize against itself and against PyTorch: a linear map R and its gradient's map G satisfy <g, R x> = <G g, x>.

Both sides run in float32 on onnxruntime, so that the positions are rounded as it rounds them.
"""

import itertools

import numpy as np
import pytest
import torch

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.executor import Executor
from tests.harness import Case, const, forward_model, with_gradient
from tests.test_conv import compare

COORDINATES = "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric".split()
NEAREST = "round_prefer_floor round_prefer_ceil floor ceil".split()
SIZES = [(1, 3), (2, 1), (3, 2), (5, 7), (6, 3), (7, 10), (8, 16), (9, 27), (12, 5)]


def check_adjoint(case, symbolic):
    model = forward_model(case, symbolic)
    rng = np.random.default_rng(0)
    (x,) = [np.asarray(v) for v in case.inputs[:1]]
    y = Executor(model, fallback=False)({"x0": x})["y0"]
    backward = Executor(with_gradient(model, ["x0"], ["y0"], "g_"), fallback=False)
    for _ in range(2):
        g = rng.standard_normal(y.shape).astype(np.float32)
        dx = backward({"x0": x, "g_y0": g})["g_grad_x0"]
        left, right = np.sum(np.float64(g) * y), np.sum(np.float64(dx) * x)
        assert abs(left - right) < 1e-5 * np.sum(np.abs(g * y)), f"{case}: {left} {right}"


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("by", ["scales", "sizes"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_adjoint(mode, coordinates, by, symbolic):
    if coordinates == "align_corners" and by == "scales":
        pytest.skip("refused, see test_a_broken_size_between_aligned_corners_is_refused")
    rng = np.random.default_rng(0)
    for (old, new), how, outside in itertools.product(
        SIZES, NEAREST if mode == "nearest" else NEAREST[:1], (0, 1) if mode == "cubic" else (0,)
    ):
        attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": how}
        attrs["exclude_outside"] = outside
        x = rng.standard_normal((1, 2, old, 4)).astype(np.float32)
        if by == "scales":
            inputs = [x, None, const([1, 1, (new + 0.01) / old, 1.5], np.float32)]
        else:
            inputs = [x, None, None, const([1, 2, new, 6])]
        check_adjoint(Case("Resize", inputs, attrs, opset=19), symbolic)


@pytest.mark.parametrize("size", [(14, 20), (9, 5), (7, 8)])
@pytest.mark.parametrize(
    ("torch_mode", "attrs"),
    [
        (
            "nearest",
            {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        ),
        ("bilinear", {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
        ("bicubic", {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    ],
)
def test_interpolate(torch_mode, attrs, size):
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 10))
    attrs = {**attrs, "cubic_coeff_a": -0.75}
    if torch_mode == "nearest":
        compare_resize(lambda x: torch.nn.functional.interpolate(x, size, mode=torch_mode), x, size, attrs)
    else:
        compare_resize(
            lambda x: torch.nn.functional.interpolate(x, size, mode=torch_mode, align_corners=False),
            x,
            size,
            attrs,
        )


def compare_resize(function, x, size, attrs):
    compare(function, "Resize", [x, None, None, const([*x.shape[:2], *size])], attrs)


def test_a_size_that_is_rounded_in_two_ways_is_refused():
    case = Case("Resize", [(1, 1, 5), None, const([1, 1, 1.4], np.float32)], {"mode": "linear"})
    with pytest.raises(UnsupportedError, match="rounded"):
        with_gradient(forward_model(case, False), ["x0"], ["y0"], "g_")


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_broken_size_between_aligned_corners_is_refused(symbolic):
    """onnxruntime computes [1, 4] of the published test of this case, whose output is [1, 3.142857]."""
    attrs = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    case = Case("Resize", [(1, 1, 2, 4), None, const([1, 1, 0.6, 0.6], np.float32)], attrs)
    with pytest.raises(UnsupportedError, match="align"):
        with_gradient(forward_model(case, symbolic), ["x0"], ["y0"], "g_")


@pytest.mark.parametrize("mode", ["tf_crop_and_resize", "half_pixel"])
def test_where_a_resize_samples_is_not_differentiated(mode):
    roi, scales = np.array([0.0, 0.0, 0.4, 0.6, 1, 1, 0.6, 0.8]), np.array([1, 1, 0.8, 0.8], np.float32)
    attrs = {"coordinate_transformation_mode": mode, "mode": "linear"}
    x = const(np.arange(16.0).reshape(1, 1, 4, 4), np.float64)
    model = forward_model(Case("Resize", [x, roi, const(scales, np.float32)], attrs), False)
    if mode == "tf_crop_and_resize":
        with pytest.raises(UnsupportedError, match="where it samples"):
            with_gradient(model, ["x1"], ["y0"], "g_")
    else:
        with_gradient(model, ["x1"], ["y0"], "g_")
    model = forward_model(Case("Resize", [x, const(roi, np.float64), scales], attrs), False)
    with pytest.raises(UnsupportedError, match="where it samples"):
        with_gradient(model, ["x2"], ["y0"], "g_")


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}, "tf_crop_and_resize"),
        ({"antialias": 1, "mode": "linear"}, "antialias"),
        ({"exclude_outside": 1, "mode": "linear"}, "exclude_outside"),
    ],
)
def test_refusals(attrs, reason):
    case = Case("Resize", [(1, 1, 4, 4), const([0] * 4 + [1] * 4, np.float64), const([1, 1, 2, 2], np.float32)], attrs)
    with pytest.raises(UnsupportedError, match=reason):
        with_gradient(forward_model(case, False), ["x0"], ["y0"], "g_")
