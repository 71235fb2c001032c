"""Operators of recent opsets against PyTorch's autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.nodes import compare, normal


def torch_linear_attention(query, key, value, past, decay, beta, *, q_num_heads, kv_num_heads, update_rule, scale=0.0):
    q, k, v = (x.unflatten(2, (n, -1)) for x, n in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads)))
    state = past if past is not None else torch.zeros(q.shape[0], kv_num_heads, k.shape[3], v.shape[3]).double()
    outputs = []
    for t in range(q.shape[1]):
        if "gated" in update_rule:
            state = state * decay[:, t].unflatten(1, (kv_num_heads, -1)).exp()[..., None]
        new = v[:, t]
        if "delta" in update_rule:
            new = beta[:, t][..., None] * (new - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t][..., None] * new[..., None, :]
        read = torch.einsum("bhkv,bhk->bhv", state.repeat_interleave(q_num_heads // kv_num_heads, 1), q[:, t])
        outputs.append(read.flatten(1) * (scale or q.shape[3] ** -0.5))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.thinned(4)
def test_linear_attention(rule, past):
    feeds = {
        "query": normal(2, 5, 12), "key": normal(2, 5, 6, seed=1) / 2, "value": normal(2, 5, 8, seed=2),
        "past": normal(2, 2, 3, 4) if past else None,
        "decay": -np.abs(normal(2, 5, 6 if past else 2)) if "gated" in rule else None,
        "beta": 1 / (1 + np.exp(normal(2, 5, 1 if past else 2))) if "delta" in rule else None,
    }  # fmt: skip
    attributes = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule, **({"scale": 0.75} if past else {})}
    compare(lambda **t: torch_linear_attention(**t, **attributes), "LinearAttention", feeds, ("y", "state"),
            attributes, opset=27)  # fmt: skip


@pytest.mark.parametrize(("length", "size", "past"), [(6, 3, False), (6, 3, True), (2, 4, False), (5, 1, True)])
@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
def test_causal_convolution(length, size, past, activation):
    def reference(x, weight, bias, past):
        padded = functional.pad(x, (size - 1, 0)) if past is None else torch.cat([past, x], 2)
        y = functional.conv1d(padded, weight, bias, groups=3)
        return functional.silu(y) if activation != "none" else y, padded[:, :, length:]

    feeds = {
        "x": normal(2, 3, length), "weight": normal(3, 1, size, seed=1), "bias": normal(3) if past else None,
        "past": normal(2, 3, size - 1, seed=2) if past else None,
    }  # fmt: skip
    compare(reference, "CausalConvWithState", feeds, ("y", "state"), {"activation": activation}, opset=27,
            symbolic=(False,))  # fmt: skip


@pytest.mark.parametrize("alpha", [1.0, 1.75])
def test_swiglu(alpha):
    compare(lambda a, b: (a * torch.sigmoid(alpha * a) * b,), "SwiGLU", {"a": normal(3, 4), "b": normal(3, 4, seed=1)},
            ("y",), {"alpha": alpha}, opset=28, tolerance=1e-6, symbolic=(False,))  # fmt: skip


def test_remainder_of_floats():
    compare(lambda a, b: (a - torch.floor(a / b) * b,), "Mod", {"a": normal(5, 4) * 3, "b": normal(4, seed=1)},
            ("y",), {"fmod": 0}, opset=28, symbolic=(False,))  # fmt: skip
