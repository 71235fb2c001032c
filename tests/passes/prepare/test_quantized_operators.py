"""Operators on integers, straight through: onnxruntime's values, and gradients of PyTorch's fake quantization."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.quantized_operators import write_out_quantized
from tests.facts import raises

MS = "com.microsoft"
RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (2, 3, 6, 6)).astype(np.float32)
W = RNG.integers(-90, 90, (4, 3, 3, 3)).astype(np.int8)
W_SCALES = np.float32([0.003, 0.004, 0.002, 0.005])
B = RNG.integers(-500, 500, 4).astype(np.int32)
G = RNG.integers(-90, 90, (5, 8)).astype(np.int8)
C = RNG.integers(-500, 500, 5).astype(np.int32)
STEPS = {"x": (1 / 100, 128), "c": (0.03, 120), "s": (1 / 256, 0), "m": (0.02, 60), "a": (0.04, 90), "l": (0.03, 40),
         "k": (0.04, 80), "p": (0.02, 70), "y": (0.02, 128)}  # fmt: skip
"""Of each value between two operators: its scale and zero point."""


def call(op_type: str, inputs: Sequence[str], output: str, domain: str = MS, **attributes: object) -> NodeProto:
    """A node; 'q' stands for a quantized value with its scale and zero point, '.q' for scale and zero point alone."""
    names: list[str] = []
    for name in inputs:
        values = [] if name.startswith(".") else [f"{name}_q" if name in STEPS else name]
        stem = name.removeprefix(".")
        names += values + ([f"{stem}_scale", f"{stem}_zero"] if stem in STEPS or stem in "WG" else [])
    return helper.make_node(op_type, names, [output], domain=domain, **attributes)


def model() -> ModelProto:
    """A small network as onnxruntime's quantizer writes one, with every operator that is known."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        call("QLinearConv", ["x", "W", ".c", "B"], "c_q", "", pads=[1, 1, 1, 1]),
        call("QLinearSigmoid", ["c", ".s"], "s_q"),
        call("QLinearMul", ["c", "s", ".m"], "m_q"),
        call("QLinearAdd", ["m", "c", ".a"], "a_q"),
        call("QLinearLeakyRelu", ["a", ".l"], "l_q", alpha=0.1),
        call("QLinearConcat", [".k", "l", "m"], "k_q", axis=1),
        call("QLinearGlobalAveragePool", ["k", ".p"], "p_q", channels_last=0),
        helper.make_node("Flatten", ["p_q"], ["f_q"]),
        call("QGemm", ["f_q", ".p", "G", "C", ".y"], "y_q", transB=1),
        helper.make_node("DequantizeLinear", ["y_q", "y_scale", "y_zero"], ["y"]),
    ]
    stored = {"W": W, "W_scale": W_SCALES, "W_zero": np.zeros(4, np.int8), "B": B, "G": G, "C": C,
              "G_scale": np.float32(0.01), "G_zero": np.int8(0)}  # fmt: skip
    for name, (scale, zero) in STEPS.items():
        stored |= {f"{name}_scale": np.float32(scale), f"{name}_zero": np.uint8(zero)}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in stored.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def fake(name: str, value: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(value, *STEPS[name], 0, 255)


def twin(w: Tensor, b: Tensor, g: Tensor, c: Tensor) -> Tensor:
    x = fake("x", torch.tensor(X))
    weight = torch.fake_quantize_per_channel_affine(
        w, torch.tensor(W_SCALES), torch.zeros(4, dtype=torch.int32), 0, -128, 127
    )
    conv = fake("c", F.conv2d(x, weight, b, padding=1))
    product = fake("m", conv * fake("s", torch.sigmoid(conv)))
    leaky = fake("l", F.leaky_relu(fake("a", product + conv), 0.1))
    pooled = fake("p", fake("k", torch.cat([leaky, product], 1)).mean((2, 3)))
    return fake("y", F.linear(pooled, torch.fake_quantize_per_tensor_affine(g, 0.01, 0, -128, 127), c))


def test_a_network_of_operators_on_integers(tmp_path: Path) -> None:
    options = Options(quantization="ste", label="t", keep_outputs=True)
    report = run_build(model(), tmp_path / "t.onnx", options)
    assert report.status == "built"
    trained = onnx.load(tmp_path / "t.onnx")
    assert {node.domain for node in trained.graph.node} <= {"", "ai.onnx"}
    target = RNG.normal(size=(2, 5)).astype(np.float32)
    found = Executor(trained, fallback=False)({"x": X, "t": target})
    np.testing.assert_allclose(found["y"], Executor(model(), fallback=False)({"x": X})["y"], atol=1e-6)
    weights = [
        W * W_SCALES.reshape(4, 1, 1, 1), B * (W_SCALES * np.float32(0.01)), G * np.float32(0.01), C * np.float32(2e-4),
    ]  # fmt: skip
    w, b, g, c = (torch.tensor(values, dtype=torch.float32, requires_grad=True) for values in weights)
    F.mse_loss(twin(w, b, g, c), torch.tensor(target)).backward()
    gradients = {value.shape: value for name, value in found.items() if name.endswith("_grad")}
    assert len(gradients) == 4
    for each in (w, b, g, c):
        np.testing.assert_allclose(gradients[tuple(each.shape)], each.grad, rtol=1e-3, atol=1e-5)


def test_matmul(tmp_path: Path) -> None:
    """Of two matrices on integers."""
    whole = model()
    del whole.graph.node[1:-1]
    whole.graph.node.insert(1, helper.make_node("Flatten", ["x_q"], ["f_q"]))
    whole.graph.node.insert(2, call("QLinearMatMul", ["f_q", ".x", "G", ".y"], "y_q", ""))
    values = RNG.integers(-20, 20, (108, 5)).astype(np.int8)
    next(t for t in whole.graph.initializer if t.name == "G").CopyFrom(numpy_helper.from_array(values, "G"))
    report = run_build(whole, tmp_path / "t.onnx", Options(quantization="ste", label="t", keep_outputs=True))
    assert report.status == "built"
    target = RNG.normal(size=(2, 5)).astype(np.float32)
    found = Executor(onnx.load(tmp_path / "t.onnx"), fallback=False)({"x": X, "t": target})
    w = torch.tensor(values * np.float32(0.01), requires_grad=True)
    flat = fake("x", torch.tensor(X)).flatten(1)
    y = fake("y", flat @ torch.fake_quantize_per_tensor_affine(w, 0.01, 0, -128, 127))
    F.mse_loss(y, torch.tensor(target)).backward()
    (gradient,) = [value for name, value in found.items() if name.endswith("_grad")]
    np.testing.assert_allclose(found["y"], y.detach(), atol=1e-6)
    np.testing.assert_allclose(gradient, w.grad, rtol=1e-4, atol=1e-6)


def dynamic(scale: str) -> ModelProto:
    """tanh(x V) by W, whose integers are multiplied with those of data that are quantized as they come."""
    head = '<ir_version: 9, opset_import: ["": 17]> g (float[n, 6] x) => (float[n, 5] y)'
    found = onnx.parser.parse_model(f"""{head} {{
        u = MatMul(x, V)  h = Tanh(u)
        q, s, z = DynamicQuantizeLinear(h)
        p = MatMulInteger(q, w_quantized, z, w_zero)
        c = Cast <to = 1> (p)
        {scale}
    }}""")
    stored = {"V": V, "w_quantized": G[:, :4].T.copy(), "w_zero": np.int8(2), "w_scale": np.float32(0.02)}
    for name, values in stored.items():
        found.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    return found


V = RNG.normal(size=(6, 4)).astype(np.float32)


def twin_of_dynamic(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The scale of the data with its derivative, rounding without."""
    h = torch.tanh(x @ v)
    s = (h.max().clamp(min=0) - h.min().clamp(max=0)) / 255
    steps = h / s
    zero = torch.round(-h.min().clamp(max=0) / s).detach()
    rounded = steps + (torch.round(steps + 0).detach() - steps.detach())
    assert ((rounded + zero).round() >= 0).all()
    return (rounded * s) @ torch.fake_quantize_per_tensor_affine(w, 0.02, 2, -128, 127)


@pytest.mark.parametrize(
    ("scale", "steps"), [("f = Mul(s, w_scale)  y = Mul(c, f)", 1.0), ("f = Mul(c, s)  y = Mul(f, w_scale)", 0.02)]
)
def test_what_is_quantized_as_it_comes(scale: str, steps: float, tmp_path: Path) -> None:
    given = dynamic(scale)
    options = Options(quantization="ste", label="t", keep_outputs=True)
    assert run_build(given, tmp_path / "t.onnx", options).status == "built"
    x, target = RNG.normal(size=(7, 6)).astype(np.float32), RNG.normal(size=(7, 5)).astype(np.float32)
    found = Executor(onnx.load(tmp_path / "t.onnx"), fallback=False)({"x": x, "t": target})
    np.testing.assert_allclose(found["y"], Executor(given, fallback=False)({"x": x})["y"], atol=1e-5)
    v = torch.tensor(V, requires_grad=True)
    w = torch.tensor((G[:, :4].T.astype(np.float32) - 2) * np.float32(0.02), requires_grad=True)
    F.mse_loss(twin_of_dynamic(torch.tensor(x), v, w), torch.tensor(target)).backward()
    gradients = {value.shape: value for name, value in found.items() if name.endswith("_grad")}
    np.testing.assert_allclose(gradients[6, 4], v.grad, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(gradients[4, 5], w.grad * steps, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("zero", [np.int8(0), np.int8([3, -2, 0, 1, 5])])
@pytest.mark.parametrize("scale", [np.float32(0.02), np.float32([0.02, 0.01, 0.03, 0.005, 0.015])])
def test_scales_and_zero_points_of_columns(scale: np.ndarray, zero: np.ndarray, tmp_path: Path) -> None:
    """onnxruntime's `quantize_dynamic(per_channel=True)` writes a vector of each, zeros too."""
    given = dynamic("f = Mul(s, w_scale)  y = Mul(c, f)")
    for tensor in given.graph.initializer:
        if tensor.name in ("w_scale", "w_zero"):
            tensor.CopyFrom(
                numpy_helper.from_array(np.asarray(scale if tensor.name == "w_scale" else zero), tensor.name)
            )
    options = Options(quantization="ste", label="t", keep_outputs=True)
    assert run_build(given, tmp_path / "t.onnx", options).status == "built"
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(7, 6)).astype(np.float32), rng.normal(size=(7, 5)).astype(np.float32)
    found = Executor(onnx.load(tmp_path / "t.onnx"), fallback=False)({"x": x, "t": target})
    np.testing.assert_allclose(found["y"], Executor(given, fallback=False)({"x": x})["y"], atol=1e-5)
    w = torch.tensor((G[:, :4].T.astype(np.float32) - zero) * scale, requires_grad=True)
    h = torch.tanh(torch.tensor(x @ V))
    s = (h.max() - h.min()) / 255
    zero_of_data = torch.round(-h.min() / s)
    data = ((torch.round(h / s) + zero_of_data).clamp(0, 255) - zero_of_data) * s
    F.mse_loss(data @ w, torch.tensor(target)).backward()
    gradients = {value.shape: value for name, value in found.items() if name.endswith("_grad")}
    np.testing.assert_allclose(gradients[4, 5], w.grad, rtol=1e-3, atol=1e-5)


def test_without_the_estimator_they_are_refused_by_name() -> None:
    with raises(
        UnsupportedError,
        "refused",
        "QLinearConv_c_q",
        "ai.onnx::QLinearConv",
        "QLinearSigmoid_s_q",
        "com.microsoft::QLinearSigmoid",
        "QLinearMul_m_q",
        "com.microsoft::QLinearMul",
        "QLinearAdd_a_q",
        "com.microsoft::QLinearAdd",
        "QLinearLeakyRelu_l_q",
        "com.microsoft::QLinearLeakyRelu",
        "QLinearConcat_k_q",
        "com.microsoft::QLinearConcat",
        "QLinearGlobalAveragePool_p_q",
        "com.microsoft::QLinearGlobalAveragePool",
        "QGemm_y_q",
        "com.microsoft::QGemm",
    ) as error:
        build(model(), Options())
    assert all("`quantization='ste'`" in refusal.hint for refusal in error.value.refusals)


def test_a_bias_that_is_rounded_before_it_is_added_stays_exact() -> None:
    """As old tools of onnxruntime write it: the bias is added to the product of integers."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (uint8[n, 4] a) => (float[n, 3] y) <float s = {0.5}, float[3] b = {1.3, -2.6, 7}> {
            q = Div(b, s) r = Floor(q) c = Cast<to = 6>(r)
            p = MatMulInteger(a, w) t = Add(p, c) y = Cast<to = 1>(t)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(-6, 6, dtype=np.int8).reshape(4, 3), "w"))
    feeds = {"a": np.arange(8, dtype=np.uint8).reshape(2, 4)}
    expected = Executor(model, fallback=False)(feeds)["y"]
    graph = Graph(model)
    normalise(graph)
    write_out_quantized(graph)
    assert not {"MatMulInteger", "ConvInteger"} & {node.op_type for node in graph.nodes}
    assert len(graph.held) == 1
    np.testing.assert_array_equal(Executor(graph.commit(), fallback=False)(feeds)["y"], expected)
