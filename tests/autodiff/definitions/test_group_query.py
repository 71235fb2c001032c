"""GroupQueryAttention beside onnxruntime's CPU kernel, beside PyTorch, and in float64 beside central differences.

The kernel leaves open what it computes for tokens behind the end of a sample; it is compared there too, because what a
training model computes in its forward part is what the original computes.
"""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.autodiff.definitions.test_contrib import case, check, gradient_is_right, normal
from tests.nodes import compare, one_node, written_out

DOMAIN = "com.microsoft"
NAMES = (
    "query", "key", "value", "past_key", "past_value", "last", "total", "cos", "sin", "positions", "bias", "sink",
    "k_scale", "v_scale", "q_norm", "k_norm", "valid",
)  # fmt: skip
HEADS = {"num_heads": 4, "kv_num_heads": 2}
SIZE = 16  # the kernel rotates heads of such sizes only
CACHES = ("y", "present_key", "present_value")
ROTATED = {"do_rotary": 1}


def feeds(batch=2, tokens=5, past=None, ends=None, total=None, *, packed=True, size=SIZE, heads=(4, 2), **others):
    """What the operator reads, by name, `ends` being the number of tokens of each sample after the step."""
    q, kv = heads
    total = (past or 0) + tokens if total is None else total
    given = {
        "query": normal(batch, tokens, ((q + 2 * kv) if packed else q) * size),
        "key": None if packed else normal(batch, tokens, kv * size),
        "value": None if packed else 0.5 + normal(batch, tokens, kv * size),
        "past_key": None if past is None else normal(batch, kv, past, size),
        "past_value": None if past is None else 0.5 + normal(batch, kv, past, size),
        "last": np.array(ends or [total] * batch, np.int32) - 1,
        "total": np.array(total, np.int32),
        **others,
    }
    return {name: given.get(name) for name in NAMES}


def tables(length=20, pairs=SIZE // 2):
    angle = np.arange(length)[:, None] / 3.0 ** np.arange(pairs)
    return {"cos": np.cos(angle), "sin": np.sin(angle)}


FORMS = {
    "packed": (feeds(), {}),
    "apart": (feeds(packed=False), {}),
    "an empty cache": (feeds(past=0), {}),
    "one head of keys": (feeds(heads=(4, 1)), {"kv_num_heads": 1}),
    "as many heads of keys": (feeds(heads=(4, 4)), {"kv_num_heads": 4}),
    "rotated": (feeds(**tables()), ROTATED),
    "rotated, neighbours paired": (feeds(**tables(), packed=False), ROTATED | {"rotary_interleaved": 1}),
    "rotated in part": (feeds(**tables(), size=32), ROTATED),
    "rotated in part, neighbours paired": (feeds(**tables(), size=32), ROTATED | {"rotary_interleaved": 1}),
    "tables that are not read": (feeds(**tables()), {}),
    "a cache": (feeds(1, 3, 4, **tables()), ROTATED),
    "a cache, one token": (feeds(2, 1, 4, **tables()), ROTATED),
    "a cache, samples of unequal lengths": (feeds(2, 1, 4, [3, 5], **tables()), ROTATED),
    "a cache with room": (feeds(1, 2, 8, total=5, **tables()), ROTATED),
    "a cache with room, samples of unequal lengths": (feeds(2, 1, 8, [3, 5], 5, **tables()), ROTATED),
    "a prompt in a cache with room": (feeds(2, 5, 8, total=5, **tables()), ROTATED),
    "padded at the right": (feeds(2, 5, None, [3, 5], **tables()), ROTATED),
    "padded at the right, an empty cache": (feeds(2, 5, 0, [1, 4], 5, **tables()), ROTATED),
    "positions of a prompt": (feeds(positions=np.array([[2, 0, 1, 4, 3], [3] * 5]), **tables()), ROTATED),
    "positions": (feeds(1, 3, 4, positions=np.array([[2, 0, 5]]), **tables()), ROTATED),
    "a position": (feeds(2, 1, 4, positions=np.array([[2], [5]]), **tables()), ROTATED),
    "a window": (feeds(**tables()), ROTATED | {"local_window_size": 2}),
    "a window of one": (feeds(), {"local_window_size": 1}),
    "a window of none": (feeds(), {"local_window_size": 0}),
    "a window, a cache": (feeds(1, 3, 4), {"local_window_size": 3}),
    "scaled and capped": (feeds(), {"scale": 0.9, "softcap": 0.7}),
    "a scale of zero is the default": (feeds(), {"scale": 0.0}),
    "a bias": (feeds(bias=normal(2, 4, 5, 5)), {"softcap": 0.7}),
    "a bias for all": (feeds(bias=normal(1, 1, 5, 5)), {}),
    "a bias that hides": (feeds(bias=np.where(normal(2, 1, 5, 5) + 9 * np.eye(5) > 0, 0.0, -1e4)), {}),
    "a bias, a cache": (feeds(1, 3, 4, bias=normal(1, 4, 3, 7)), {"local_window_size": 4}),
    "a bias, samples of unequal lengths": (feeds(2, 1, 4, [3, 5], bias=normal(2, 1, 1, 5)), {}),
    "a bias, a cache with room": (feeds(2, 1, 8, [3, 5], 5, bias=normal(1, 4, 1, 5)), {}),
    "a bias, padded at the right": (feeds(ends=[3, 5], bias=normal(2, 1, 5, 5)), {}),
    "a sink": (feeds(sink=normal(4)), {}),
    "a sink, padded at the right": (feeds(ends=[2, 5], sink=normal(4)), {}),
    "a sink, a window": (feeds(sink=normal(4)), {"local_window_size": 2}),
    "a sink, capped, a cache": (feeds(1, 3, 4, sink=normal(4), bias=normal(1, 1, 3, 7)), {"softcap": 0.8}),
    "smooth": (feeds(), {"smooth_softmax": 1}),
    "smooth below zero is not": (feeds(), {"smooth_softmax": -1}),
    "not causal": (feeds(), {"causal": 0}),
    "not causal, padded at the right": (feeds(ends=[3, 5]), {"causal": 0}),
    "not causal, a cache": (feeds(1, 3, 4), {"causal": 0}),
}
"""What the operator reads, and its attributes beside the numbers of heads."""


def asked(form):
    """A form as `check` takes it."""
    given, attributes = FORMS[form]
    outputs = CACHES if given["past_key"] is not None else CACHES[:1]
    return "GroupQueryAttention", given, outputs, HEADS | attributes


def models():
    """The forms, each in float64."""
    return (case(*asked(form), {})[0] for form in FORMS)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.thinned(12, 5)
def test_values_are_the_kernels_and_gradients_those_of_differences(form, symbolic):
    check(*asked(form), symbolic=symbolic, fixed=("query", "cos", "sin", "sink"))


def test_new_caches_where_there_was_none():
    check("GroupQueryAttention", feeds(**tables()), CACHES, HEADS | ROTATED)


@pytest.mark.parametrize("past", [None, 8])
@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("sink", [None, normal(4)])
def test_valid_tokens_are_the_kernels(past, window, sink):
    """Where new tokens lie behind the end of a sample, the kernel's window reads what is not there."""
    if past is None:
        ends, valid, total = [2, 5], [2, 5], 5
    else:
        ends, valid, total = [5, 4], [2, 3], 8
    given = feeds(2, 5, past, ends, total, sink=sink, **tables())
    if past is not None:
        given["valid"] = np.array(valid, np.int32)
    given = {name: x.astype(np.float32) if x is not None and x.dtype == np.float64 else x for name, x in given.items()}
    attributes = HEADS | ROTATED | {"local_window_size": window}
    model, given = one_node("GroupQueryAttention", given, CACHES, attributes, domain=DOMAIN, opset=18)
    expected = Executor(model, fallback=False)(given)
    found = Executor(written_out(model), fallback=False)(given)
    for sample, (end, count) in enumerate(zip(ends, valid, strict=True)):
        np.testing.assert_allclose(found["y"][sample, :count], expected["y"][sample, :count], rtol=2e-5, atol=2e-5)
        for cache in CACHES[1:]:
            assert found[cache].shape == expected[cache].shape
            np.testing.assert_allclose(
                found[cache][sample, :, :end], expected[cache][sample, :, :end], rtol=2e-5, atol=2e-5
            )


@pytest.mark.parametrize("room", [3, 4, 7])
@pytest.mark.parametrize(("tokens", "ends"), [(1, [1, 2]), (1, [9, 5]), (1, [20, 12]), (4, [4]), (4, [11]), (9, [20])])
@pytest.mark.thinned(3, 3)
def test_caches_that_drop_tokens(tokens, ends, room):
    """A cache holds the last tokens of each sample, not always as many; what it does not use is not compared."""
    window = 3
    attributes = HEADS | ROTATED | {"local_window_size": window, "sliding_window_cache": 1}
    given = feeds(len(ends), tokens, room, ends, max(ends), **tables(24))
    narrow = {name: x.astype(np.float32) if x is not None and x.dtype.kind == "f" else x for name, x in given.items()}
    model, fed = one_node("GroupQueryAttention", narrow, CACHES, attributes, domain=DOMAIN, opset=18, symbolic=True)
    for value in model.graph.input:
        if value.name in ("query", "cos", "sin"):
            value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, fed[value.name].shape))
    expected = Executor(model, fallback=False)(fed)
    found = Executor(written_out(model), fallback=False)(fed)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=2e-5, atol=2e-5)
    for sample, end in enumerate(ends):
        step = room - window + 1
        held = end if end <= room else end - step * -(-(end - room) // step)
        for cache in CACHES[1:]:
            ours, theirs = (x[cache][sample] for x in (found, expected))
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours[:, :held], theirs[:, :held], rtol=2e-5, atol=2e-5)
    model, fed = one_node("GroupQueryAttention", given, CACHES, attributes, domain=DOMAIN, opset=18)
    gradient_is_right(written_out(model), fed, CACHES)


def test_a_prompt_needs_no_cache_that_drops_tokens():
    """The kernel wants room for a window, the gradient does not."""
    given = feeds(2, 5, 0, total=5, **tables())
    plain = HEADS | ROTATED | {"local_window_size": 3}
    values = []
    for attributes in (plain, plain | {"sliding_window_cache": 1}):
        model, fed = one_node("GroupQueryAttention", given, CACHES[:1], attributes, domain=DOMAIN, opset=18)
        values.append(Executor(written_out(model))(fed)["y"])
    np.testing.assert_array_equal(*values)


# -- PyTorch ---------------------------------------------------------------------------------------------------------


def rotate(x, cos, sin, neighbours):
    """One head's numbers, of which the first ones are rotated."""
    count = len(cos)
    a, b = (x[0 : 2 * count : 2], x[1 : 2 * count : 2]) if neighbours else (x[:count], x[count : 2 * count])
    first, second = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack([first, second], 1).flatten() if neighbours else torch.cat([first, second])
    return torch.cat([turned, x[2 * count :]])


def reference(heads, kv_heads, *, scale=None, softcap=0.0, neighbours=0, window=-1, smooth=0, causal=1, epsilon=1e-6):
    """The operator in PyTorch, token by token."""

    def norm(x, weight):
        return x if weight is None else x * torch.rsqrt((x * x).mean() + epsilon) * weight

    def head(given, b, h, q, k, v, step):
        past = given["past_key"].shape[2] if given["past_key"] is not None else 0
        end = int(given["last"][b]) + 1
        before = end - int(given["valid"][b]) if given["valid"] is not None else max(end - q.shape[1], 0)
        g = h // (heads // kv_heads)
        keys = [given["past_key"][b, g, i] for i in range(min(before, past))]
        values = [given["past_value"][b, g, i] for i in range(min(before, past))]
        for i in range(q.shape[1]):
            if before + i < end:
                keys.append(turned(given, norm(k[b, i, g], given["k_norm"]), b, before, i))
                values.append(v[b, i, g])
        query = turned(given, norm(q[b, step, h], given["q_norm"]), b, before, step)
        seen = [
            i for i in range(end)
            if not causal or (i <= before + step and (window < 0 or i > before + step - window))
        ]  # fmt: skip
        if not seen:
            return torch.zeros_like(query)
        scores = torch.stack([keys[i] @ query for i in seen]) * (scale or query.shape[0] ** -0.5)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if given["bias"] is not None:
            bias = given["bias"]
            scores = scores + bias[b % bias.shape[0], h % bias.shape[1], step][seen]
        if given["sink"] is not None or smooth:
            last = given["sink"][h] if given["sink"] is not None else torch.zeros((), dtype=torch.float64)
            p = torch.softmax(torch.cat([scores, last[None]]), 0)[:-1]
        else:
            p = torch.softmax(scores, 0)
        return p @ torch.stack([values[i] for i in seen])

    def turned(given, x, b, before, i):
        if given["cos"] is None:
            return x
        at = before + i if given["positions"] is None else int(given["positions"][b, i])
        return rotate(x, given["cos"][at], given["sin"][at], neighbours)

    def run(**given):
        q = given["query"]
        batch, tokens, width = q.shape
        if given["key"] is None:
            size = width // (heads + 2 * kv_heads)
            q, k, v = q.split([heads * size, kv_heads * size, kv_heads * size], 2)
        else:
            k, v = given["key"], given["value"]
        q, k, v = (
            x.reshape(batch, tokens, n, -1) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads))
        )  # fmt: skip
        rows = [
            torch.cat([head(given, b, h, q, k, v, s) for h in range(heads)])
            for b in range(batch)
            for s in range(tokens)
        ]
        return (torch.stack(rows).reshape(batch, tokens, -1),)

    return run


BESIDE_PYTORCH = {
    "tables": (feeds(1, 3, 4, size=4, **tables(pairs=2)), ROTATED, {}),
    "neighbours": (
        feeds(2, 3, size=6, packed=False, positions=np.array([[2, 0, 1], [1, 4, 4]]), **tables(pairs=2)),
        ROTATED | {"rotary_interleaved": 1}, {"neighbours": 1},
    ),
    "normalized": (
        feeds(2, 3, size=4, q_norm=normal(4), k_norm=normal(4) + 2, **tables(pairs=2)),
        ROTATED | {"qk_norm_epsilon": 0.125}, {"epsilon": 0.125},
    ),
    "valid tokens": (
        feeds(2, 3, 4, [5, 3], 6, size=4, valid=np.array([2, 1], np.int32), sink=normal(4)),
        {"local_window_size": 3}, {"window": 3},
    ),
    "unequal samples": (
        feeds(2, 1, 4, [3, 5], size=4, bias=normal(2, 1, 1, 5), sink=normal(4), **tables(pairs=2)),
        ROTATED | {"softcap": 0.5, "scale": 0.75}, {"softcap": 0.5, "scale": 0.75},
    ),
    "a window, padded at the right": (
        feeds(2, 4, 0, [2, 4], 4, size=4), {"local_window_size": 1}, {"window": 1},
    ),
    "smooth": (feeds(2, 3, size=4), {"smooth_softmax": 1, "causal": 0}, {"smooth": 1, "causal": 0}),
}  # fmt: skip


@pytest.mark.parametrize("form", BESIDE_PYTORCH)
def test_gradients_are_pytorch_s(form):
    given, attributes, known = BESIDE_PYTORCH[form]
    if form == "neighbours":  # positions of what is no prompt
        given = given | {"valid": np.array([3, 3], np.int32), "total": np.array(5, np.int32)}
        given |= {"past_key": normal(2, 2, 0, 6), "past_value": normal(2, 2, 0, 6)}
    compare(
        reference(4, 2, **known), "GroupQueryAttention", given, ("y",), HEADS | attributes, domain=DOMAIN,
        symbolic=(False,), opset=18,
    )  # fmt: skip


# -- three positions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("neighbours", [0, 1])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(("shape", "rotated"), [((2, 5, 64), 0), ((2, 2, 5, 32), 0), ((2, 5, 64), 16)])
@pytest.mark.thinned(4)
def test_multimodal_rotary_embedding(shape, rotated, layout, neighbours, symbolic):
    pairs = (rotated or 32) // 2
    positions = np.random.default_rng(0).integers(0, 20, (3, 2, 5))
    attributes = {"mrope_section": [pairs - 5, 3, 2], "mrope_layout": layout, "interleaved": neighbours}
    attributes |= {"num_heads": 2, "rotary_embedding_dim": rotated}
    given = {"x": normal(*shape), "positions": positions, **tables(pairs=pairs)}
    check("MRotaryEmbedding", given, ("y",), attributes, symbolic=symbolic, fixed=("x", "cos", "sin"))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "attributes", "why"),
    [
        ({}, {"qk_output": 1}, "it returns the products of queries and keys"),
        ({}, {"k_quant_type": "PER_TENSOR"}, "caches are quantized"),
        ({}, {"kv_cache_bit_width": 8}, "caches are quantized"),
        ({"k_scale": np.ones(1, np.float32)}, {}, "caches are quantized"),
        ({"key": np.zeros((2, 0, 32)), "value": np.zeros((2, 0, 32))}, {}, "another layer fills"),
    ],
)
def test_refusals(others, attributes, why):
    model, _ = one_node("GroupQueryAttention", feeds() | others, ("y",), HEADS | attributes, domain=DOMAIN, opset=18)
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    assert [node.op_type for node in graph.nodes] == ["GroupQueryAttention"] and why in graph.unexpanded["node"]
