"""Rows of the rules in quantize.py; what goes through a pair is in tests/autodiff/rules/test_quantize.py."""

import ml_dtypes
import numpy as np

from tests.harness import Case, const

X = np.array([[[-7, 3], [5, 100], [-128, 0]], [[1, 2], [3, 4], [5, 6]]], np.int8)
ZERO = np.array([-3, 0, 9], np.int8)
FLOAT32 = {"step": 0.1, "tolerance": 1e-4, "note": "in float32"}
LINEAR = {"step": 1e-2, "tolerance": 1e-3, "note": "in float32"}
KINDS = ("int4", "uint4", "int2", "uint2", "float8_e4m3fn", "float8_e5m2")


def scales(*shape: int) -> np.ndarray:
    return np.resize(np.array([0.5, 0.25, 2.0, 1.5, 0.125], np.float32), shape)


ROWS = [
    *(
        Case("DynamicQuantizeLinear", [(X * sign / 7 + 1).astype(np.float32)], outputs=3, opset=opset, **LINEAR)
        for opset, sign in ((13, 1), (21, -1))
    ),
    *(
        Case("DynamicQuantizeLinear", [np.array(x, np.float32)], outputs=3, **LINEAR)
        for x in ([3.0, 1.0, 2.0], [-1.0, -4.0], [1.0, -1.5, 0.5])
    ),
    Case("DequantizeLinear", [X, np.float32(0.5)], opset=13, **FLOAT32),
    *(Case("DequantizeLinear", [X, np.float32(0.5), np.int8(3)], opset=o, **FLOAT32) for o in (19, 21, 23, 24, 25, 28)),
    Case("DequantizeLinear", [X, scales(1), ZERO[:1]], opset=21, **FLOAT32),
    *(
        Case("DequantizeLinear", [X, scales(X.shape[axis]), *zero], {"axis": axis}, opset=opset, **FLOAT32)
        for axis, zero in ((0, []), (1, [ZERO]), (2, []), (-1, []), (-2, [ZERO]), (-3, [ZERO[:2]]))
        for opset in (13, 19, 25)
    ),
    Case("DequantizeLinear", [X[0, 0], scales(2), ZERO[:2]], {"axis": 0}, opset=23, **FLOAT32),
    Case("DequantizeLinear", [X.astype(np.int32), np.float32(0.5)], opset=13, **FLOAT32),
    *(
        Case("DequantizeLinear", [X.astype(kind), scales(3), ZERO.astype(kind)], opset=21, **FLOAT32)
        for kind in (np.uint8, np.int16, np.uint16)
    ),
    *(
        Case(
            "DequantizeLinear",
            [X, scales(*shape), *([np.resize(ZERO, shape)] if zero else [])],
            {"axis": axis, "block_size": size},
            opset=opset,
            **FLOAT32,
        )
        for opset in (21, 25)
        for axis, size, shape in ((1, 3, (2, 1, 2)), (1, 2, (2, 2, 2)), (0, 2, (1, 3, 2)), (-1, 1, (2, 3, 2)))
        for zero in (False, True)
    ),
    *(
        Case("DequantizeLinear", [const(values, getattr(ml_dtypes, kind)), *more], attributes, opset=25, **FLOAT32)
        for kind in KINDS
        for values, more, attributes in (
            ([[0, 1, 1], [1, 0, 1]], [np.float32(0.5)], {}),
            (
                [[0, 1, 1], [1, 0, 1]],
                [scales(2), const([0, 0] if "float" in kind else [1, 0], getattr(ml_dtypes, kind))],
                {"axis": 0},
            ),
            ([[0, 1, 1], [1, 0, 1]], [scales(2, 2)], {"block_size": 2}),
        )
    ),
]
