"""Attention of com.microsoft beside onnxruntime's kernels and central differences."""

import numpy as np
import pytest

from tests.autodiff.definitions.test_attention import matches_its_kernel
from tests.autodiff.definitions.test_contrib import FLOATS, check
from tests.nodes import normal

HEADS, SIZE = 2, 4
NAMES = (
    "query", "key", "value", "mask", "attention_bias", "past_key", "past_value", "past_length", "beams", "indirection",
    "bias",
)  # fmt: skip


def decoder(**given):
    return {name: given.get(name) for name in NAMES}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("attributes", [{}, {"scale": 0.3, "mask_filter_value": -5.0}])
def test_cross_attention_of_one_token(attributes, mask, bias):
    feeds = decoder(
        query=normal(2, 1, HEADS * SIZE), key=normal(2, HEADS, 5, SIZE), value=0.5 + normal(2, HEADS, 5, SIZE),
        mask=np.array([[1, 1, 1, 0, 1], [1, 0, 1, 1, 1]], np.int32) if mask else None,
        bias=normal(3 * HEADS * SIZE) if bias else None,
    )  # fmt: skip
    check("DecoderMaskedMultiHeadAttention", feeds, ("y",), {"num_heads": HEADS} | attributes, floats=FLOATS[:1])


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.thinned(6, 3)
def test_attention_of_one_token_with_a_buffer(past, masked, bias, symbolic):
    total = past + 1
    feeds = decoder(
        query=normal(2, 1, HEADS * SIZE), key=0.1 + normal(2, 1, HEADS * SIZE), value=0.2 + normal(2, 1, HEADS * SIZE),
        mask=np.array([[1] * total, [0] * past + [1]], np.int32) if masked else None,
        attention_bias=normal(1, HEADS, 1, total) if masked else None,
        past_key=normal(2, HEADS, 6, SIZE), past_value=0.3 + normal(2, HEADS, 6, SIZE),
        past_length=np.array([past], np.int32), bias=normal(3 * HEADS * SIZE) if bias else None,
    )  # fmt: skip
    outputs = ("y", "present_key", "present_value")
    attributes = {"num_heads": HEADS, "past_present_share_buffer": 1}
    check("DecoderMaskedMultiHeadAttention", feeds, outputs, attributes, floats=FLOATS[:1], symbolic=symbolic,
          fixed=("query", "key", "value"))  # fmt: skip


CACHES = ("y", "keys", "values")


BATCH, TOKENS, KEYS, HEAD_SIZE = 2, 4, 5, 4


MASKS = {
    "none": lambda total: None,
    "keys": lambda total: np.arange(2 * total).reshape(2, total) % 3 > 0,
    "pairs": lambda total: np.arange(2 * TOKENS * total).reshape(2, TOKENS, total) % 3 > 0,
    "end": lambda total: np.array([total - 1, 2]),
    "end and start": lambda total: np.array([total, total - 1, 1, 0]),
    "lengths": lambda total: np.array([total - 1, 2, 0, 4, 8, 0, total, 2 * total]),
    "one": lambda total: np.zeros((2, 1)),
}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("mask", ["none", "keys", "pairs", "end", "end and start", "one"])
@pytest.mark.thinned(3)
def test_contrib_attention(mask, past, causal):
    """onnxruntime takes no bias of the scores beside a cache, and no cache for heads of two sizes."""
    flagged, size = MASKS[mask](TOKENS + past), HEAD_SIZE if past or causal else 6
    feeds = {
        "x": normal(BATCH, TOKENS, 10), "weights": normal(10, 16 + 2 * size) / 2, "bias": normal(16 + 2 * size),
        "mask": None if flagged is None else flagged.astype(np.int32),
        "past": normal(2, BATCH, 2, past, HEAD_SIZE) if past else None,
        "added": None if past else normal(1 if causal else BATCH, 1, TOKENS, TOKENS),
    }  # fmt: skip
    attributes = {"num_heads": 2, "unidirectional": causal}
    attributes |= {"mask_filter_value": -50.0, "scale": 0.3} if causal else {}
    attributes |= {"qkv_hidden_sizes": [8, 8, 2 * size]} if size != HEAD_SIZE else {}
    matches_its_kernel("Attention", feeds, ("y", "present") if past or causal else ("y",), attributes)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("form", ["tokens", "cache", "heads", "one query"])
@pytest.mark.parametrize("mask", ["none", "keys", "pairs", "end", "lengths"])
@pytest.mark.thinned(8, 4)
def test_contrib_multi_head_attention(mask, form, causal):
    past, tokens, size = (3 if form == "cache" else 0), (1 if form == "one query" else TOKENS), 4 if causal else 6
    size = HEAD_SIZE if form in ("cache", "heads") else size
    flagged = MASKS[mask](KEYS + past)
    if mask == "pairs":
        flagged = flagged[:, :tokens]
    by_head = form == "heads"
    feeds = {
        "q": normal(BATCH, tokens, 8),
        "k": normal(BATCH, 2, KEYS, HEAD_SIZE) if by_head else normal(BATCH, KEYS, 8, seed=1),
        "v": normal(BATCH, 2, KEYS, size, seed=2) if by_head else normal(BATCH, KEYS, 2 * size, seed=2),
        "bias": normal(16 + 2 * size),
        "mask": None if flagged is None else flagged.astype(np.int32),
        "added": normal(BATCH, 2, tokens, KEYS + past) if causal else None,
        "past_key": normal(BATCH, 2, past, HEAD_SIZE) if past else None,
        "past_value": normal(BATCH, 2, past, HEAD_SIZE, seed=1) if past else None,
    }  # fmt: skip
    attributes = {
        "num_heads": 2,
        "unidirectional": causal,
        "mask_filter_value": -40.0,
        **({"scale": 0.3} if past else {}),
    }
    matches_its_kernel("MultiHeadAttention", feeds, CACHES if past else ("y",), attributes)
