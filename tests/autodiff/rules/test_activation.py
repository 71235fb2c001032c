"""Activation functions at their kinks, at zero of either sign and far out, against PyTorch's autograd."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from torch.nn import functional

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.options import Options
from tests.autodiff.rules.test_norm import gradients
from tests.facts import raises
from tests.harness import Case, const, forward_model, with_gradient

POINTS = [-200.0, -90.0, -3.0, -1.5, -1.0, -0.5, -1e-30, -0.0, 0.0, 1e-30, 0.5, 1.0, 1.5, 3.0, 90.0, 200.0]

CASES = [
    ("Relu", {}, functional.relu, 17),
    ("LeakyRelu", {"alpha": 0.1}, lambda x: functional.leaky_relu(x, 0.1), 17),
    ("LeakyRelu", {"alpha": -7.0}, lambda x: functional.leaky_relu(x, -7.0), 17),
    ("Elu", {"alpha": 1.5}, lambda x: functional.elu(x, 1.5), 17),
    ("Selu", {}, functional.selu, 17),
    ("Celu", {"alpha": 1.5}, lambda x: functional.celu(x, 1.5), 17),
    ("ThresholdedRelu", {"alpha": 0.5}, lambda x: functional.threshold(x, 0.5, 0.0), 17),
    ("Shrink", {"lambd": 0.5}, functional.hardshrink, 17),
    ("Shrink", {"lambd": 0.5, "bias": 0.5}, functional.softshrink, 17),
    ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}, functional.hardsigmoid, 17),
    ("HardSwish", {}, functional.hardswish, 17),
    ("Softplus", {}, lambda x: functional.softplus(x, threshold=1e9), 17),
    ("Softsign", {}, functional.softsign, 17),
    ("Sigmoid", {}, torch.sigmoid, 17),
    ("Tanh", {}, torch.tanh, 17),
    ("Gelu", {"approximate": "none"}, functional.gelu, 20),
    ("Gelu", {"approximate": "tanh"}, lambda x: functional.gelu(x, approximate="tanh"), 20),
    ("Mish", {}, lambda x: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x))), 18),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("op", "attributes", "function", "opset"), CASES, ids=lambda v: str(v) if isinstance(v, str) else ""
)
def test_kinks_and_far_values(op, attributes, function, opset, dtype):
    if op == "Celu" and dtype == np.float16:
        pytest.skip("Celu knows float32 only")
    x = np.asarray(POINTS, dtype)
    (gradient,), seeds = gradients(op, [x], attributes, opset=opset)
    leaf = torch.tensor(x.astype(np.float64), requires_grad=True)
    function(leaf).backward(torch.tensor(seeds[0].astype(np.float64)))
    tolerance = 2e-6 if dtype == np.float32 else 4e-3
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=tolerance, atol=tolerance)


def test_the_tanh_gelu_does_not_overflow_in_half_precision():
    x = np.array([-60000.0, -300.0, -20.0, 20.0, 300.0, 60000.0], np.float16)
    case = Case("Gelu", [x], {"approximate": "tanh"}, opset=20)
    model = with_gradient(forward_model(case, symbolic=False), ["x0"], ["y0"], "g_")
    run = Executor(model, prefer="reference")  # onnxruntime computes it in float32 on a CPU
    np.testing.assert_array_equal(run({"x0": x, "g_y0": np.ones_like(x)})["g_grad_x0"], [0, 0, 0, 1, 1, 1])


def test_prelu_at_zero():
    x = np.array([-2.0, -0.0, 0.0, 3.0], np.float32)
    slope = np.array([0.25, -3.0, 4.0, 1e8], np.float32)
    found, seeds = gradients("PRelu", [x, slope], {}, opset=17)
    leaves = [torch.tensor(v.astype(np.float64), requires_grad=True) for v in (x, slope)]
    torch.where(leaves[0] > 0, leaves[0], leaves[0] * leaves[1]).backward(torch.tensor(seeds[0]).double())
    for value, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(value, leaf.grad.numpy(), rtol=1e-6)


def test_softmax_of_large_logits():
    x = np.array([[1000.0, 999.0, -1000.0], [0.0, -88.0, 88.0]], np.float32)
    for op, function in (("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)):
        (gradient,), seeds = gradients(op, [x], {"axis": -1}, opset=17)
        leaf = torch.tensor(x.astype(np.float64), requires_grad=True)
        function(leaf, -1).backward(torch.tensor(seeds[0]).double())
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_dropout_in_training_without_its_mask_is_refused():
    node = helper.make_node("Dropout", ["x", "", "on"], ["y"], name="drop")
    graph = helper.make_graph(
        [node], "drop", [helper.make_tensor_value_info("x", 1, [4])], [helper.make_tensor_value_info("y", 1, [4])],
        [helper.make_tensor("on", TensorProto.BOOL, [], [True])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    with raises(UnsupportedError, "refused", "drop", "Dropout"):
        with_gradient(model, ["x"], ["y"], "g_")


@pytest.mark.parametrize("between", [[], ["Cast", "Identity"]])
def test_a_softmax_row_that_is_masked_throughout_and_replaced_has_no_gradient(between):
    """The row is 0/0 in the forward pass, which the model mends; its gradient must not be nan either."""
    nodes = [helper.make_node("Add", ["x", "mask"], ["masked"]), helper.make_node("Softmax", ["masked"], ["p"])]
    for kind in between:
        attrs = {"to": TensorProto.FLOAT} if kind == "Cast" else {}
        nodes.append(helper.make_node(kind, [nodes[-1].output[0]], [f"p_{kind}"], **attrs))
    nodes.append(helper.make_node("IsNaN", [nodes[-1].output[0]], ["broken"]))
    nodes.append(helper.make_node("Where", ["broken", "zero", nodes[-2].output[0]], ["y"]))
    mask = np.array([[0, -np.inf, 0, 0], [-np.inf] * 4, [0] * 4], np.float32)
    graph = helper.make_graph(
        nodes, "masked", *([helper.make_tensor_value_info(name, 1, [3, 4])] for name in "xy"),
        [numpy_helper.from_array(mask, "mask"), numpy_helper.from_array(np.zeros((), np.float32), "zero")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    x, seed = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    found = Executor(with_gradient(model, ["x"], ["y"], "g_"))({"x": x, "g_y": seed})["g_grad_x"]
    leaf = torch.tensor(x[[0, 2]], requires_grad=True)
    torch.softmax(leaf + torch.tensor(mask[[0, 2]]), -1).backward(torch.tensor(seed[[0, 2]]))
    np.testing.assert_allclose(found[[0, 2]], leaf.grad.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], 0)


def test_the_ratio_of_a_dropout_in_training_is_refused():
    """Also without a mask, and when the data are no business of ours."""
    for outputs in (["y"], ["y", "mask"]):
        case = Case("Dropout", [const(np.ones(4), np.float64), np.array(0.5), const(True, bool)], outputs=len(outputs))
        with pytest.raises(UnsupportedError, match="Dropout"):
            with_gradient(forward_model(case, False), ["x1"], ["y0"], "g_")


@pytest.mark.parametrize(("x", "slope"), [((3, 1), (4,)), ((3,), (2, 3)), ((2, 1, 5), (4, 1))])
def test_a_slope_that_is_larger_than_its_input_is_refused(x, slope):
    model = forward_model(Case("PRelu", [x, slope], opset=16), symbolic=False)
    with raises(UnsupportedError, "refused", "node", "PRelu"):
        with_gradient(model, ["x1"], ["y0"], "g_")


def test_a_slope_along_an_axis_of_any_size_that_is_1_at_run_time():
    """onnxruntime makes 3 of the axis, against the standard; the product is as wide, and x_grad is not."""
    model = parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        wide (float[batch, n] x) => (float[batch, m] y)
        <float[3] s = {0.1, 0.2, 0.3}> { p = PRelu(x, s) y = Mul(p, x) }
        """
    )
    built = build(model, Options(label="t", grad_of_input=("x",))).model
    run = Executor(built, prefer="reference")  # onnxruntime may reuse a buffer of [batch, n], and then refuses the size
    x = np.array([[-0.3], [-1.0]], np.float32)
    found = run({"x": x, "t": np.zeros((2, 3), np.float32)})
    squares = np.square(np.array([0.1, 0.2, 0.3]))  # the loss is the mean of (s x^2)^2
    np.testing.assert_allclose(found["x_grad"], 4 * x**3 * np.sum(squares) / 6, rtol=1e-5)
