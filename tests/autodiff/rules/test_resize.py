"""Resize against itself and against PyTorch: a linear map R and its gradient's map G satisfy <g, R x> = <G g, x>.

Both sides run in float32 on onnxruntime, so that the positions are rounded as it rounds them.
"""

import itertools

import numpy as np
import pytest
import torch
from onnx import numpy_helper, parser

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from tests.autodiff.rules.test_conv import compare
from tests.facts import raises
from tests.harness import Case, const, forward_model, with_gradient

COORDINATES = "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric tf_half_pixel_for_nn".split()
NEAREST = "round_prefer_floor round_prefer_ceil floor ceil".split()
SIZES = [(1, 3), (2, 1), (3, 2), (5, 7), (6, 3), (7, 10), (8, 16), (9, 27), (12, 5)]


def check_adjoint(case, symbolic=False):
    """<g, R x> = <G g, x>, the node's other inputs as they are in the case."""
    model = forward_model(case, symbolic)
    rng = np.random.default_rng(0)
    feeds = {f"x{i}": v for i, v in enumerate(case.inputs) if isinstance(v, np.ndarray)}
    x = feeds["x0"]
    y = Executor(model, fallback=False)(feeds)["y0"]
    backward = Executor(with_gradient(model, ["x0"], ["y0"], "g_"), fallback=False)
    for _ in range(2):
        g = rng.standard_normal(y.shape).astype(np.float32)
        dx = backward({**feeds, "g_y0": g})["g_grad_x0"]
        left, right = np.sum(np.float64(g) * y), np.sum(np.float64(dx) * x)
        assert abs(left - right) <= 1e-5 * np.sum(np.abs(g * y)), f"{case}: {left} {right}"


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("by", ["scales", "sizes"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.thinned(12, 4)
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


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.thinned(8, 4)
def test_adjoint_with_antialias(mode, coordinates, symbolic):
    rng = np.random.default_rng(0)
    for (old, new), outside in itertools.product([*SIZES, (20, 3), (31, 7)], (0, 1)):
        attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "antialias": 1}
        attrs |= {"exclude_outside": outside, "cubic_coeff_a": -0.5}
        x = rng.standard_normal((1, 2, old, 9)).astype(np.float32)
        check_adjoint(Case("Resize", [x, None, None, const([1, 2, new, 4])], attrs, opset=19), symbolic)


@pytest.mark.parametrize("given", ["constant", "at run time", "symbolic"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.thinned(9, 8)
def test_adjoint_of_a_crop(mode, given):
    rng = np.random.default_rng(0)
    regions = [(0.2, 0.8), (0, 1), (0.3, 1), (-0.2, 1.1), (0.7, 0.1), (0.13, 1)]
    for (old, new), (start, end) in itertools.product(SIZES, regions):
        x = rng.standard_normal((1, 2, old, 4)).astype(np.float32)
        roi = np.array([0, 0, start, 0.1, 1, 1, end, 1], np.float32)
        inputs = [x, roi if given == "at run time" else const(roi, np.float32), None, const([1, 2, new, 6])]
        attrs = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize"}
        check_adjoint(Case("Resize", inputs, attrs, opset=19), given == "symbolic")


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.thinned(8, 4)
def test_adjoint_with_the_aspect_ratio_kept(mode, coordinates, policy, symbolic):
    rng = np.random.default_rng(0)
    for sizes in [(7, 8), (3, 9), (12, 2), (1, 3)]:
        x = rng.standard_normal((1, 2, 5, 6)).astype(np.float32)
        attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "keep_aspect_ratio_policy": policy}
        inputs = [x, None, None, const(sizes)]
        check_adjoint(Case("Resize", inputs, {**attrs, "axes": [2, 3]}, opset=19), symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_adjoint_with_scales_known_at_run_time(mode, symbolic):
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 6)).astype(np.float32)
    for scales in [(2, 3), (1.5, 0.6), (0.25, 1)]:
        case = Case("Resize", [x, None, np.array([1, 1, *scales], np.float32)], {"mode": mode}, opset=19)
        check_adjoint(case, symbolic)


@pytest.mark.slow
def test_nearest_takes_the_elements_that_onnxruntime_takes():
    """Among them ties that are none in single precision, as of 1 between 20 and 6, and what is rounded to none."""
    rng = np.random.default_rng(1)
    pairs = [(20, 6), (26, 64), *rng.integers(1, 90, (60, 2)).tolist()]
    drawn = zip(pairs, itertools.cycle(COORDINATES), itertools.cycle(NEAREST), strict=False)
    rounded = itertools.product([(3, 1), (3, 11), (5, 3), (6, 2)], COORDINATES, NEAREST)
    for (old, new), coordinates, how in (*drawn, *rounded):
        x = np.arange(old, dtype=np.float32).reshape(1, 1, old)
        attrs = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": how}
        model = forward_model(Case("Resize", [x, None, None, const([1, 1, new])], attrs, opset=19), False)
        y = Executor(model, fallback=False)({"x0": x})["y0"].ravel().astype(int)
        g = np.arange(1, new + 1, dtype=np.float32)
        backward = Executor(with_gradient(model, ["x0"], ["y0"], "g_"), fallback=False)
        dx = backward({"x0": x, "g_y0": g.reshape(1, 1, -1)})["g_grad_x0"].ravel()
        np.testing.assert_array_equal(dx, np.bincount(y, g, old), f"{old} {new} {coordinates} {how}")


@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "half_pixel_symmetric"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.thinned(4)
def test_a_result_as_large_as_the_input_is_a_copy(mode, coordinates):
    """However the scales stretch it: onnxruntime looks at the shapes alone; with antialias at each axis by itself."""
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    rng = np.random.default_rng(0)
    for sizes, scales in [((2, 3), (1.3, 1.3)), ((2, 5), (1.3, 1)), ((4, 3), (1.2, 1.3)), ((2, 5), (1.3, 1.3))]:
        x = rng.standard_normal((1, 2, *sizes)).astype(np.float32)
        scales = np.array([1, 1, *scales], np.float32)
        check_adjoint(Case("Resize", [x, None, const(scales, np.float32)], attrs, opset=19), symbolic=True)
        for antialias in (0, 1) if mode != "nearest" else (0,):
            case = Case("Resize", [x, None, scales], {**attrs, "antialias": antialias}, opset=19)
            check_adjoint(case, symbolic=True)
    with raises(UnsupportedError, "refused", "node", "Resize"):
        x = np.ones((1, 2, 2, 3), np.float32)
        check_adjoint(Case("Resize", [x, None, const([1, 1, 1.3, 1.3], np.float32)], attrs, opset=19))


@pytest.mark.parametrize("size", [(14, 20), (9, 5), (3, 2)])
@pytest.mark.parametrize(("torch_mode", "mode"), [("bilinear", "linear"), ("bicubic", "cubic")])
def test_interpolate_with_antialias(torch_mode, mode, size):
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 10))
    attrs = {"mode": mode, "antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
    compare_resize(lambda x: torch.nn.functional.interpolate(x, size, mode=torch_mode, antialias=True), x, size, attrs)


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
@pytest.mark.thinned(3)
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
    with raises(UnsupportedError, "refused", "node", "Resize", "5", "1.399999976158142", "6"):
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
        with raises(UnsupportedError, "refused", "node", "Resize"):
            with_gradient(model, ["x1"], ["y0"], "g_")
    else:
        with_gradient(model, ["x1"], ["y0"], "g_")
    model = forward_model(Case("Resize", [x, const(roi, np.float64), scales], attrs), False)
    with raises(UnsupportedError, "refused", "node", "Resize"):
        with_gradient(model, ["x2"], ["y0"], "g_")


@pytest.mark.parametrize("opset", [11, 12, 13])
@pytest.mark.parametrize("scale", [2, 0.5, 1.7])
def test_nearest_neighbours_of_tensorflow(opset, scale):
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}]>
        net (float[1, 2, 4, 6] x) => (float[a, b, c, d] y)
        <float[8] roi = {{0, 0, 0, 0, 1, 1, 1, 1}}, float[4] scales = {{1, 1, {scale}, {scale}}}>
        {{
          z = Mul(x, w)
          y = Resize<mode="nearest", coordinate_transformation_mode="tf_half_pixel_for_nn", nearest_mode="floor">
                    (z, roi, scales)
        }}""")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((1, 2, 4, 6)).astype(np.float32) for _ in range(2))
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    y = Executor(model, fallback=False)({"x": x})["y"]
    label = rng.standard_normal(y.shape).astype(np.float32)
    training = build(model, Options(losses=(LossSpec("mse", label="label"),), reduction="sum")).model
    grad = Executor(training, fallback=False)({"x": x, "label": label})["w_grad"]
    each = np.zeros(w.shape)
    for index in np.ndindex(w.shape):  # the loss is a sum of squares: its gradient is 2 <y - label, dy / dw_i>
        one = np.zeros(w.shape, np.float32)
        one[index] = 1
        model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(one, "w"))
        each[index] = np.sum(2 * (y - label) * Executor(model, fallback=False)({"x": x})["y"])
    np.testing.assert_allclose(grad, each, rtol=1e-4, atol=1e-4)


CROP = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
BOX = const([0, 0, 0.1, 0, 1, 1, 0.9, 1], np.float32)


@pytest.mark.parametrize(
    ("inputs", "attrs", "reason"),
    [
        ([BOX, None, const([1, 1, 4, 6])], CROP, ("2", "1")),
        ([np.zeros(8), None, const([1, 1, 4, 6])], CROP, ("2", "1")),
        ([BOX, const([1, 1, 1.4, 2], np.float32)], CROP, ("4", "1.399999976158142")),
        ([None, None, const([1, 1, 5, 6])], CROP, ("tf_crop_and_resize",)),
        ([None, np.ones(4, np.float32)], {"coordinate_transformation_mode": "align_corners"}, ()),
        ([None, None, const([1, 1, 2, 2])], {"exclude_outside": 1, "mode": "linear"}, ("exclude_outside",)),
        ([None, None, const([4, 6])], {"axes": [-2, -1], "keep_aspect_ratio_policy": "not_larger"}, ()),
    ],
)
def test_refusals(inputs, attrs, reason):
    with raises(UnsupportedError, "refused", "node", "Resize", *reason):
        with_gradient(forward_model(Case("Resize", [(1, 1, 4, 4), *inputs], attrs), False), ["x0"], ["y0"], "g_")


def test_a_long_axis_that_keeps_its_size_needs_no_matrix():
    x = np.random.default_rng(0).standard_normal((1, 1, 5000, 2)).astype(np.float32)
    attrs = {"mode": "linear"}
    check_adjoint(Case("Resize", [x, None, None, const([1, 1, 5000, 3])], attrs))
    with pytest.raises(UnsupportedError, match="axis 2 has 5001 x 5000 elements"):
        check_adjoint(Case("Resize", [x, None, None, const([1, 1, 5001, 3])], attrs))
