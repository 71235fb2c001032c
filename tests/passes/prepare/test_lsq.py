"""Scales are learned as by the paper, against PyTorch; and which of them are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import torch
import torch.nn.functional as F

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.options import Options
from tests.facts import raises
from tests.quantized import X, learned, quantized, stored

LSQ = Options(quantization="lsq", label="target", keep_outputs=True)
TARGET = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
LIMITS = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15)}


@pytest.mark.parametrize(
    ("activations", "weights", "per_channel", "opset"),
    [
        ("QUInt8", "QInt8", False, 21),
        ("QInt8", "QInt8", True, 21),
        ("QUInt4", "QInt4", True, 21),
        ("QInt4", "QInt8", False, 18),
    ],
)
@pytest.mark.thinned(3)
def test_gradients_of_weights_and_scales_are_pytorchs(
    activations: str, weights: str, per_channel: bool, opset: int, tmp_path: Path
) -> None:
    given = quantized(tmp_path, activations, weights, opset, per_channel=per_channel)
    assert run_build(given, tmp_path / "t.onnx", LSQ).status == "built"
    built = build(given, LSQ)
    scales = ["x_scale", "conv_weight_scale", "r_scale", "fc_weight_scale", "y_scale"]
    floats = ["conv_weight", "conv_bias", "fc_weight", "fc_bias"]
    assert sorted(built.training.trained) == sorted([*scales, *floats])
    values, own = stored(built.model), stored(given)
    rng = np.random.default_rng(2)  # so that weights lie between steps, some beyond the range
    feeds: Arrays = {
        name: values[name] * rng.uniform(0.7, 1.2, values[name].shape).astype(np.float32) for name in floats
    }
    feeds |= {name: np.asarray(values[name] * np.float32(0.9)) for name in scales}
    found = Executor(built.model, fallback=False)({"x": X, "target": TARGET, **feeds})
    leaves = {name: torch.tensor(values, requires_grad=True) for name, values in feeds.items()}

    def fake(v: torch.Tensor, name: str, shared: float) -> torch.Tensor:
        scale, zero = leaves[f"{name}_scale"], own[f"{name}_zero_point"]
        return learned(v, scale, zero, LIMITS[str(zero.dtype)], shared, axis=0)

    def rounded(layer: str, operand: str) -> torch.Tensor:
        """A bias as the file holds it, in steps of both scales; the rounding counts as a constant."""
        bias, step = leaves[f"{layer}_bias"], leaves[f"{operand}_scale"] * leaves[f"{layer}_weight_scale"]
        return bias + (torch.round(bias / step) * step - bias).detach()

    channels = (4, 5) if per_channel else (1, 1)
    x = fake(torch.tensor(X), "x", 2 * 8 * 8)
    weight = fake(leaves["conv_weight"], "conv_weight", 72 / channels[0])
    c = F.conv2d(x, weight, rounded("conv", "x"), padding=1)
    shared = 4 * 8 * 8 + 2 * 4 * 4 * 4  # before and behind MaxPool, and flattened
    r = fake(c, "r", shared)  # the quantizer has left out Relu, as no integer is negative
    p = fake(fake(F.max_pool2d(r, 2), "r", shared).flatten(1), "r", shared)
    weight = fake(leaves["fc_weight"], "fc_weight", 320 / channels[1])
    y = fake(F.linear(p, weight, rounded("fc", "r")), "y", 5)
    F.mse_loss(y, torch.tensor(TARGET)).backward()
    np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-5, atol=1e-5)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        wanted = leaf.grad.numpy()
        np.testing.assert_allclose(
            found[f"{name}_grad"], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=name
        )
        assert wanted.any()


def built_of(text: str, header: str = '<ir_version: 10, opset_import: ["": 21]>') -> TrainingModel:
    return build(onnx.parser.parse_model(f"{header} {text}"), LSQ)


TWICE = """net (float[n, 4] x) => (float[n, 2] y) <float[4, 2] w = {1, -2, 3, 4, 5, -6, 7, 8}, float s = {0.1},
    float s1 = {0.1}, float s2 = {0.1}, float t = {0.2}, float other = {0.1}, uint8 z = {3}, uint8 z1 = {3},
    int8 i = {0}> {
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s1, z1)
    r = Transpose <perm = [0, 1]> (d)
    p = QuantizeLinear(r, s2, z)
    e = DequantizeLinear(p, s2, z)
    v = QuantizeLinear(w, t, i)
    u = DequantizeLinear(v, t, i)
    m = MatMul(e, u)
    n1 = QuantizeLinear(m, other, z)
    y = DequantizeLinear(n1, other, z) }"""


def test_equal_scales_of_one_value_are_one() -> None:
    """A file may store the scale of QuantizeLinear and that of DequantizeLinear apart."""
    built = built_of(TWICE)
    assert built.training.copies == {"s1": "s", "s2": "s"}
    assert built.training.learned_scales == ["s", "t", "other"]


def test_scales_of_different_values_stay_apart() -> None:
    built = built_of(TWICE.replace("s2 = {0.1}", "s2 = {0.11}").replace("z1 = {3}", "z1 = {4}"))
    assert not built.training.copies


def test_the_scales_of_integers_that_go_in_or_come_out_stay() -> None:
    built = built_of("""net (uint8[n, 4] x) => (float[n, 4] y, uint8[n, 4] q) <float[4] w = {1, -2, 3, 4},
        float s = {0.1}, float t = {0.2}, float u = {0.3}, uint8 z = {3}, int8 i = {0}> {
        d = DequantizeLinear(x, s, z)
        a = QuantizeLinear(w, t, i)
        b = DequantizeLinear(a, t, i)
        y = Mul(d, b)
        q = QuantizeLinear(y, u, z) }""")
    assert built.training.learned_scales == ["t"]
    assert built.training.trained == ["w", "t"]


SHARED_BIAS = """net (float[n, 4] x, float[n, 4] x2) => (float[n, 4] y) <int32[4] b_quantized = {10, -20, 30, 40},
    int8[4, 4] w_quantized = {1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -2, -3, -4, -5, -6, -7}, float s = {0.5}, float s2 = {0.5},
    float t = {0.25}, float bs = {0.125}, int8 z = {0}> {
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    q2 = QuantizeLinear(x2, s2, z)
    d2 = DequantizeLinear(q2, s2, z)
    w = DequantizeLinear(w_quantized, t, z)
    b = DequantizeLinear(b_quantized, bs)
    g = Gemm(d, w, b)
    h = Gemm(d2, w, b)
    y = Add(g, h) }"""


def test_a_bias_that_could_not_follow_holds_the_scales_of_its_products() -> None:
    """One bias of two products: its integers are added to both, so that the scales of both must stay what they are."""
    with raises(UsageError, "no_data", "quantization='lsq'"):
        built_of(SHARED_BIAS)
    one = built_of(SHARED_BIAS.replace("x2, s2, z", "x2, s, z").replace("q2, s2, z", "q2, s, z"))
    assert one.training.learned_scales == ["s", "t"]
    (bias,) = [weight for weight in one.training.integer_weights if weight.tensor == "b_quantized"]
    assert bias.factors == ("s", "t") and bias.weight == "b"


def test_a_bias_with_a_scale_of_its_own_holds_them_too() -> None:
    with raises(UsageError, "no_data", "quantization='lsq'"):
        built_of(SHARED_BIAS.replace("bs = {0.125}", "bs = {0.126}"))


def test_scales_are_left_out_by_name_and_chosen_by_name() -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {TWICE}')
    assert build(model, Options(quantization="lsq", freeze=("s", "other"))).training.trained == ["w", "t"]
    assert build(model, Options(quantization="lsq", train=("t",))).training.trained == ["t"]
    assert build(model, Options(quantization="ste")).training.trained == ["w"]


def test_a_step_changes_a_scale_by_a_hundredth_at_most() -> None:
    """A step that is too large would turn it about, and with it all that it quantizes."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {TWICE}')
    built = build(model, Options(quantization="lsq", optimizer="sgd", label="t_"))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(5, 4)).astype(np.float32), "t_": rng.normal(size=(5, 2)).astype(np.float32)}
    before = stored(built.model)
    found = Executor(built.model, fallback=False)({**feeds, "learning_rate": np.array(0, np.float32)})
    assert all(found[f"{name}_next"] == before[name] for name in ("s", "t", "other"))
    found = Executor(built.model, fallback=False)({**feeds, "learning_rate": np.array(1e4, np.float32)})
    after = np.array([found[f"{name}_next"] / before[name] for name in ("s", "other")])  # the gradient of t is zero
    np.testing.assert_allclose(np.abs(after - 1), 0.01, rtol=1e-4)
    found = Executor(built.model, fallback=False)({**feeds, "learning_rate": np.array(1e-6, np.float32)})
    for name in ("s", "t", "other"):
        np.testing.assert_allclose(found[f"{name}_next"], before[name] - 1e-6 * found[f"{name}_grad"], rtol=1e-6)


def test_derivatives_are_no_training() -> None:
    from onnxgrad_cli import derive

    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {TWICE}')
    with pytest.raises(UsageError, match="quantization='ste'"):
        derive(model, "vjp", options=Options(quantization="lsq"))
