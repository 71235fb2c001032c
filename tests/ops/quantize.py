"""Rows of onnxgrad_cli/rules/quantize.py."""

import numpy as np

from tests.harness import Case

X = np.array([[[-7, 3], [5, 100], [-128, 0]], [[1, 2], [3, 4], [5, 6]]], np.int8)
ZERO = np.array([-3, 0, 9], np.int8)
FLOAT32 = {"step": 1e-2, "tolerance": 1e-4, "second_order": False, "note": "float32 scales; linear, so no second order"}

ROWS = [
    Case("DequantizeLinear", [X, np.float32(0.5)], opset=13, **FLOAT32),
    Case("DequantizeLinear", [X, np.float32(0.5), np.int8(3)], opset=21, **FLOAT32),
    Case("DequantizeLinear", [X, np.array([0.5, 0.25, 2.0], np.float32), ZERO], {"axis": 1}, opset=13, **FLOAT32),
    Case("DequantizeLinear", [X, np.array([0.5, 0.25, 2.0], np.float32)], {"axis": -2}, opset=19, **FLOAT32),
    Case("DequantizeLinear", [X, np.array([0.5, 0.25, 2.0], np.float32), ZERO], {"axis": 1}, opset=23, **FLOAT32),
]
