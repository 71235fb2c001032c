"""Rows of onnxgrad_cli/rules/resize.py."""

import numpy as np

from tests.harness import Case, const

X = (1, 2, 4, 5)
COORDINATES = "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric".split()
SCALES = [(2.0, 3.0), (1.5, 0.6), (0.25, 1.0)]


def by_scales(scales, attrs, opset=19, x=X, **more):
    if attrs.get("coordinate_transformation_mode") == "align_corners":
        more["symbolic"] = all(scale == int(scale) for scale in scales)  # else refused, see tests/test_resize.py
    if attrs["mode"] == "cubic":
        more["tolerance"] = 1e-4  # onnx.reference interpolates in single precision
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
    *(by_scales((2.0, 1.5), {"mode": mode}, opset=opset) for mode in ("nearest", "linear") for opset in (13, 18, 19)),
]  # fmt: skip
