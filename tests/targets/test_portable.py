"""Training models for every runtime: they hold what all of them have, and compute what the standard's do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, parser

from onnxgrad_cli import LossSpec, Options, UnsupportedError, build
from onnxgrad_cli.ir.node_values import with_bodies
from tests import steps

CNN = Path(__file__).parents[2] / "sample_models" / "digits_cnn.onnx"
LSTM = """
<ir_version: 10, opset_import: ["" : 18]>
lstm (float[{steps}, batch, 3] x) => (float[{steps}, 1, batch, 4] y)
<float[1, 16, 3] w = {{{w}}}, float[1, 16, 4] r = {{{r}}}> {{ y = LSTM <hidden_size = 4> (x, w, r) }}
"""


def lstm(length: int | str) -> ModelProto:
    rng = np.random.default_rng(0)
    w, r = (", ".join(f"{value:.3f}" for value in rng.standard_normal(n)) for n in (48, 64))
    return parser.parse_model(LSTM.format(steps=length, w=w, r=r))


def operators(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in with_bodies(model.graph.node))


def made(source: ModelProto | Path, target: str = "portable", **more: Any) -> ModelProto:
    return build(source, Options(**{"losses": (LossSpec("mse"),), "target": target, **more})).model


def test_a_pool_has_no_indices() -> None:
    standard, portable = (made(CNN, t, losses=(LossSpec("cross-entropy"),)) for t in ("standard", "portable"))
    assert operators(standard)["MaxUnpool"] == 2
    found = operators(portable)
    assert not found["MaxUnpool"] and found["MaxPool"] == 2
    assert all(len(node.output) == 1 for node in portable.graph.node if node.op_type == "MaxPool")


def test_a_recurrent_layer_has_no_scan() -> None:
    standard, portable = (made(lstm(5), target) for target in ("standard", "portable"))
    assert operators(standard)["Scan"] and not operators(portable)["Scan"]
    feeds = {"x": np.random.default_rng(1).standard_normal((5, 2, 3)).astype(np.float32)}
    feeds["label"] = np.zeros((5, 1, 2, 4), np.float32)
    for got, expected in zip(*(steps.session(each).run(None, feeds) for each in (portable, standard)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("length", ["time", 300])
def test_a_scan_that_stays_is_refused(length: int | str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        made(lstm(length))
    assert {each.op_type for each in refused.value.refusals} == {"Scan"} and "`dims`" in str(refused.value.hint)


@pytest.mark.parametrize("more", [{"accumulate": 3}, {"loss_scale": "dynamic"}], ids=str)
def test_steps_that_are_not_taken(more: dict[str, Any]) -> None:
    """Without an If, weights and state are those of the step with one, bit for bit."""
    source, data = steps.exported(steps.network(steps.torch.float32)), steps.batches(np.float32, 7)
    data[3] = (np.full_like(data[3][0], 3e38), *data[3][1:])  # not finite: with a scale, no step is taken
    models = [build(source, steps.options("adamw", target=t, **more)).model for t in ("portable", "standard")]
    assert [operators(model)["If"] > 0 for model in models] == [False, True]
    with np.errstate(all="ignore"):
        got, expected = (steps.trained(model, data if "loss_scale" in more else data[:3]) for model in models)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


INDICES = """
<ir_version: 10, opset_import: ["" : 18]> m (float[n, 1, 4, 2] x) => (float[n, 1, 2, 1] y)
<float[2] w = {1, 2}> { h = Mul(x, w)  p, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (h)
  f = Cast <to = 1> (i)  y = Add(p, f) }
"""
UNPOOLED = """
<ir_version: 10, opset_import: ["" : 18]> m (float[1, 1, 2, 2] x) => (float[1, 1, 4, 4] y)
<float[2] w = {1, 2}, int64[1, 1, 2, 2] i = {0, 2, 8, 10}> { h = Mul(x, w)
  y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (h, i) }
"""
HALF = """
<ir_version: 10, opset_import: ["" : 22]> m (bfloat16[n, 2] x) => (bfloat16[n, 2] y)
<bfloat16[2] w = {1, 2}> { y = Mul(x, w) }
"""


@pytest.mark.parametrize(
    ("text", "op_type", "runtime"),
    [(INDICES, "MaxPool", "WebGPU"), (UNPOOLED, "MaxUnpool", "OpenVINO"), (HALF, "Mul", "bfloat16")],
    ids=["indices", "unpooled", "bfloat16"],
)
def test_what_a_runtime_lacks_is_refused_by_its_name(text: str, op_type: str, runtime: str) -> None:
    model = parser.parse_model(text)
    made(model, "standard")
    with pytest.raises(UnsupportedError) as refused:
        made(model)
    assert [each.op_type for each in refused.value.refusals if runtime in each.reason][:1] == [op_type]


def test_a_broadcast_that_is_seen_at_run_time_has_constant_axes() -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]> m (float[a, 3] x, float[b, 3] z) => (float[c, 3] y)
    <float[3] w = {1, 2, 3}> { h = Mul(z, w)  y = Add(x, h) }"""
    model = made(parser.parse_model(text))
    assert not operators(model)["NonZero"]
    onnx.checker.check_model(model, full_check=True)
    session = steps.session(model)
    x, t = np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)
    names = [value.name for value in session.get_outputs()]
    for rows in (1, 4):
        z = np.full((rows, 3), 2, np.float32)
        got = dict(zip(names, session.run(None, {"x": x, "z": z, "label": t}), strict=True))
        h = z * np.array([1, 2, 3], np.float32)
        expected = (2 / 12 * (x + h) * z).sum(0)
        np.testing.assert_allclose(got["w_grad"], expected, rtol=1e-5)


def test_constants_in_double_precision_are_computed_when_the_model_is_built() -> None:
    """As PyTorch's exporter writes the scale of attention: on WebGPU, onnxruntime-web opens no model with that."""
    text = """<ir_version: 10, opset_import: ["" : 18]> m (float[n, 2] x) => (float[n, 2] y)
    <float[2] w = {1, 2}, double scale = {0.2}> {
      s = Sqrt(scale)  f = Cast <to = 1> (s)  h = Mul(x, w)  y = Mul(h, f) }"""
    standard, portable = (made(parser.parse_model(text), target) for target in ("standard", "portable"))
    assert operators(standard) - operators(portable) == {"Sqrt": 1, "Cast": 1}
    feeds = {name: np.arange(6, dtype=np.float32).reshape(3, 2) * sign for name, sign in (("x", 1), ("label", -1))}
    for got, expected in zip(*(steps.session(each).run(None, feeds) for each in (portable, standard)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_webgpu_has_eight_buffers() -> None:
    """No Concat has more than seven inputs, and no Split more outputs; the forward part's own are cut, too."""
    text = """<ir_version: 10, opset_import: ["" : 18]> m (float[n, 10] x) => (float[n, 10] y)
    <float[10] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, int64[10] ones = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}> { h = Mul(x, w)
      a, b, c, d, e, f, g, i, j, k = Split <axis = 1> (h, ones)
      y = Concat <axis = 1> (k, j, i, g, f, e, d, c, b, a) }"""
    standard, portable = (made(parser.parse_model(text), target) for target in ("standard", "portable"))
    for model in (portable, made(lstm(20))):
        cut = [node for node in model.graph.node if node.op_type in ("Concat", "Split")]
        assert cut and max(max(len(node.input), len(node.output)) for node in cut) <= 8
        onnx.checker.check_model(model, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((3, 10)).astype(np.float32) for name in ("x", "label")}
    for got, expected in zip(*(steps.session(each).run(None, feeds) for each in (portable, standard)), strict=True):
        np.testing.assert_array_equal(got, expected)


CHANNELS = """<ir_version: 10, opset_import: ["" : 18]> m (float[n, {c}, 5, 5] x) => (float[n, {m}, 3, 3] y)
<float[{m}, {own}, 3, 3] w = {{{w}}}> {{ y = Conv <group = {group}> (x, w) }}"""


def conv(channels: int, outputs: int, group: int = 1) -> ModelProto:
    own = channels // group
    w = ", ".join(f"{value:.3f}" for value in np.random.default_rng(0).standard_normal(outputs * own * 9))
    return parser.parse_model(CHANNELS.format(c=channels, m=outputs, own=own, group=group, w=w))


@pytest.mark.parametrize(("channels", "outputs"), [(6, 8), (9, 4), (6, 5), (3, 8), (12, 8), (8, 6)])
def test_webgpu_computes_some_numbers_of_channels_wrongly(channels: int, outputs: int) -> None:
    """No convolution reads 6, 9, 15, ... channels where its outputs are a multiple of four; all compute the same."""
    standard, portable = (made(conv(channels, outputs), t, grad_of_input=("x",)) for t in ("standard", "portable"))
    types = {v.name: v for v in onnx.shape_inference.infer_shapes(portable).graph.value_info}
    types |= {v.name: v for v in (*portable.graph.input, *portable.graph.output)}
    for node in portable.graph.node:
        if node.op_type == "Conv":
            m, c = (dim.dim_value for dim in types[node.input[1]].type.tensor_type.shape.dim[:2])
            assert c == 3 or c % 3 or not c % 4 or m % 4, (node.name, m, c)
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((2, channels, 5, 5)).astype(np.float32)}
    feeds["label"] = rng.standard_normal((2, outputs, 3, 3)).astype(np.float32)
    for got, expected in zip(*(steps.session(each).run(None, feeds) for each in (portable, standard)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_groups_that_webgpu_computes_wrongly_are_refused() -> None:
    with pytest.raises(UnsupportedError) as refused:
        made(conv(12, 8, group=2))
    (refusal, *_) = refused.value.refusals
    assert refusal.op_type == "Conv" and "6 channels" in refusal.reason and "WebGPU" in refusal.reason
