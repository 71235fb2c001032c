"""Rows of onnxgrad_cli/autodiff/rules/interpolation.py."""

import numpy as np

from tests.autodiff.rows.pool import distinct
from tests.harness import Case, const

PADDINGS = ("zeros", "border", "reflection")


def grid(*shape, reach=1.6):
    """Positions inside and outside of the image, none of them at an element or at an end."""
    return np.random.default_rng(len(shape)).uniform(-reach, reach, shape)


def grid_sample(x, positions, opset=20, **attrs) -> Case:
    keywords = {"executor": "reference"} if opset < 20 or (attrs.get("mode") == "cubic" and len(x) != 4) else {}
    return Case("GridSample", [x, positions], attrs, opset=opset, **keywords)


def boxes(mode, sampling_ratio, opset=16, scale=1.0, **attrs) -> Case:
    attrs = {"mode": mode, "sampling_ratio": sampling_ratio, "output_height": 2, "output_width": 3, **attrs}
    corners = np.array([[0.3, 0.2, 4.6, 3.1], [-3.2, 1.4, 9.3, 3.9], [2.1, 2.2, 2.3, 2.6], [3.3, 3.1, 1.2, 0.4]])
    return Case(
        "RoiAlign",
        [distinct(2, 2, 4, 5), const(corners / scale, np.float64), const([0, 1, 1, 0])],
        {**attrs, "spatial_scale": scale},
        opset=opset,
        executor="reference" if opset >= 22 else "onnxruntime",
    )


def max_roi_pool(corners, shape, opset=16, scale=1.0, **keywords) -> Case:
    attrs = {"pooled_shape": shape, "spatial_scale": scale}
    return Case("MaxRoiPool", [distinct(2, 2, 6, 7), const(corners, np.float64)], attrs, opset=opset, **keywords)


ROIS = [[0, 1, 1, 4, 5], [1, -2, 0, 9, 3], [1, 3, 3, 3, 3], [0, 8, 8, 9, 9], [1, 1, 1, 5, 2]]


def deform_conv(
    x, kernel, out, group=1, offset_group=1, opset=19, bias=False, mask=True, per=2, reach=1.4, **attrs
) -> Case:
    """`out`: the output's spatial sizes."""
    n, c = x[:2]
    taps = int(np.prod(kernel)) * offset_group
    offset = np.random.default_rng(taps).uniform(-reach, reach, (n, taps * len(kernel), *out))
    inputs = [
        x,
        (per * group, c // group, *kernel),
        offset,
        (per * group,) if bias else None,
        (n, taps, *out) if mask else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    attrs |= {"group": group, "offset_group": offset_group, "kernel_shape": list(kernel)}
    return Case("DeformConv", inputs, attrs, opset=opset, executor="onnxruntime" if len(x) == 4 else "reference")


ROWS = [
    *(
        grid_sample((2, 3, 4, 5), grid(2, 3, 2, 2), mode=mode, padding_mode=padding, align_corners=corners)
        for mode in ("linear", "nearest", "cubic")
        for padding in PADDINGS
        for corners in (0, 1)
    ),
    *(
        grid_sample((1, 2, 3, 4, 2), grid(1, 2, 2, 2, 3), mode=mode, padding_mode=padding, align_corners=corners)
        for mode in ("linear", "nearest")
        for padding in PADDINGS
        for corners in (0, 1)
    ),
    *(
        grid_sample((1, 1, 2, 3, 2), grid(1, 1, 2, 1, 3), mode="cubic", padding_mode=padding, align_corners=corners)
        for padding in PADDINGS
        for corners in (0, 1)
    ),
    *(
        grid_sample((1, 2, 3, 4), grid(1, 2, 2, 2), opset=16, mode=mode, padding_mode=padding)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in PADDINGS
    ),
    grid_sample((1, 2, 3, 4), grid(1, 2, 2, 2), opset=16),
    grid_sample((1, 2, 3, 4), grid(1, 2, 2, 2), opset=22),
    grid_sample((2, 2, 12, 11), grid(2, 2, 2, 2), opset=22, padding_mode="border"),
    grid_sample((1, 2, 1, 1), grid(1, 2, 2, 2), padding_mode="reflection", align_corners=1),
    grid_sample((1, 2, 3, 1), grid(1, 2, 2, 2, reach=4), mode="cubic", padding_mode="reflection"),
    *(Case("AffineGrid", [(2, 2, 3), const([2, 1, 3, 4])], {"align_corners": corners}, opset=20) for corners in (0, 1)),
    *(
        Case("AffineGrid", [(2, 3, 4), const([2, 1, 2, 3, 4])], {"align_corners": corners}, opset=20)
        for corners in (0, 1)
    ),
    Case("AffineGrid", [(1, 2, 3), np.array([1, 3, 2, 5])], opset=22, note="size at run time", symbolic=False),
    *(
        boxes(mode, ratio, coordinate_transformation_mode=how)
        for mode in ("avg", "max")
        for ratio in (0, 1, 2)
        for how in ("half_pixel", "output_half_pixel")
    ),
    *(boxes(mode, 2, opset=opset, scale=0.25) for mode in ("avg", "max") for opset in (16, 22)),
    *(max_roi_pool(ROIS, shape) for shape in ([1, 1], [2, 2], [3, 2])),
    max_roi_pool(ROIS, [2, 2], opset=22),
    max_roi_pool(
        [[1, 5, 1, 22, 15], [0, -6, 6, 10, 18]],
        [2, 2],
        scale=0.25,
        note="halves",
    ),
    deform_conv((2, 2, 4, 5), (2, 2), (3, 4), bias=True),
    deform_conv((2, 2, 4, 5), (2, 2), (3, 4), bias=True, mask=False),
    deform_conv((1, 2, 4, 5), (2, 2), (3, 4), mask=False, opset=22),
    deform_conv((1, 4, 4, 4), (2, 2), (3, 3), group=2, offset_group=2, per=1),
    deform_conv((1, 4, 4, 4), (2, 2), (3, 3), group=2),
    deform_conv((1, 4, 4, 4), (1, 2), (4, 3), offset_group=4, mask=False),
    deform_conv((1, 1, 6, 7), (3, 2), (4, 3), strides=[2, 3], pads=[1, 0, 2, 1], bias=True),
    deform_conv((1, 1, 6, 7), (2, 2), (4, 4), dilations=[2, 3], mask=False),
    deform_conv((1, 2, 1, 3), (1, 1), (1, 3), reach=0.8),
    deform_conv((1, 2, 3, 2, 3), (2, 1, 2), (2, 2, 2), bias=True, reach=0.8),
    deform_conv((1, 2, 5), (2,), (4,), bias=True, strides=[1]),
]
