"""Rows of onnxgrad_cli/autodiff/rules/conv.py."""

import numpy as np

from tests.harness import Case, const

K3 = {"kernel_shape": [3, 3]}

CONVS = [
    ([(2, 3, 7), (4, 3, 3), (4,)], {"kernel_shape": [3], "pads": [1, 0]}, "1-D"),
    (
        [(2, 3, 8), (4, 3, 3)],
        {"kernel_shape": [3], "strides": [2], "pads": [0, 1], "dilations": [2]},
        "1-D strided",
    ),
    ([(2, 16, 5, 4), (3, 16, 3, 3), (3,)], {**K3, "pads": [1, 1, 1, 1]}, "wide"),
    ([(2, 16, 6, 7), (3, 16, 3, 3)], {**K3, "pads": [0, 1, 2, 0], "strides": [2, 3]}, "asymmetric"),
    (
        [(1, 16, 8, 9), (2, 16, 2, 3)],
        {"kernel_shape": [2, 3], "dilations": [3, 2], "strides": [2, 1]},
        "dilated",
    ),
    ([(2, 3, 6, 5), (4, 3, 3, 3)], {**K3, "pads": [2, 1, 0, 1], "strides": [2, 2]}, "narrow"),
    (
        [(2, 2, 8, 7), (3, 2, 2, 2)],
        {"kernel_shape": [2, 2], "strides": [3, 3], "dilations": [2, 2]},
        "remainder",
    ),
    ([(2, 3, 4, 5), (4, 3, 1, 1), (4,)], {"kernel_shape": [1, 1]}, "pointwise"),
    ([(2, 3, 5, 4), (4, 3, 1, 1)], {"kernel_shape": [1, 1], "strides": [2, 2]}, "pointwise strided"),
    ([(2, 3, 4, 4), (2, 3, 1, 1)], {"kernel_shape": [1, 1], "pads": [1, 0, 0, 1]}, "pointwise padded"),
    ([(2, 4, 5, 5), (6, 2, 3, 3), (6,)], {**K3, "group": 2, "pads": [1, 1, 1, 1]}, "grouped"),
    (
        [(1, 32, 4, 4), (2, 16, 3, 3)],
        {**K3, "group": 2, "pads": [1, 1, 1, 1], "strides": [2, 2]},
        "grouped wide",
    ),
    ([(2, 3, 5, 4), (3, 1, 3, 3)], {**K3, "group": 3, "pads": [1, 1, 1, 1]}, "depthwise"),
    ([(2, 2, 6, 5), (4, 1, 3, 3)], {**K3, "group": 2, "pads": [1, 1, 1, 1], "strides": [2, 2]}, "multiplier"),
    ([(2, 16, 9), (2, 16, 3)], {"kernel_shape": [3], "strides": [2], "pads": [2, 1]}, "1-D wide"),
    (
        [(1, 2, 4, 3, 4), (3, 2, 2, 2, 2), (3,)],
        {"kernel_shape": [2, 2, 2], "pads": [1, 0, 0, 0, 1, 0]},
        "3-D",
    ),
    (
        [(1, 2, 5, 4, 4), (2, 1, 2, 2, 2)],
        {"kernel_shape": [2, 2, 2], "strides": [2, 1, 2], "group": 2},
        "3-D grouped",
    ),
    ([(2, 2, 6, 5), (3, 2, 3, 3)], {**K3, "auto_pad": "SAME_UPPER", "strides": [2, 2]}, ""),
    ([(2, 2, 6, 5), (3, 2, 2, 3)], {"kernel_shape": [2, 3], "auto_pad": "SAME_LOWER", "strides": [2, 3]}, ""),
    ([(2, 2, 6, 5), (3, 2, 2, 2)], {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}, ""),
    ([(2, 2, 6, 5), (3, 2, 3, 3)], {**K3, "auto_pad": "VALID"}, ""),
]
TRANSPOSES = [
    ([(2, 3, 5), (3, 2, 3), (2,)], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}, "1-D"),
    ([(2, 3, 4, 3), (3, 2, 3, 3), (2,)], {**K3, "pads": [1, 1, 1, 1]}, ""),
    (
        [(2, 3, 3, 4), (3, 16, 3, 3)],
        {**K3, "strides": [2, 2], "pads": [1, 0, 0, 1], "output_padding": [1, 0]},
        "wide",
    ),
    ([(2, 3, 3, 4), (3, 2, 4, 4)], {"kernel_shape": [4, 4], "strides": [2, 2], "pads": [1, 1, 1, 1]}, "gan"),
    (
        [(2, 3, 3, 2), (3, 2, 3, 3)],
        {**K3, "strides": [3, 2], "output_padding": [2, 1]},
        "nothing reaches the end",
    ),
    (
        [(2, 4, 3, 3), (4, 2, 2, 2)],
        {"kernel_shape": [2, 2], "group": 2, "dilations": [2, 1], "strides": [1, 2]},
        "",
    ),
    ([(2, 3, 3, 3), (3, 1, 3, 3)], {**K3, "group": 3, "strides": [2, 2], "pads": [1, 1, 1, 1]}, "depthwise"),
    ([(1, 2, 2, 3, 2), (2, 2, 2, 2, 2)], {"kernel_shape": [2, 2, 2], "strides": [2, 1, 1]}, "3-D"),
    ([(2, 3, 3, 4), (3, 2, 1, 1)], {"kernel_shape": [1, 1], "strides": [2, 2]}, "pointwise"),
]

ROWS = [
    *(Case("Conv", inputs, attrs, note=note) for inputs, attrs, note in CONVS),
    Case("Conv", [(2, 2, 5, 5), (3, 2, 3, 3)], symbolic=False, note="kernel_shape from the weight"),
    *(Case("Conv", [(2, 2, 5, 5), (3, 2, 3, 3)], K3, opset=opset) for opset in (13, 22)),
    *(Case("ConvTranspose", inputs, attrs, note=note) for inputs, attrs, note in TRANSPOSES),
    *(Case("ConvTranspose", [(2, 3, 4, 3), (3, 2, 3, 3)], K3, opset=opset) for opset in (13, 22)),
    *(
        Case("Col2Im", [x, const(image), const(block)], attrs)
        for x, image, block, attrs in [
            ((2, 6, 9), [4, 5], [2, 3], {}),
            ((1, 4, 12), [5, 6], [2, 2], {"strides": [2, 1], "pads": [0, 1, 1, 0], "dilations": [1, 3]}),
            ((1, 9, 8), [5, 5], [3, 3], {"strides": [2, 1], "pads": [1, 0, 0, 1]}),
            ((2, 6, 4), [8], [3], {"strides": [2], "pads": [1, 0]}),
            ((1, 8, 12), [3, 4, 3], [2, 2, 2], {}),
            ((1, 4, 4), [5, 5], [2, 2], {"strides": [3, 3]}),
        ]
    ),
    Case("Col2Im", [(2, 6, 9), np.array([4, 5]), np.array([2, 3])], note="sizes at run time"),
]
