"""Rows of onnxgrad_cli/autodiff/rules/pool.py."""

import numpy as np

from tests.harness import Case, const

K2, K3 = {"kernel_shape": [2, 2]}, {"kernel_shape": [3, 3]}


def distinct(*shape):
    """Values far apart, in random order: a step of the check meets no tie."""
    values = np.random.default_rng(1).permutation(int(np.prod(shape))).astype(np.float64)
    return 0.5 + values.reshape(shape) / values.size


WINDOWS = [
    ((2, 3, 7), {"kernel_shape": [3], "strides": [2]}),
    ((2, 3, 6), {"kernel_shape": [2], "strides": [2], "pads": [0, 1]}),
    ((2, 2, 4, 6), {**K2, "strides": [2, 2]}),
    ((2, 2, 5, 6), {**K2, "strides": [2, 3]}),
    ((2, 2, 5, 6), {**K3, "pads": [1, 0, 0, 1]}),
    ((1, 2, 6, 7), {**K3, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 2, 6, 6), {**K3, "strides": [2, 2], "ceil_mode": 1}),
    ((1, 2, 6, 6), {**K3, "strides": [2, 2], "ceil_mode": 1, "pads": [0, 1, 0, 0]}),
    ((1, 2, 5, 6), {**K3, "auto_pad": "SAME_UPPER"}),
    ((1, 2, 5, 6), {**K2, "auto_pad": "SAME_LOWER"}),
    ((1, 2, 5, 6), {**K2, "auto_pad": "VALID", "strides": [2, 1]}),
    ((1, 2, 4, 3, 4), {"kernel_shape": [2, 2, 3], "strides": [2, 1, 1], "pads": [0, 1, 0, 0, 0, 1]}),
]
BEYOND = ((1, 2, 6, 5), {**K2, "strides": [3, 2], "ceil_mode": 1, "pads": [0, 1, 0, 1]})
"""Windows of which one would start in the end's padding: it is dropped, but type inference knows that from 22 on."""
STRIDED_SAME = ((1, 2, 5, 6), {**K3, "auto_pad": "SAME_UPPER", "strides": [2, 2]})
DILATED = [
    ((1, 2, 7), {"kernel_shape": [2], "dilations": [3]}),
    ((1, 2, 7, 6), {**K2, "dilations": [2, 3], "strides": [2, 1], "pads": [1, 0, 1, 0]}),
]

ROWS = [
    *(Case("MaxPool", [distinct(*s)], a, opset=16) for s, a in [*WINDOWS, STRIDED_SAME, *DILATED]),
    *(Case("MaxPool", [distinct(1, 2, 4, 5)], K2, opset=opset) for opset in (18, 22)),
    Case("MaxPool", [distinct(1, 2, 4, 5)], {**K2, "storage_order": 1}, outputs=2),
    Case("MaxPool", [distinct(1, 2, 4, 5)], K2, outputs=2),
    Case("MaxPool", [distinct(1, 2, 4, 4)], {**K2, "strides": [2, 2]}, outputs=2),
    Case("MaxUnpool", [(1, 1, 2, 2), np.array([[[[5, 2], [8, 11]]]])], {**K2, "strides": [2, 2]}),
    Case("MaxUnpool", [(1, 1, 2, 2), np.array([[[[5, 2], [8, 11]]]])], {**K2, "strides": [2, 2]}, opset=13),
    *(Case("AveragePool", [s], a) for s, a in WINDOWS),
    *(Case("AveragePool", [s], {**a, "count_include_pad": 1}) for s, a in WINDOWS if "pads" in a),
    *(Case("AveragePool", [STRIDED_SAME[0]], {**STRIDED_SAME[1], "count_include_pad": i}) for i in (0, 1)),
    *(Case("AveragePool", [s], {**a, "count_include_pad": i}, opset=19) for s, a in DILATED for i in (0, 1)),
    *(Case("AveragePool", [(1, 2, 4, 5)], K2, opset=opset) for opset in (13, 19, 22)),
    *(
        Case(op, [s], opset=o)
        for op in ("GlobalAveragePool", "GlobalMaxPool")
        for s in [(2, 3, 4, 5)]
        for o in (13, 22)
    ),
    *(Case(op, [s]) for op in ("GlobalAveragePool", "GlobalMaxPool") for s in [(2, 3, 5), (1, 2, 2, 3, 2)]),
    *(Case(op, [distinct(*BEYOND[0])], BEYOND[1], opset=22) for op in ("MaxPool", "AveragePool")),
    Case("LpPool", [distinct(*STRIDED_SAME[0])], STRIDED_SAME[1]),
    *(Case("LpPool", [distinct(*s)], {**a, "p": p}) for s, a in WINDOWS[:6] for p in (1, 2, 3)),
    *(Case("LpPool", [distinct(*s)], {**a, "p": 3}) for s, a in WINDOWS[6:]),
    *(Case("LpPool", [distinct(*s)], a) for s, a in DILATED),
    *(Case("LpPool", [(1, 2, 6, 6)], {**K3, "strides": [2, 2], "ceil_mode": 1}, opset=o) for o in (18, 22)),
    Case("LpPool", [distinct(*BEYOND[0])], BEYOND[1], opset=22),
    *(Case("LpPool", [(1, 2, 4, 5)], K2, opset=opset) for opset in (13, 18)),
    *(Case("GlobalLpPool", [(2, 3, 4, 5)], {"p": p}, opset=o) for p in (1, 2, 3) for o in (13, 22)),
    Case("GlobalLpPool", [(2, 3, 4)]),
    Case("GlobalLpPool", [(1, 2, 2, 3, 2)], {"p": 4}),
    Case("MaxUnpool", [(1, 1, 2, 2), np.array([[[[4, 4], [4, 1]]]])], K2, note="overlapping windows: the last stays"),
    Case("MaxUnpool", [(1, 1, 2, 2), const([[[[5, 5], [8, 5]]]])], {**K2, "strides": [2, 2]}, note="the last stays"),
    Case(
        "MaxUnpool",
        [(1, 1, 2, 2), np.array([[[[5, 2], [8, 11]]]]), const([1, 1, 4, 4])],
        {**K2, "strides": [2, 2]},
        symbolic=False,
    ),
    Case(
        "MaxUnpool",
        [(1, 2, 3), np.array([[[1, 3, 4], [7, 8, 10]]])],
        {"kernel_shape": [3], "strides": [3], "pads": [2, 1]},
        opset=22,
    ),
    Case(
        "MaxPool",
        [distinct(1, 2, 5, 6, 4)],
        {"kernel_shape": [2, 3, 2], "dilations": [2, 2, 3], "storage_order": 1, "pads": [1, 0, 0, 0, 1, 1]},
    ),
]
