"""Attention as onnxruntime's optimizer writes it (domain com.microsoft), in operators of the standard.

Its masks are addends of -10000 rather than -inf, its caches may be one tensor, its projections part of the operator;
the attention itself is that of `definitions.attention`. Forms that onnxruntime has no CPU kernel for are refused:
nothing would prove them.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.autodiff.definitions.attention import BIASED, attend, heads, unheads
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.autodiff.rules.attention import pairs, split_heads, unpaired
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

MASKED = -10000.0


@definition("Attention", domain="com.microsoft")
def attention(
    op, x, weights, bias=None, mask=None, past=None, attention_bias=None, past_sequence_length=None, *,
    num_heads=None, unidirectional=0, scale=None, mask_filter_value=MASKED, qkv_hidden_sizes=None,
    do_rotary=0, rotary_embedding_dim=0, past_present_share_buffer=0,
):  # fmt: skip
    """Q, K and V are three projections side by side; the cache holds K and V one after the other."""
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise Unknown("it rotates, or writes into a shared buffer, which onnxruntime's CPU kernel does not")
    width = weights.shape[1]
    if not qkv_hidden_sizes and isinstance(width, str):
        raise Unknown("the size of its projections is unknown")
    projected = x @ weights if bias is None else x @ weights + bias
    q, k, v = (heads(op, part, num_heads) for part in op.split(projected, qkv_hidden_sizes or [width // 3] * 3, axis=2))
    before: int | Val = 0
    if past is not None:
        before = op.size(past, 3)
        past_k, past_v = (op.squeeze(part, [0]) for part in op.split(past, [1, 1], axis=0))
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
    added = _added(op, q, k, mask, before, True, unidirectional, mask_filter_value, attention_bias)
    y, _ = attend(op, q, k, v, added, scale=scale or None)
    if k.shape[3] != v.shape[3]:
        return unheads(op, y)
    return unheads(op, y), op.Concat(op.unsqueeze(k, [0]), op.unsqueeze(v, [0]), axis=0)


@definition("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    op, query, key=None, value=None, bias=None, mask=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, cache_indirection=None, *,
    num_heads=None, unidirectional=0, scale=None, mask_filter_value=MASKED,
):  # fmt: skip
    """Q, K and V are given, K and V as tokens or already by head; their projections' biases may be left to do."""
    if key is None or value is None or query.rank != 3 or key.rank == 5:
        raise Unknown("its queries, keys and values are packed, which onnxruntime's CPU kernel does not take")
    if past_sequence_length is not None or cache_indirection is not None:
        raise Unknown("it writes into a shared buffer")
    q, k, v = query, key, value
    if bias is not None:
        size, total = query.shape[2], bias.shape[0]
        if isinstance(size, str) or isinstance(total, str):
            raise Unknown("the size of its heads is unknown")
        parts = op.split(bias, [size, size, total - 2 * size], axis=0)
        q = q + parts[0]
        if key.rank == 3:  # keys and values by head have theirs already
            k, v = k + parts[1], v + parts[2]
    q = heads(op, q, num_heads)
    if key.rank == 3:
        k, v = heads(op, k, num_heads), heads(op, v, num_heads)
    before: int | Val = 0
    square = q.shape[2] == k.shape[2] != "?"
    if past_key is not None:
        before = op.size(past_key, 2)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    added = _added(op, q, k, mask, before, square, unidirectional, mask_filter_value, attention_bias)
    y, scores = attend(op, q, k, v, added, scale=scale or None, mode=BIASED)
    return unheads(op, y), k, v, scores


@definition("RotaryEmbedding", domain="com.microsoft", needs_opset=16)
def rotary_embedding(
    op, x, positions, cos_cache, sin_cache, *,
    interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, scale=1.0,
):  # fmt: skip
    """As the standard's, but that tokens may be counted from one first position."""
    if is_packed_batching or scale != 1.0:
        raise Unknown("it rotates packed batches, or scales, which onnxruntime's CPU kernel does not")
    by_token = x.rank == 3
    half = op.size(cos_cache, 1)
    if by_token and rotary_embedding_dim:
        v = split_heads(op, x, num_heads)
    elif by_token:
        if not isinstance(half, int):
            raise Unknown("the size of its heads is unknown")
        width = x.shape[2]
        count = width // (2 * half) if isinstance(width, int) else None
        v = op.Reshape(x, op.ints([0, 0, -1, 2 * half]), shape=(*x.shape[:2], count, 2 * half))
    else:
        v = x
    if positions.rank < 2:
        positions = op.reshape(positions, [1, 1]) + op.steps(op.size(x, 1 if by_token else 2))
    axis = 2 if by_token else 1
    cos, sin = (op.unsqueeze(op.Gather(cache, positions, axis=0), [axis]) for cache in (cos_cache, sin_cache))
    a, b, rest = pairs(op, v, half, interleaved, rotary_embedding_dim)
    return op.reshape_like(unpaired(op, a * cos - b * sin, a * sin + b * cos, rest, interleaved), x)


def _added(
    op: Op,
    q: Val,
    k: Val,
    mask: Val | None,
    past: int | Val,
    square: bool,
    causal: int,
    masked: float,
    bias: Val | None,
) -> Val | None:
    """What is added to the scores: `masked` where the mask says so, more where a key is yet to come, and the bias.

    Args:
        past: how many keys come from a cache.
        square: whether there are surely as many queries as other keys.
    """
    terms = [] if bias is None else [bias]
    if mask is not None and not (mask.rank == 2 and mask.shape[1] == 1):  # one flag for all keys tells none apart
        terms.append(op.Where(_shown(op, q, k, mask), op.const(0.0, q), op.const(masked, q)))
    if causal:
        query = op.steps(op.size(q, 2), axis=0, rank=2)
        seen = op.steps(op.size(k, 2)) <= query + past
        if not square:  # onnxruntime's kernel hides nothing from the last query
            seen = op.Or(seen, op.Equal(query + 1, op.dim(q, 2)))
        terms.append(op.Where(seen, op.const(0.0, q), op.const(np.finfo(np.float32).min, q)))
    if not terms:
        return None
    added = terms[0]
    for term in terms[1:]:
        added = added + term
    return added


def _shown(op: Op, q: Val, k: Val, mask: Val) -> Val:
    """Which keys a mask shows, by its form: flags for keys or for pairs, or where the keys end, and begin."""
    if mask.rank == 2:
        return op.unsqueeze(mask > 0, [1, 2])
    if mask.rank == 3:
        return op.unsqueeze(mask > 0, [1])
    if mask.rank != 1:
        raise Unknown("its mask has a form that onnxruntime's CPU kernel does not take")
    batch, count = q.shape[0], mask.shape[0]
    key = op.cast(op.steps(op.size(k, 2)), mask)
    if batch == count != "?":
        return key < op.unsqueeze(mask, [1, 2, 3])
    if isinstance(batch, int) and count in (2 * batch, 3 * batch + 2):
        parts = op.split(mask, [batch] * 2 if count == 2 * batch else [batch, 2 * batch + 2], axis=0)
        shown = key < op.unsqueeze(parts[0], [1, 2, 3])
        return op.And(shown, key >= op.unsqueeze(parts[1], [1, 2, 3])) if count == 2 * batch else shown
    raise Unknown("whether its mask says where keys end, or begin too, is unknown")
