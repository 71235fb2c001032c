"""Attention of decoders (com.microsoft) beside onnxruntime's kernels and central differences."""

import numpy as np
import pytest

from tests.autodiff.definitions.test_contrib import FLOATS, check, normal

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
