"""Sessions compute what a model says where onnxruntime's optimizer would not."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from onnxgrad_cli.execution.executor import Executor

X = np.array([-3, -1, 0.4, 2, 9], np.float32)


@pytest.mark.parametrize("held", ["initializer", "constant"])
@pytest.mark.parametrize(("kind", "zero"), [("int4", 0), ("uint4", 3), ("int8", 0)])
def test_relu_before_a_quantizer_of_few_bits_stays(kind: str, zero: int, held: str) -> None:
    """onnxruntime 1.32 leaves it out above the level BASIC, whatever the zero point is."""
    stored = f", {kind} z = {{{zero}}}" if held == "initializer" else ""
    node = "" if held == "initializer" else f"z = Constant <value = {kind} {{{zero}}}> ()"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[5] x) => (float[5] y) <float s = {{0.5}}{stored}> {{
        {node}
        r = Relu(x)
        q = QuantizeLinear(r, s, z)
        y = DequantizeLinear(q, s, z) }}""")
    greatest = {"int4": 3.5, "uint4": 6, "int8": 9}[kind]
    np.testing.assert_array_equal(Executor(model, fallback=False)({"x": X})["y"], np.array([0, 0, 0.5, 2, greatest]))
