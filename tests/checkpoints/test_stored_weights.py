"""Weights return into the model that they came from."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import parser

from onnxgrad_cli.checkpoints.stored_weights import with_weights


def test_a_copy_that_becomes_a_weight_of_its_own_in_an_old_file() -> None:
    """Before IR version 4 an initializer must be an input too."""
    model = parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        g (float[n, 2] x, float[2] m) => (float[n, 2] y) <float[2] m = {1, 2}>
        { k = Identity(m) a = Add(x, m) y = Add(a, k) }""")
    trained = with_weights(model, {"k": np.array([10, 20], np.float32)}, {})
    onnx.checker.check_model(trained)
    session = onnxruntime.InferenceSession(trained.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": np.zeros((1, 2), np.float32)})[0], [[11, 22]])
