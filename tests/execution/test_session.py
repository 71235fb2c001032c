"""Sessions compute what a model says where onnxruntime's optimizer would not."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

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


@pytest.mark.parametrize("columns", [30, 32])
@pytest.mark.parametrize("kind", [TensorProto.INT2, TensorProto.UINT2])
def test_a_product_with_a_matrix_of_two_bits_is_right(kind: int, columns: int) -> None:
    """onnxruntime 1.32 packs it wrongly above the level BASIC where the columns are no multiple of four."""
    rng = np.random.default_rng(0)
    integers = rng.integers(-2 if kind == TensorProto.INT2 else 0, 2, (64, columns)).astype(np.int8)
    scales, x = rng.uniform(0.5, 1, (4, columns)).astype(np.float32), rng.normal(size=(5, 64)).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=16),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    stored = [helper.make_tensor("q", kind, integers.shape, integers.ravel()), numpy_helper.from_array(scales, "s")]
    x_info, y_info = (helper.make_tensor_value_info(n, 1, ["n", size]) for n, size in (("x", 64), ("y", columns)))
    graph = helper.make_graph(nodes, "net", [x_info], [y_info], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    expected = x @ (integers * np.repeat(scales, 16, 0))
    np.testing.assert_allclose(Executor(model, fallback=False)({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)
