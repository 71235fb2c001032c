"""Rows of onnxgrad_cli/autodiff/rules/resize.py."""

import numpy as np

from tests.harness import Case, const

X = (1, 2, 4, 5)
COORDINATES = "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric".split()
SCALES = [(2.0, 3.0), (1.5, 0.6), (0.25, 1.0)]


def by_scales(scales, attrs, opset=19, x=X, **more):
    if attrs.get("coordinate_transformation_mode") == "align_corners":
        more["symbolic"] = all(scale == int(scale) for scale in scales)  # else refused, see rules/test_resize.py
    return Case("Resize", [x, None, const([1.0, 1.0, *scales], np.float32)], attrs, opset=opset, **more)


def by_sizes(sizes, attrs, opset=19, x=X, **more):
    return Case("Resize", [x, None, None, const([*x[:2], *sizes])], attrs, opset=opset, **more)


ROWS = [
    *(
        by_scales(scales, {"mode": mode, "coordinate_transformation_mode": coordinates})
        for mode in ("nearest", "linear", "cubic")
        for coordinates in COORDINATES
        for scales in SCALES[: 2 if mode == "cubic" and coordinates == "pytorch_half_pixel" else 3]
    ),
    *(
        by_sizes((7, 3), {"mode": mode, "coordinate_transformation_mode": coordinates})
        for mode in ("nearest", "linear", "cubic")
        for coordinates in COORDINATES
    ),
    *(
        by_scales(scales, {"mode": "nearest", "nearest_mode": how, "coordinate_transformation_mode": coordinates})
        for how in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
        for coordinates in ("asymmetric", "half_pixel")
        for scales in [(2.0, 3.0), (1.4, 0.7)]
    ),
    by_scales((1.5, 0.6), {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}),
    by_scales((2.0,), {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
              x=(2, 3, 4)),
    by_scales((2.0, 1.0, 3.0), {"mode": "nearest", "coordinate_transformation_mode": "asymmetric",
                                "nearest_mode": "floor"}, x=(1, 2, 2, 3, 2)),
    by_scales((2.0, 1.5, 3.0), {"mode": "linear"}, x=(1, 2, 2, 3, 2)),
    Case("Resize", [X, None, const([2.0, 1.5], np.float32)], {"mode": "linear", "axes": [3, 2]}, opset=18),
    *(
        by_sizes(sizes, {"mode": mode, "antialias": 1, "exclude_outside": i, "cubic_coeff_a": -0.5})
        for mode in ("linear", "cubic")
        for sizes in [(2, 7), (1, 2)]
        for i in (0, 1)
    ),
    by_scales((0.3, 0.25), {"mode": "linear", "antialias": 1}, x=(1, 1, 10, 8)),
    *(
        Case("Resize", [X, const([start, 0.1, end, 0.7], np.float64), None, const(sizes)], {
            "mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "axes": [2, 3],
            "extrapolation_value": 10.0}, opset=opset)
        for mode, opset in [("nearest", 18), ("linear", 18), ("linear", 19), ("cubic", 19)]
        for start, end, sizes in [(0.25, 0.8, (3, 7)), (0.9, -0.3, (6, 3)), (0.3, 0.6, (1, 4))]
    ),
    Case("Resize", [X, const([0, 0, 0.4, 0, 1, 1, 0.6, 1], np.float64), const([1, 1, 1.5, 2], np.float32)],
         {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}, opset=13, symbolic=False),
    *(
        Case("Resize", [X, None, None, const(sizes)],
             {"mode": mode, "keep_aspect_ratio_policy": policy, "axes": [2, 3]}, opset=18)
        for mode in ("nearest", "linear")
        for policy in ("stretch", "not_larger", "not_smaller")
        for sizes in [(7, 8), (9, 3)]
    ),
    *(by_scales((2.0, 1.5), {"mode": mode}, opset=opset) for mode in ("nearest", "linear") for opset in (13, 18, 19)),
]  # fmt: skip
