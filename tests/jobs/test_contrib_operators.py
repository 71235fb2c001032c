"""Models with operators of onnxruntime's own, through the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from tests.autodiff.definitions.test_contrib import SINCE_1_32
from tests.cli_harness import Shell

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.onnx.ml": 4]>'


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def build(shell: Shell, model: onnx.ModelProto, *options: str) -> dict:
    onnx.save(model, shell.folder / "model.onnx")
    result = shell("build", "model.onnx", *options, "-o", "train.onnx", "--json").json
    assert result["verdict"] == "Built and proved: every check passed.", result
    return result


def weights(model: onnx.ModelProto, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Add random weights to a model."""
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def qwen_layer() -> onnx.ModelProto:
    """Return a layer of linear attention as onnxruntime-genai writes it for Qwen3.5, with a table and a head.

    The builder writes attributes at their defaults, and has 4 heads of values for 2 heads of queries and keys.
    """
    model = parser.parse_model(f"""{HEADER}
    layer (int64[batch_size, sequence_length] input_ids, float[batch_size, 64, 3] past_conv,
           float[batch_size, 4, 8, 8] past_recurrent)
    => (float[batch_size, sequence_length, 20] logits, float[batch_size, 64, 3] present_conv,
        float[batch_size, 4, 8, 8] present_recurrent)
    <int64[3] parts = {{16, 16, 32}}, int64[4] by_head = {{0, 0, 2, 8}}, int64[3] flat = {{0, 0, 16}},
     int64[4] by_value = {{0, 0, 4, 8}}, float scale = {{0.35}}> {{
        x = Gather(table, input_ids)
        n = SimplifiedLayerNormalization<axis = -1, epsilon = 0.000001, stash_type = 1>(x, norm)
        qkv = MatMul(n, qkv_weight)
        z = MatMul(n, z_weight)
        b = MatMul(n, b_weight)
        a = MatMul(n, a_weight)
        first = Transpose<perm = [0, 2, 1]>(qkv)
        mixed, present_conv = com.microsoft.CausalConvWithState
            <ndim = 1, activation = "silu", state_window = 0>(first, conv_weight, conv_bias, past_conv)
        last = Transpose<perm = [0, 2, 1]>(mixed)
        q, k, v = Split<axis = -1>(last, parts)
        qh = Reshape(q, by_head)
        kh = Reshape(k, by_head)
        qn = LpNormalization<axis = -1, p = 2>(qh)
        kn = LpNormalization<axis = -1, p = 2>(kh)
        qf = Reshape(qn, flat)
        kf = Reshape(kn, flat)
        qs = Mul(qf, scale)
        decay, beta = com.microsoft.LinearAttentionGate(a, dt_bias, neg_exp_A, b)
        y, present_recurrent = com.microsoft.LinearAttention
            <q_num_heads = 2, kv_num_heads = 4, update_rule = "gated_delta", scale = 1.0, state_window = 0>
            (qs, kf, v, past_recurrent, decay, beta)
        g = com.microsoft.GatedRMSNorm<epsilon = 0.000001, activation = "silu">(y, gate_norm, z)
        o = MatMul(g, out_weight)
        r = Add(x, o)
        logits = MatMul(r, head)
    }}""")
    return weights(
        model, table=(20, 16), norm=(16,), qkv_weight=(16, 64), z_weight=(16, 32), b_weight=(16, 4), a_weight=(16, 4),
        conv_weight=(64, 1, 4), conv_bias=(64,), dt_bias=(4,), neg_exp_A=(4,), gate_norm=(8,), out_weight=(32, 16),
        head=(16, 20),
    )  # fmt: skip


@pytest.mark.slow
@SINCE_1_32
def test_a_layer_of_linear_attention_with_default_attributes_is_proved(shell: Shell) -> None:
    result = build(shell, qwen_layer(), "--loss", "cross-entropy", "--label", "labels")
    assert {each["name"] for each in result["weights"]} >= {
        "table", "qkv_weight", "conv_weight", "dt_bias", "neg_exp_A", "a_weight", "b_weight", "gate_norm", "head"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "why"),
    [({"ndim": 2}, "its definition does not cover the attribute ndim=2"),
     ({"state_window": 2}, "its definition does not cover the attribute state_window=2"),
     ({"activation": "tanh"}, "its activation 'tanh' is not supported")],
)  # fmt: skip
def test_attributes_at_other_values_are_refused_by_name(attributes: dict, why: str, shell: Shell) -> None:
    model = qwen_layer()
    (node,) = (node for node in model.graph.node if node.op_type == "CausalConvWithState")
    node.name = "conv"
    for name, value in attributes.items():
        (given,) = (each for each in node.attribute if each.name == name)
        given.CopyFrom(helper.make_attribute(name, value))
    onnx.save(model, shell.folder / "model.onnx")
    found = shell("build", "model.onnx", "--loss", "cross-entropy", "--label", "labels", "-o", "train.onnx")
    assert found.code == 3
    assert f"conv (com.microsoft::CausalConvWithState): {why}" in found.err


SMALL = {
    "UnfoldTensor": ("float[N, 6] x", "y = com.microsoft.UnfoldTensor<dim = 1, size = 2, step = 2>(h)"),
    "ScaledSiLU": ("float[N, 6] x", "y = com.microsoft.ScaledSiLU<alpha = 1.5>(h)"),
    "SampleOp": ("float[N, 6] x", "y = com.microsoft.SampleOp(h)"),
    "BranchwiseRMSNorm": ("float[N, 6] x", "y = com.microsoft.BranchwiseRMSNorm<num_branches = 2>(h)"),
    "MoEGroupRouter": (
        "float[N, 6] x",
        "z = Constant<value = float[6] {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}>() "
        "y = com.microsoft.MoEGroupRouter<top_k = 6, router_sentinel = -9.0>(h, z)",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SINCE_1_32) if name == "MoEGroupRouter" else name for name in SMALL]
)
def test_an_operator_is_proved(name: str, shell: Shell) -> None:
    given, text = SMALL[name]
    model = parser.parse_model(f"{HEADER} g ({given}) => (y) {{ h = MatMul(x, w) {text} }}")
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    build(shell, weights(model, w=(6, 6)), "--loss", "mse")


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [("y = com.microsoft.SparseAttention<num_heads = 1, kv_num_heads = 1, sparse_block_size = 16>(h, h, h, h, h)",
      "share memory", "GroupQueryAttention"),
     ("y = com.microsoft.NGramRepeatBlock<ngram_size = 2>(i, h)", "step of token generation", "generation loop"),
     ("y = com.microsoft.PagedAttention(h, h, h)", "made for another processor", "optimize it for the CPU")],
)  # fmt: skip
def test_an_operator_is_refused_with_its_reason(text: str, why: str, hint: str, shell: Shell) -> None:
    model = parser.parse_model(
        f"{HEADER} g (float[N, 6] x, int64[N, 3] i) => (float[N, 6] y) {{ h = MatMul(x, w) {text} }}"
    )
    model.graph.node[1].name = "node"
    onnx.save(weights(model, w=(6, 6)), shell.folder / "model.onnx")
    found = shell("build", "model.onnx", "--loss", "mse", "-o", "train.onnx")
    assert found.code == 3
    assert f"node (com.microsoft::{model.graph.node[1].op_type}): " in found.err
    assert why in found.err and hint in found.err


@pytest.mark.parametrize(
    ("given", "text"),
    [("float[N, 3] x", "r = Round(x) h = ai.onnx.ml.LabelEncoder"
      "<keys_floats = [0.0, 1.0], values_floats = [0.5, 1.5], default_float = 0.25>(r)"),
     ("float[N] x", "h = ai.onnx.ml.OneHotEncoder<cats_int64s = [0, 1, 2], zeros = 1>(x)")],
)  # fmt: skip
def test_what_reads_an_encoder_is_trained_and_what_it_reads_is_not(given: str, text: str, shell: Shell) -> None:
    model = parser.parse_model(
        f"{HEADER} g ({given}) => (float[N, 2] y) {{ {text.replace('(x)', '(s)')} y = MatMul(h, w) }}"
    )
    model.graph.node.insert(0, helper.make_node("Mul", ["x", "before"], ["s"]))
    result = build(shell, weights(model, w=(3, 2), before=(1,)), "--loss", "mse")
    assert [each["name"] for each in result["weights"]] == ["w"]
    listed = shell("list", "operators", "*Encoder", "--json").json
    assert {(each["op"], each["derivative"]) for each in listed} == {
        ("LabelEncoder", "zero"),
        ("OneHotEncoder", "zero"),
    }


SETTINGS = [
    ("float[N, 64] x",
     "h = MatMul(x, w) y = com.microsoft.MatMulBnb4<K = 64, N = 8, block_size = 32, quant_type = 1>(h, b, s)",
     {"w": (64, 64), "s": (16,)}, "s", "quantization scale"),
    ("float[2, 3, 9, 9] x, int32[4] at",
     "size = Constant<value = int32[2] {4, 4}>() h = Conv(x, w) y = com.microsoft.CropAndResize(h, boxes, at, size)",
     {"w": (3, 3, 3, 3), "boxes": (4, 4)}, "boxes", "boxes of a CropAndResize"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text", "shapes", "setting", "reason"), SETTINGS)
def test_settings_of_an_operator_are_not_trained(
    given: str, text: str, shapes: dict, setting: str, reason: str, shell: Shell
) -> None:
    model = parser.parse_model(f"{HEADER} g ({given}) => (y) {{ {text} }}")
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    packed = np.random.default_rng(0).integers(0, 256, 256).astype(np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(packed, "b"))
    result = build(shell, weights(model, **shapes), "--loss", "mse")
    assert [each["name"] for each in result["weights"]] == ["w"]
    assert {each["name"]: each["reason"] for each in result["not_trained"]}[setting] == reason


@pytest.mark.slow
@SINCE_1_32
def test_packed_sequences_are_proved_on_data(shell: Shell) -> None:
    """Of sequences that follow each other, random data have no valid offsets."""
    model = parser.parse_model(f"""{HEADER}
    packed (float[T, 24] x, int32[B1] offsets, float[B, 24, 3] conv_state, float[B, 4, 3, 4] state)
    => (float[T, 4, 3] y)
    <int64[3] by_key = {{0, 2, 4}}, int64[3] by_value = {{0, 4, 3}}, int64[3] parts = {{8, 8, 12}}> {{
        p, conv_after = com.microsoft.VarlenCausalConvWithState<activation = "silu">(x, conv, offsets, , conv_state)
        h = MatMul(p, w)
        q, k, v = Split<axis = 1>(h, parts)
        qh = Reshape(q, by_key)
        kh = Reshape(k, by_key)
        vh = Reshape(v, by_value)
        decay = MatMul(p, decay_weight)
        beta = MatMul(p, beta_weight)
        y, after = com.microsoft.GatedDeltaNet
            <gate_activation = "softplus", beta_activation = "sigmoid", qk_l2_norm = 1, state_update_capacity = 0>
            (qh, kh, vh, offsets, decay, beta, state, a_log, dt_bias)
    }}""")
    shapes = {"conv": (24, 1, 4), "w": (24, 28), "decay_weight": (24, 4), "beta_weight": (24, 4), "a_log": (4,)}
    rng = np.random.default_rng(0)
    data = {"x": (9, 24), "conv_state": (3, 24, 3), "state": (3, 4, 3, 4), "label": (9, 4, 3)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in data.items()}
    np.savez(shell.folder / "data.npz", offsets=np.array([0, 3, 4, 9], np.int32), **arrays)
    result = build(shell, weights(model, **shapes, dt_bias=(4,)), "--loss", "mse", "--test-data", "data.npz")
    assert {each["name"] for each in result["weights"]} == {*shapes, "dt_bias"}
