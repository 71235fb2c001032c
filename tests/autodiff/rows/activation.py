"""Rows of onnxgrad_cli/autodiff/rules/activation.py."""

import numpy as np

from tests.harness import Case, const

SMOOTH = "Sigmoid Tanh".split()
SLOPES = [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 1)), ((2, 3, 4), (4,)), ((2, 3, 4), (1,)), ((2, 3), ())]
OFF = np.linspace(-4.3, 4.1, 24).reshape(4, 6)
"""No element on a kink of any function below, on either side of all of them."""

ROWS = [
    *(Case(op, [(3, 4)], opset=opset) for op in SMOOTH for opset in (13, 18)),
    *(Case("Relu", [OFF], opset=opset) for opset in (13, 14)),
    *(
        Case("LeakyRelu", [OFF], attrs, opset=opset)
        for attrs in ({}, {"alpha": 1.5}, {"alpha": -0.3})
        for opset in (13, 16)
    ),
    *(Case("PRelu", shapes, opset=opset) for shapes in SLOPES for opset in (13, 16)),
    *(Case("Elu", [OFF], attrs, opset=opset) for attrs in ({}, {"alpha": 0.4}) for opset in (13, 22)),
    *(Case("Selu", [OFF], attrs, opset=opset) for attrs in ({}, {"alpha": 0.4, "gamma": 2.0}) for opset in (13, 22)),
    *(Case("Celu", [OFF.astype(np.float32)], attrs, step=1e-2, tolerance=1e-3) for attrs in ({}, {"alpha": 0.7})),
    *(Case("Celu", [OFF], attrs, opset=28) for attrs in ({}, {"alpha": 0.7})),
    *(Case("ThresholdedRelu", [OFF], attrs, opset=opset) for attrs in ({}, {"alpha": -0.4}) for opset in (13, 22)),
    *(Case("Shrink", [OFF], attrs, executor="reference") for attrs in ({}, {"bias": 0.2, "lambd": 1.1})),
    *(
        Case("HardSigmoid", [OFF], attrs, opset=opset)
        for attrs in ({}, {"alpha": 0.3, "beta": 0.1})
        for opset in (13, 18, 22)
    ),
    *(Case("HardSwish", [OFF], opset=opset) for opset in (14, 18, 22)),
    *(Case("Softplus", [OFF], opset=opset) for opset in (13, 22)),
    *(Case("Softsign", [OFF], opset=opset) for opset in (13, 22)),
    # float32: onnx.reference takes the erf of a Gelu in float32, and onnxruntime has no kernel for float64
    Case("Gelu", [OFF.astype(np.float32)], {"approximate": "none"}, opset=20, step=1e-2, tolerance=1e-3),
    Case("Gelu", [OFF], {"approximate": "tanh"}, opset=20),
    *(Case("Mish", [OFF], opset=opset) for opset in (18, 22)),
    *(Case("Swish", [OFF], attrs, opset=24) for attrs in ({}, {"alpha": 0.6})),
    *(Case(op, [(2, 3, 4)], {"axis": axis}) for op in ("Softmax", "LogSoftmax") for axis in (-1, 0, 1)),
    *(Case(op, [(3, 4)], opset=13) for op in ("Softmax", "LogSoftmax")),
    *(Case("Dropout", [(3, 4)], opset=opset) for opset in (13, 22)),
    Case("Dropout", [(3, 4), const(0.5, np.float64), const(False, bool)], outputs=2, note="inference"),
    Case("Dropout", [(3, 4), const(0.0, np.float64), const(True, bool)], outputs=2, note="training, keeps all"),
]
