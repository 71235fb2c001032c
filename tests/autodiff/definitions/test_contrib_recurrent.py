"""Linear attention, causal convolutions and AttnLSTM of com.microsoft, beside onnxruntime's kernels and differences."""

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.autodiff.definitions.test_contrib import (
    FLOATS,
    SINCE_1_32,
    case,
    check,
    narrowed,
    normal,
    values_are_the_kernels,
)

RULES = ["linear", "gated", "delta", "gated_delta"]


# -- causal convolutions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
def test_causal_conv_with_state(activation, state):
    feeds = {
        "x": normal(2, 3, 5), "w": normal(3, 1, 3), "b": normal(3) if state else None,
        "state": normal(2, 3, 2) if state else None,
    }  # fmt: skip
    check("CausalConvWithState", feeds, ("y", "after"), {"activation": activation}, floats=FLOATS[:1])


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("channels", [None, (3,), (2, 2)])
@pytest.mark.thinned(4)
def test_causal_conv_with_taps_apart_or_channels_last(channels, dilation, state, tokens):
    count = int(np.prod(channels or (3,)))
    past = 2 * dilation
    feeds = {
        "x": normal(2, tokens, *channels) if channels else normal(2, 3, tokens), "w": normal(count, 1, 3),
        "b": normal(count) if state else None,
        "state": (normal(2, past, *channels) if channels else normal(2, 3, past)) if state else None,
    }  # fmt: skip
    attributes = {"dilation": dilation, "channels_last": int(channels is not None), "activation": "silu"}
    check("CausalConvWithState", feeds, ("y", "after"), attributes, floats=FLOATS[:1])


OFFSETS = [np.array([0, 3, 4, 9], np.int32), np.array([0, 6], np.int32), np.array([0, 1, 2], np.int32)]


@SINCE_1_32
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.thinned(6, 3)
def test_causal_conv_of_packed_sequences(offsets, bias, dilation, symbolic):
    feeds = {
        "x": normal(offsets[-1], 3), "w": normal(3, 1, 3), "offsets": offsets, "b": normal(3) if bias else None,
        "state": normal(len(offsets) - 1, 3, 2 * dilation),
    }  # fmt: skip
    attributes = {"dilation": dilation, "activation": "silu" if bias else "none"}
    check("VarlenCausalConvWithState", feeds, ("y", "after"), attributes, symbolic=symbolic, fixed=("w", "b"))


# -- linear attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.thinned(3)
def test_linear_attention(rule, heads, state):
    feeds = {
        "q": 0.3 * normal(2, 5, 4 * heads), "k": 0.3 * normal(2, 5, 8), "v": normal(2, 5, 6),
        "state": 0.1 * normal(2, 2, 4, 3) if state else None,
        "decay": -normal(2, 5, 2, low=0.1) if "gated" in rule else None,
        "beta": 0.3 * normal(2, 5, 2, low=0.1) if "delta" in rule else None,
    }  # fmt: skip
    attributes = {"q_num_heads": heads, "kv_num_heads": 2, "update_rule": rule}
    check("LinearAttention", feeds, ("y", "after"), attributes, floats=FLOATS[:1])


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("q_heads", "k_heads"), [(2, 2), (2, 4), (1, 1), (4, 2), (8, 2)])
def test_linear_attention_with_shared_queries_and_keys(q_heads, k_heads, by_key):
    """Four heads of values, which Qwen3.5 has more of than of queries and keys."""
    feeds = {
        "q": 0.3 * normal(2, 5, 4 * q_heads), "k": 0.3 * normal(2, 5, 4 * k_heads), "v": normal(2, 5, 12),
        "state": 0.1 * normal(2, 4, 4, 3), "decay": -normal(2, 5, 16 if by_key else 4, low=0.1),
        "beta": 0.3 * normal(2, 5, 1 if by_key else 4, low=0.1),
    }  # fmt: skip
    attributes = {"q_num_heads": q_heads, "kv_num_heads": 4, "scale": 0.7, "chunk_size": 2}
    check("LinearAttention", feeds, ("y", "after"), attributes, floats=FLOATS[:1])


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("rate", [False, True])
def test_linear_attention_gate(rate, symbolic):
    feeds = {
        "a": normal(2, 3, 4), "bias": normal(4), "scale": -normal(4, low=0.5),
        "b": normal(2, 3, 4) + 1 if rate else None,
    }  # fmt: skip
    check("LinearAttentionGate", feeds, ("y", "beta") if rate else ("y",), symbolic=symbolic, floats=FLOATS[:1],
          fixed=("bias", "scale"))  # fmt: skip


def deltas(lead, q_heads=2, heads=4, rule="gated_delta", by_key=False, sequences=2, **others):
    """The inputs of GatedDeltaNet, whose keys have 4 numbers and whose values have 3."""
    given = {
        "q": normal(*lead, q_heads, 4), "k": 0.5 * normal(*lead, q_heads, 4) + 0.1, "v": normal(*lead, heads, 3),
        "offsets": None,
        "decay": -normal(*lead, heads, *([4] if by_key else []), low=0.1) if "gated" in rule else None,
        "beta": 0.3 * normal(*lead, heads, low=0.1) if "delta" in rule else None,
        "state": normal(sequences, heads, 3, 4), "a_log": None, "dt_bias": None,
    }  # fmt: skip
    return given | others


@SINCE_1_32
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
@pytest.mark.thinned(3)
def test_gated_delta_net(lead, rule, heads):
    attributes = {"update_rule": rule} | ({"scale": 0.3, "chunk_size": 32} if heads == 2 else {})
    check("GatedDeltaNet", deltas(lead, heads=heads, rule=rule), ("y", "after"), attributes, floats=FLOATS[:1])


@SINCE_1_32
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.thinned(3)
def test_gated_delta_net_of_packed_sequences(offsets, by_key, given):
    feeds = deltas((offsets[-1],), by_key=by_key, offsets=offsets, sequences=len(offsets) - 1)
    check("GatedDeltaNet", feeds | ({} if given else {"state": None}), ("y", "after"), floats=FLOATS[:1])


@SINCE_1_32
@pytest.mark.parametrize("bias", [(4,), (4, 4), (16,)])
@pytest.mark.parametrize("activation", ["softplus", "qwen", "sigmoid", "kda"])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.thinned(4, 2)
def test_the_gates_of_gated_delta_net(activation, by_key, bias):
    if bias in ((4, 4), (16,)) and not by_key:
        pytest.skip("a bias by key needs a decay by key")
    feeds = deltas((2, 3), by_key=by_key, a_log=0.5 * normal(4), dt_bias=normal(*bias))
    attributes = {"gate_activation": activation, "beta_activation": "sigmoid", "qk_l2_norm": 1}
    attributes |= {"gate_lower_bound": -2.0} if bias == (4,) else {}
    check("GatedDeltaNet", feeds, ("y", "after"), attributes, floats=FLOATS[:1])


@SINCE_1_32
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_gated_delta_net_of_packed_queries_keys_and_values(lead):
    feeds = deltas(lead) | {"q": normal(*lead, 2 * 2 * 4 + 4 * 3), "k": None, "v": None}
    check("GatedDeltaNet", feeds, ("y", "after"), {"qk_l2_norm": 1}, floats=FLOATS[:1])


@SINCE_1_32
def test_the_length_of_queries_and_keys_near_zero():
    feeds = deltas((2, 3))
    feeds |= {name: 1e-3 * feeds[name] for name in ("q", "k")}
    values_are_the_kernels("GatedDeltaNet", feeds, ("y", "after"), {"qk_l2_norm": 1}, floats=FLOATS[:1])


@SINCE_1_32
@pytest.mark.parametrize("gates", [np.float16, np.float32])
def test_gated_delta_net_of_halves_with_a_state_in_float32(gates):
    singles = {"state", "a_log", "dt_bias"}
    feeds = {
        name: x if x is None else x.astype(np.float32 if name in singles else gates if name == "decay" else np.float16)
        for name, x in deltas((2, 3), rule="gated", a_log=normal(4), dt_bias=normal(4)).items()
    }
    attributes = {"update_rule": "gated", "gate_activation": "softplus", "qk_l2_norm": 1}
    values_are_the_kernels(
        "GatedDeltaNet", feeds, ("y", "after"), attributes, floats=[np.float16], types={"after": TensorProto.FLOAT}
    )


def test_linear_attention_gate_of_halves():
    feeds = {"a": normal(2, 3, 4), "bias": normal(4), "scale": normal(4), "b": normal(2, 3, 4)}
    feeds = {name: x.astype(np.float32 if x.ndim == 1 else np.float16) for name, x in feeds.items()}
    values_are_the_kernels("LinearAttentionGate", feeds, ("y", "beta"), {}, floats=[np.float16])


DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


SIZE, DEPTH, KEYS, STEPS = 4, 5, 3, 6


OUTPUTS = ("y", "last_h", "last_c")


def layer(given=True, projected=True, direction="forward", peepholes=None):
    n = DIRECTIONS[direction]
    width = 7 if projected else DEPTH
    return {
        "x": normal(3, 2, 3), "w": 0.5 * normal(n, 4 * SIZE, 3 + width), "r": 0.5 * normal(n, 4 * SIZE, SIZE),
        "b": normal(n, 8 * SIZE) if given else None, "lengths": None,
        "h": normal(n, 2, SIZE) if given else None, "c": 0.5 + normal(n, 2, SIZE) if given else None, "p": peepholes,
        "query": normal(n, SIZE, KEYS), "key": normal(n, DEPTH, KEYS), "score": normal(n, KEYS),
        "memory": normal(2, STEPS, DEPTH),
        "memory_lengths": np.array([6, 4], np.int32) if given else None,
        "output": 0.5 * normal(n, DEPTH + SIZE, width) if projected else None,
    }  # fmt: skip


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.thinned(4)
def test_attention_lstm(given, projected, direction):
    attributes = {"hidden_size": SIZE, "direction": direction}
    attributes |= {"activations": ["Sigmoid", "Tanh", "Tanh"] * DIRECTIONS[direction]} if given else {}
    check("AttnLSTM", layer(given, projected, direction), OUTPUTS, attributes, floats=FLOATS[:1])


@pytest.mark.parametrize(
    ("inputs", "attributes", "why"),
    [({}, {"clip": 1.0}, "a clip"), ({}, {"input_forget": 1}, "coupled gates"),
     ({"peepholes": normal(1, 3 * SIZE)}, {}, "peepholes"),
     ({}, {"activations": ["Sigmoid", "Relu", "Tanh"]}, "its activations are Sigmoid, Relu, Tanh")],
)  # fmt: skip
def test_other_forms_are_refused(inputs, attributes, why):
    model, _ = case("AttnLSTM", narrowed(layer(**inputs), np.float32), OUTPUTS, {"hidden_size": SIZE} | attributes, {})
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    assert why in graph.unexpanded["node"]
