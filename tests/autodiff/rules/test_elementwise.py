"""Elementwise rules inside whole models: what one-node rows can't show."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.options import Options
from tests.harness import with_gradient


@pytest.mark.parametrize("divisor", [30.0, 3.0, -0.1, 4.0])
def test_a_gradient_behind_a_constant_divisor_is_rounded_once(divisor: float) -> None:
    """The inverse of 30 in float16 is off by 2.4e-4, and with it would be every gradient before the division."""
    d = np.array(divisor, np.float16)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, [64])
    node = helper.make_node("Div", ["x", "d"], ["y"], name="node")
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(d, "d")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    seed = np.linspace(0.5, 2, 64).astype(np.float16)
    run = Executor(with_gradient(model, ["x"], ["y"], "g_"), fallback=False)
    np.testing.assert_array_equal(run({"x": seed, "g_y": seed})["g_grad_x"], seed / d)


def test_a_trained_exponent_is_no_constant() -> None:
    x, p, y = np.array([1.5, 2.0]), np.array([2.0]), np.array([1.0, 1.0])
    graph = helper.make_graph(
        [helper.make_node("Mul", ["w", "x"], ["z"]), helper.make_node("Pow", ["z", "p"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, [2])],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, [2])],
        [numpy_helper.from_array(p, "p"), numpy_helper.from_array(np.array([1.0, 1.0]), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(build(model, Options(train=("p", "w"))).model.SerializeToString())
    for exponent in (2.0, 3.0):
        wanted = ["p_grad", "w_grad"]
        p_grad, w_grad = session.run(wanted, {"x": x, "label": y, "p": np.array([exponent])})
        rest = x**exponent - y
        np.testing.assert_allclose(p_grad, [np.sum(rest * x**exponent * np.log(x))])
        np.testing.assert_allclose(w_grad, rest * exponent * x**exponent)
