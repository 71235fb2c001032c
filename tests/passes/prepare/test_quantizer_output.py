"""Models as onnxruntime's own quantizer leaves them, straight through: its kernels' values, and PyTorch's gradients.

The gradients are those of the same network in PyTorch, of the weights that the stored integers stand for: these lie on
the steps of their quantizers, so that rounding changes nothing and the estimator is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import ModelProto, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from torch import Tensor

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.options import Options

Array = np.ndarray
Arrays = dict[str, Array]


def numbers(*shape: int, scale: float = 0.5) -> Array:
    return (np.random.default_rng(sum(shape)).normal(size=shape) * scale).astype(np.float32)


def saved(path: Path, text: str, **stored: Array) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in stored.items())
    onnx.save(model, path)
    return path


def trained(path: Path, feeds: Arrays, noise: float) -> tuple[Arrays, Arrays, Array]:
    """What a training model of a file gives: its stored weights, their gradients, and the target.

    Its outputs are those of the file, but for the `noise` of what kernels round.
    """
    options = Options(quantization="ste", label="target", keep_outputs=True)
    assert run_build(onnx.load(path), path.with_suffix(".train.onnx"), options).status == "built"
    model = onnx.load(path.with_suffix(".train.onnx"))
    expected = Executor(onnx.load(path), fallback=False)(feeds)["y"]
    target = numbers(*expected.shape)
    found = Executor(model, fallback=False)({**feeds, "target": target})
    np.testing.assert_allclose(found["y"], expected, atol=noise)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return stored, {name: found[f"{name}_grad"] for name in stored if f"{name}_grad" in found}, target


def compare(gradients: Arrays, twin: Callable[[dict[str, Tensor]], Tensor], weights: Arrays, target: Array) -> None:
    leaves = {name: torch.tensor(values, requires_grad=True) for name, values in weights.items()}
    F.mse_loss(twin(leaves), torch.tensor(target)).backward()
    assert set(gradients) == set(leaves)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        np.testing.assert_allclose(gradients[name], leaf.grad, rtol=2e-4, atol=2e-6, err_msg=name)


def rounded(values: Tensor) -> Tensor:
    """What DynamicQuantizeLinear makes of data: the scale has its derivative, rounding has that of the identity."""
    scale = (values.max().clamp(min=0) - values.min().clamp(max=0)) / 255
    steps = values / scale
    return (steps + (torch.round(steps) - steps).detach()) * scale


# -- recurrent ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("directions", [1, 2])
def test_lstm(directions: int, per_channel: bool, tmp_path: Path) -> None:
    """DynamicQuantizeLSTM also rounds what its weights are multiplied with: by less than a hundredth here."""
    text = f"""lstm (float[t, n, 5] x) => (float[t, {directions}, n, 4] y) {{
        y = LSTM <hidden_size = 4, direction = "{"forward" if directions == 1 else "bidirectional"}"> (x, w, r, b) }}"""
    stored = {"w": numbers(directions, 16, 5), "r": numbers(directions, 16, 4), "b": numbers(directions, 32)}
    source, path = saved(tmp_path / "lstm.onnx", text, **stored), tmp_path / "quantized.onnx"
    quantize_dynamic(source, path, per_channel=per_channel, weight_type=QuantType.QInt8 if per_channel else None)
    assert [node.op_type for node in onnx.load(path).graph.node] == ["DynamicQuantizeLSTM"]
    x = numbers(3, 2, 5, scale=1)
    weights, gradients, target = trained(path, {"x": x}, 1e-2)
    weights = {name: weights[name] for name in gradients}

    def of_direction(found: Tensor, direction: int) -> Tensor:
        """A stored matrix [n, directions 4 m] as PyTorch has it: gates i, f, c, o, and not i, o, f, c."""
        i, o, f, c = found.reshape(found.shape[0], directions, 4, -1)[:, direction].unbind(1)
        return torch.cat([i, f, c, o], 1).T

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        module = torch.nn.LSTM(5, 4, bidirectional=directions == 2)
        parts: dict[str, Tensor] = {}
        for direction, suffix in zip(range(directions), ("", "_reverse"), strict=False):
            for kind, name in (("ih", "w_side_by_side"), ("hh", "r_side_by_side")):
                parts[f"weight_{kind}_l0{suffix}"] = of_direction(leaves[name], direction)
            i, o, f, c = leaves["b"][direction].reshape(2, 4, -1).unbind(1)
            parts[f"bias_ih_l0{suffix}"], parts[f"bias_hh_l0{suffix}"] = torch.cat([i, f, c, o], 1)
        y = torch.func.functional_call(module, parts, (torch.tensor(x),))[0]
        return y.reshape(3, 2, directions, 4).transpose(1, 2)

    compare(gradients, twin, weights, target)


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_channel", [False, True])
def test_products_as_the_optimizer_fuses_them(per_channel: bool, tmp_path: Path) -> None:
    """DynamicQuantizeMatMul of what is fed, and MatMulIntegerToFloat of what two products share."""
    text = """net (float[n, 6] x) => (float[n, 4] y) {
        u = MatMul(x, v)  c = Add(u, b)  h = Tanh(c)  p = MatMul(h, w)  q = MatMul(h, k)  y = Sub(p, q) }"""
    stored = {"v": numbers(6, 5), "b": numbers(5), "w": numbers(5, 4), "k": numbers(5, 4, scale=1)}
    source, path = saved(tmp_path / "net.onnx", text, **stored), tmp_path / "fused.onnx"
    quantize_dynamic(source, tmp_path / "quantized.onnx", per_channel=per_channel)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(path), 3
    onnxruntime.InferenceSession(tmp_path / "quantized.onnx", options)
    ops = {node.op_type for node in onnx.load(path).graph.node}
    assert ops >= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    x = numbers(7, 6, scale=1)
    weights, gradients, target = trained(path, {"x": x}, 1e-5)
    weights = {name: weights[name] for name in gradients}
    bias = next(name for name, values in weights.items() if values.ndim == 1)

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(rounded(torch.tensor(x)) @ leaves["v"] + leaves[bias])
        return rounded(h) @ leaves["w"] - rounded(h) @ leaves["k"]

    compare(gradients, twin, weights, target)


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_channel", [False, True])
def test_embeddings_and_attention(per_channel: bool, tmp_path: Path) -> None:
    """Weights of 7 bits: of 8, sums in the kernel of QAttention overflow on processors without VNNI."""
    text = """net (int32[n, t] ids, int32[n, t] mask) => (float[n, t, 8] y) {
        e, count = com.microsoft.EmbedLayerNormalization <epsilon = 1e-5> (ids, , words, places, , gamma, beta, mask)
        y = com.microsoft.Attention <num_heads = 2> (e, w, b, mask) }"""
    stored = {"words": numbers(11, 8), "places": numbers(7, 8), "gamma": 1 + numbers(8, scale=0.1),
              "beta": numbers(8, scale=0.1), "w": numbers(8, 24), "b": numbers(24)}  # fmt: skip
    source, path = saved(tmp_path / "net.onnx", text, **stored), tmp_path / "quantized.onnx"
    kinds = ["Attention", "EmbedLayerNormalization"]
    quantize_dynamic(source, path, per_channel=per_channel, op_types_to_quantize=kinds, reduce_range=True)
    ops = {node.op_type for node in onnx.load(path).graph.node}
    assert ops >= {"QAttention", "QEmbedLayerNormalization"}
    ids = np.random.default_rng(0).integers(0, 11, (2, 5)).astype(np.int32)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    weights, gradients, target = trained(path, {"ids": ids, "mask": mask}, 1e-4)
    weights = {name: weights[name] for name in gradients}

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        tokens = leaves["words"][torch.tensor(ids)] + leaves["places"][:5]
        e = F.layer_norm(tokens, (8,), leaves["gamma"], leaves["beta"], 1e-5)
        q, k, v = (rounded(e) @ leaves["w"] + leaves["b"]).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        hidden = (1 - torch.tensor(mask).float())[:, None, None] * -10000.0
        y = torch.softmax(q @ k.transpose(2, 3) / 2 + hidden, 3) @ v
        return y.transpose(1, 2).reshape(2, 5, 8)

    compare(gradients, twin, weights, target)


# -- between quantizers ------------------------------------------------------------------------------------------------


class Samples(CalibrationDataReader):
    """Some data to calibrate with."""

    def __init__(self) -> None:
        self._left = [{"x": numbers(4, 6, scale=1) * (1 + i)} for i in range(3)]

    def get_next(self) -> Arrays | None:
        return self._left.pop() if self._left else None


def test_softmax(tmp_path: Path) -> None:
    text = "net (float[n, 6] x) => (float[n, 4] y) { u = MatMul(x, v)  s = Softmax(u)  y = MatMul(s, w) }"
    source = saved(tmp_path / "net.onnx", text, v=numbers(6, 5), w=numbers(5, 4))
    path = tmp_path / "quantized.onnx"
    quantize_static(source, path, Samples(), quant_format=QuantFormat.QOperator)
    model = onnx.load(path)
    assert "QLinearSoftmax" in {node.op_type for node in model.graph.node}
    x = numbers(7, 6, scale=1)
    weights, gradients, target = trained(path, {"x": x}, 1e-6)
    weights = {name: weights[name] for name in gradients}
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}

    def fake(value: Tensor, name: str) -> Tensor:
        scale, zero = float(known[f"{name}_scale"].item()), known[f"{name}_zero_point"]
        limits = np.iinfo(zero.dtype)
        return torch.fake_quantize_per_tensor_affine(value, scale, int(zero.item()), limits.min, limits.max)

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        u = fake(fake(torch.tensor(x), "x") @ leaves["v"], "u")
        return fake(fake(torch.softmax(u, 1), "s") @ leaves["w"], "y")

    compare(gradients, twin, weights, target)


def quantized(text: str, **stored: Array) -> ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]> {text}')
    steps: Arrays = {"s": np.float32(0.02), "t": np.float32(0.01), "z": np.uint8(120), "i": np.int8(0)}  # type: ignore[dict-item]
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in (steps | stored).items())
    return model


@pytest.mark.parametrize(("opset", "axis"), [(12, 1), (12, 2), (13, 1), (17, -1)])
def test_axes_of_softmax(opset: int, axis: int, tmp_path: Path) -> None:
    """Before opset 13 it was one over all axes from the one that it names; the kernel tells by an attribute."""
    model = quantized(f"""net (float[n, 3, 5] x) => (float[n, 3, 5] y) {{
        m = Mul(x, w)  q = QuantizeLinear(m, s, z)
        p = com.microsoft.QLinearSoftmax <axis = {axis}, opset = {opset}> (q, s, z, t, z0)
        y = DequantizeLinear(p, t, z0) }}""", w=numbers(3, 5, scale=1), z0=np.uint8(0))  # fmt: skip
    onnx.save(model, tmp_path / "softmax.onnx")
    x = numbers(2, 3, 5, scale=1)
    weights, gradients, target = trained(tmp_path / "softmax.onnx", {"x": x}, 1e-6)

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        m = torch.fake_quantize_per_tensor_affine(torch.tensor(x) * leaves["w"], 0.02, 120, 0, 255)
        p = m.flatten(axis).softmax(-1).reshape(m.shape) if opset < 13 else m.softmax(axis)
        return torch.fake_quantize_per_tensor_affine(p, 0.01, 0, 0, 255)

    compare(gradients, twin, {"w": weights["w"]}, target)


def test_where_and_a_convolution_of_channels_first(tmp_path: Path) -> None:
    kernel = np.random.default_rng(0).integers(-90, 90, (3, 3, 3, 3)).astype(np.int8)
    shown = np.random.default_rng(1).integers(0, 2, (3, 4, 4)).astype(bool)
    model = quantized("""net (float[n, 3, 4, 4] x) => (float[n, 3, 4, 4] y) {
        q = QuantizeLinear(x, s, z)
        c = com.microsoft.QLinearConv <pads = [1, 1, 1, 1]> (q, s, z, kernel, t, i, s, z)
        p = com.microsoft.QLinearWhere (shown, q, s, z, c, s, z, t, z)
        y = DequantizeLinear(p, t, z) }""", kernel=kernel, shown=shown)  # fmt: skip
    onnx.save(model, tmp_path / "net.onnx")
    x = numbers(2, 3, 4, 4)
    _, gradients, target = trained(tmp_path / "net.onnx", {"x": x}, 1e-6)

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        q = torch.fake_quantize_per_tensor_affine(torch.tensor(x), 0.02, 120, 0, 255)
        c = torch.fake_quantize_per_tensor_affine(F.conv2d(q, leaves["kernel"], padding=1), 0.02, 120, 0, 255)
        return torch.fake_quantize_per_tensor_affine(torch.where(torch.tensor(shown), q, c), 0.01, 120, 0, 255)

    (name,) = gradients
    compare({"kernel": gradients[name]}, twin, {"kernel": kernel * np.float32(0.01)}, target)


def test_an_average_pool(tmp_path: Path) -> None:
    model = quantized("""net (float[n, 3, 5, 5] x) => (float[n, 3, 3, 3] y) {
        m = Mul(x, w)  q = QuantizeLinear(m, s, z)
        p = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2], strides = [2, 2], pads = [1, 0, 0, 1]>
            (q, s, z, r, z)
        y = DequantizeLinear(p, r, z) }""", w=numbers(5, 5, scale=1), r=np.float32(0.013))  # fmt: skip
    onnx.save(model, tmp_path / "pool.onnx")
    x = numbers(2, 3, 5, 5)
    weights, gradients, target = trained(tmp_path / "pool.onnx", {"x": x}, 1e-6)

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        m = torch.fake_quantize_per_tensor_affine(torch.tensor(x) * leaves["w"], 0.02, 120, 0, 255)
        ones = torch.ones_like(m)
        total, count = (F.avg_pool2d(F.pad(each, (0, 1, 1, 0)), 2, 2) for each in (m, ones))
        return torch.fake_quantize_per_tensor_affine(total / count, 0.013, 120, 0, 255)

    compare(gradients, twin, {"w": weights["w"]}, target)


def test_a_convolution_of_integers(tmp_path: Path) -> None:
    """ConvInteger, as `quantize_dynamic` writes it; what stands before it gets a gradient through the data's scale."""
    text = """net (float[n, 2, 5, 5] x) => (float[n, 3, 4, 4] y) {
        m = Mul(x, v)  h = Tanh(m)  y = Conv <kernel_shape = [2, 2]> (h, w) }"""
    source = saved(tmp_path / "net.onnx", text, v=numbers(5, 5, scale=1), w=numbers(3, 2, 2, 2))
    path = tmp_path / "quantized.onnx"
    quantize_dynamic(source, path, op_types_to_quantize=["Conv"])
    assert "ConvInteger" in {node.op_type for node in onnx.load(path).graph.node}
    x = numbers(2, 2, 5, 5, scale=1)
    weights, gradients, target = trained(path, {"x": x}, 1e-5)
    (kernel,) = set(gradients) - {"v"}

    def twin(leaves: dict[str, Tensor]) -> Tensor:
        return F.conv2d(rounded(torch.tanh(torch.tensor(x) * leaves["v"])), leaves[kernel])

    compare(gradients, twin, {name: weights[name] for name in gradients}, target)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("p = com.microsoft.QLinearConv <channels_last = 1> (q, s, z, k, t, i, s, z)", {"k": np.ones((3, 1, 1, 3))}),
        ("p = com.microsoft.QLinearReduceMean <axes = [2], keepdims = 1> (q, s, z, s, z)", {}),
        ("p = com.microsoft.QLinearSoftmax <axis = 1, opset = 13> (q, two, z, s, z)", {}),
    ],
)
def test_what_is_not_known_is_refused_by_name(text: str, stored: Arrays) -> None:
    stored = {"w": numbers(3), "two": np.float32([1, 2]), **{n: v.astype(np.int8) for n, v in stored.items()}}
    model = quantized(f"""net (float[n, 3, 3, 3] x) => (float[n, 3, 3, 3] y) {{
        m = Mul(x, w)  q = QuantizeLinear(m, s, z)  {text}  y = DequantizeLinear(p, s, z) }}""", **stored)  # fmt: skip
    with pytest.raises(UnsupportedError) as refused:
        build(model, Options(quantization="ste"))
    assert refused.value.refusals[0].op_type == text.split()[2].replace("soft.", "soft::")
