"""Attention against PyTorch's autograd in float64."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional

from onnxgrad_cli.errors import InternalError, OnnxgradError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.nodes import compare, gradients, normal, one_node, written_out

# -- Attention ------------------------------------------------------------------------------------------------------


def torch_attention(
    q, k, v, mask=None, past_key=None, past_value=None, lengths=None, *, is_causal=0, kv_num_heads=None,
    left_window_size=-1, q_num_heads=None, qk_matmul_output_mode=0, right_window_size=-1, scale=None, softcap=0.0,
):  # fmt: skip
    """As its page has it, the attention itself by PyTorch where that knows all that is asked for."""
    packed = q.ndim == 3
    if packed:
        counts = (q_num_heads, kv_num_heads, kv_num_heads)
        q, k, v = (x.unflatten(2, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), counts, strict=True))
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    tokens, keys = q.shape[2], k.shape[2]
    bias = torch.zeros(1, 1, tokens, keys, dtype=torch.float64)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        bias = bias + functional.pad(mask, (0, keys - mask.shape[-1]), value=-torch.inf)
    i, j = torch.arange(tokens)[:, None] + past, torch.arange(keys)
    if lengths is not None:
        i = i + (lengths - tokens)[:, None, None, None]
        bias = bias.masked_fill(j >= lengths[:, None, None, None], -torch.inf)
    hidden = torch.zeros((*i.shape[:-1], keys), dtype=torch.bool)
    if is_causal:
        hidden = hidden | (j > i)
    if left_window_size >= 0:
        hidden = hidden | (j < i - left_window_size)
    if right_window_size >= 0:
        hidden = hidden | (j > i + right_window_size)
    bias = bias.masked_fill(hidden, -torch.inf)
    scale = scale or q.shape[-1] ** -0.5
    groups = q.shape[1] // k.shape[1]
    raw = q @ k.repeat_interleave(groups, 1).mT * scale
    capped = torch.tanh(raw / softcap) * softcap if softcap else raw
    dead = (bias == -torch.inf).all(-1, keepdim=True)
    p = torch.where(dead, 0, torch.softmax(capped + torch.where(dead, 0, bias), -1))
    if softcap:
        y = p @ v.repeat_interleave(groups, 1)
    else:
        shown = torch.where(dead, 0, bias)
        y = functional.scaled_dot_product_attention(q, k, v, shown, scale=scale, enable_gqa=True)
        y = torch.where(dead, 0, y)
    scores = (raw, capped, capped + bias, p)[qk_matmul_output_mode]
    return y.transpose(1, 2).flatten(2) if packed else y, k, v, scores


def inputs(q=(2, 4, 3, 4), k=(2, 4, 6, 4), v=None, mask=None, past=0, lengths=None):
    """Heads have size 4: onnxruntime fuses a MatMul's scale into it, as a float32 even where it computes in float64."""
    v = v or (*k[:3], 10)
    feeds = {"q": normal(*q), "k": normal(*k, seed=1), "v": normal(*v, seed=2), "mask": mask}
    heads = k[1] if len(k) == 4 else 2
    sizes = (k[-1], v[-1]) if len(k) == 4 else (k[-1] // 2, v[-1] // 2)
    for name, size in zip(("past_key", "past_value"), sizes, strict=True):
        feeds[name] = normal(2, heads, past, size, seed=3) if past else None
    return {**feeds, "lengths": None if lengths is None else np.array(lengths)}


def flags(*shape):
    return normal(*shape, seed=4) > 0


SCORES = ("y", "", "", "scores")
CACHES = ("y", "keys", "values")
THREE = {"q": (2, 3, 16), "k": (2, 6, 8), "v": (2, 6, 20)}
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
DEAD = np.array([[True] * 6, [False] * 6, [True, False] * 3])
ATTENTIONS = [
    (inputs(), {}, ("y",), 23),
    (inputs(k=(2, 2, 6, 4)), {}, ("y",), 24),
    (inputs(k=(2, 1, 6, 4)), {"scale": 0.25}, ("y",), 23),
    (inputs(), {"is_causal": 1}, ("y",), 23),
    (inputs(q=(2, 4, 6, 4), k=(2, 4, 3, 4)), {"is_causal": 1}, ("y",), 25),
    (inputs(**THREE), HEADS, CACHES, 23),
    (inputs(**THREE, past=5), {**HEADS, "is_causal": 1}, (*CACHES, "scores"), 25),
    (inputs(past=5), {"is_causal": 1, "softcap": 0.5}, CACHES, 24),
    *((inputs(mask=normal(*s)), {}, ("y",), 24) for s in [(6,), (3, 6), (4, 3, 6), (2, 1, 3, 6), (2, 1, 1, 6), (3, 4)]),
    *((inputs(mask=flags(*s)), {}, ("y",), 24) for s in [(6,), (3, 6), (2, 4, 3, 6), (3, 4)]),
    *(
        (inputs(k=(2, 2, 6, 4), mask=mask), {"softcap": c, "qk_matmul_output_mode": mode, "is_causal": on}, SCORES, 24)
        for mode, mask, (on, c) in itertools.product(range(4), (normal(3, 6), DEAD), ((0, 0.0), (1, 0.75)))
    ),
    (inputs(mask=np.where(DEAD, 0.0, -np.inf)), {"qk_matmul_output_mode": 3}, SCORES, 23),
    (inputs(lengths=[4, 6]), {}, ("y",), 24),
    (inputs(lengths=[0, 2]), {"is_causal": 1, "qk_matmul_output_mode": 3}, SCORES, 24),
    (inputs(k=(2, 2, 6, 4), lengths=[1, 2], mask=normal(3, 4)), {}, ("y",), 25),
    *((inputs(), {"left_window_size": a, "right_window_size": b, "is_causal": c}, ("y",), 25)
      for a, b, c in [(1, 1, 0), (0, -1, 1), (-1, 2, 0), (2, 0, 1)]),
    (inputs(past=5), {"left_window_size": 2, "is_causal": 1}, CACHES, 25),
    (inputs(lengths=[1, 5]), {"left_window_size": 2, "right_window_size": 0}, ("y",), 26),
]  # fmt: skip


@pytest.mark.parametrize(("feeds", "attributes", "outputs", "opset"), ATTENTIONS)
@pytest.mark.thinned(8, 4)
def test_attention(feeds, attributes, outputs, opset):
    compare(lambda **t: torch_attention(**t, **attributes), "Attention", feeds, outputs, attributes, opset=opset)


@pytest.mark.parametrize("precision", [None, TensorProto.FLOAT])
def test_attention_in_float16(precision):
    feeds = {n: x if x is None else x.astype(np.float16) for n, x in inputs(mask=normal(3, 6)).items()}
    attributes = {} if precision is None else {"softmax_precision": precision}
    compare(torch_attention, "Attention", feeds, ("y",), attributes, tolerance=1e-2)


@pytest.mark.parametrize(
    ("shapes", "mask", "attributes", "row", "opset"),
    [
        ({}, DEAD, {}, 1, 24),
        ({"q": (2, 4, 6, 4), "k": (2, 4, 3, 4)}, None, {"left_window_size": 1, "right_window_size": 0}, 5, 25),
    ],
    ids=["by a mask", "by a window"],
)
def test_a_row_without_keys_lets_nothing_through(shapes, mask, attributes, row, opset):
    """As onnxruntime's own kernel, which gives zeros."""
    feeds = {name: x if x is None else x.astype(np.float32) for name, x in inputs(**shapes).items()} | {"mask": mask}
    model, given = one_node("Attention", feeds, ("y",), attributes, opset=opset)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    kernel = Executor(model, fallback=False)(given)["y"]
    form = written_out(one_node("Attention", feeds, ("y",), attributes, opset=opset)[0])
    values, _, found = gradients(form, given)
    assert not kernel[:, :, row].any()
    np.testing.assert_allclose(values["y"], kernel, atol=1e-6)
    assert not found["q"][:, :, row].any() and all(np.isfinite(g).all() for g in found.values())


# -- RotaryEmbedding ------------------------------------------------------------------------------------------------


# -- operators newer than onnxruntime -------------------------------------------------------------------------------


def modifier(text):
    return onnx.parser.parse_graph(f"m (double[B,H,L,S] s) => (double[B,H,L,S] t) {{ {text} }}")


def test_flex_attention():
    modifiers = {
        "score_mod": modifier("two = Constant<value = double {2.0}>() a = Div(s, two) b = Tanh(a) t = Mul(b, two)"),
        "prob_mod": modifier("t = Mul(s, s)"),
    }

    def reference(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return (torch.softmax(torch.tanh(q @ k.mT * 0.5 / 2) * 2, -1) ** 2 @ v,)

    feeds = {name: x for name, x in inputs(k=(2, 2, 6, 4)).items() if name in "qkv"}
    compare(reference, "FlexAttention", feeds, ("y",), {"scale": 0.5, **modifiers}, domain="ai.onnx.preview",
            tolerance=1e-7)  # fmt: skip


def test_a_modifier_that_contradicts_itself():
    """It is of the file, and no fault of the definition that writes it out."""
    feeds = {name: x for name, x in inputs(k=(2, 2, 6, 4)).items() if name in "qkv"}
    odd = {"score_mod": modifier("t = Cast<to = 1000000>(s)")}
    model, _ = one_node("FlexAttention", feeds, ("y",), odd, domain="ai.onnx.preview")
    with pytest.raises(OnnxgradError, match="contradicts itself") as error:
        written_out(model)
    assert not isinstance(error.value, InternalError)


# -- com.microsoft --------------------------------------------------------------------------------------------------


def matches_its_kernel(op, feeds, outputs, attributes, tolerance=1e-5):
    """The definition computes what stock onnxruntime's kernel does, and its gradient is that of what it computes."""
    feeds = {n: x.astype(np.float32) if x is not None and x.dtype.kind == "f" else x for n, x in feeds.items()}
    model, given = one_node(op, feeds, outputs, attributes, domain="com.microsoft", opset=16)
    for value in model.graph.output:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    expected = Executor(model, fallback=False)(given)
    model = written_out(model)
    assert not any(node.domain for node in model.graph.node)
    for name, y in Executor(model, fallback=False)(given).items():
        assert y.shape == expected[name].shape
        np.testing.assert_allclose(y, expected[name], rtol=tolerance, atol=tolerance)
    wide = {n: x.astype(np.float64) if x is not None and x.dtype.kind == "f" else x for n, x in feeds.items()}
    model, given = one_node(op, wide, outputs, attributes, domain="com.microsoft", opset=16)
    model = written_out(model)
    _, seeds, found = gradients(model, given)
    forward = Executor(model, fallback=False)

    def function(point):
        return float(sum(np.sum(y * seeds[name]) for name, y in forward(point).items()))

    assert directional(function, given, found, np.random.default_rng(1), 1e-6, 1e-3).error < 1e-5


@pytest.mark.parametrize(
    ("op", "feeds", "attributes", "why"),
    [
        ("Attention", {"x": (2, 4, 8), "w": (8, 24), "b": (24,), "m": np.ones((2, 1, 9, 9), np.int32)}, {}, "its mask"),
        ("Attention", {"x": (2, 4, 8), "w": (8, 24), "b": (24,)}, {"do_rotary": 1}, "rotates"),
        ("MultiHeadAttention", {"q": (2, 4, 2, 3, 4)}, {}, "packed"),
        ("MultiHeadAttention", {"q": (2, 4, 8), "kv": (2, 5, 2, 2, 4)}, {}, "packed"),
    ],
)
def test_what_no_kernel_proves_is_left(op, feeds, attributes, why):
    feeds = {name: normal(*x) if isinstance(x, tuple) else x for name, x in feeds.items()}
    model, _ = one_node(op, feeds, ("y",), {"num_heads": 2, **attributes}, domain="com.microsoft", opset=18)
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    assert [node.op_type for node in graph.nodes] == [op] and why in graph.unexpanded["node"]
