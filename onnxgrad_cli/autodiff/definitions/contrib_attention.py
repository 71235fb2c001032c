"""Attention as onnxruntime's optimizer writes it (domain com.microsoft), in operators of the standard.

Its masks are addends of -10000 rather than -inf, its caches may be one tensor, its projections part of the operator;
the attention itself is that of `definitions.attention`. Forms that onnxruntime has no CPU kernel for are refused:
nothing would prove them.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.definitions.attention import BIASED, appended, attend, heads, unheads
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.autodiff.rules.attention import pairs, split_heads, unpaired
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

MASKED = -10000.0


@definition("Attention", domain="com.microsoft")
def attention(
    op, x, weights, bias=None, mask=None, past=None, attention_bias=None, past_sequence_length=None, *,
    num_heads, unidirectional=0, scale=None, mask_filter_value=MASKED, qkv_hidden_sizes=None,
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
        k, v = appended(op, past_k, k), appended(op, past_v, v)
    added = _added(op, q, k, mask, before, True, unidirectional, mask_filter_value, attention_bias)
    y, _ = attend(op, q, k, v, added, scale=scale or None)
    if k.shape[3] != v.shape[3]:
        return unheads(op, y)
    return unheads(op, y), op.Concat(op.unsqueeze(k, [0]), op.unsqueeze(v, [0]), axis=0)


@definition("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    op, query, key=None, value=None, bias=None, mask=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, cache_indirection=None, *,
    num_heads, unidirectional=0, scale=None, mask_filter_value=MASKED,
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
        k, v = appended(op, past_key, k), appended(op, past_value, v)
    added = _added(op, q, k, mask, before, square, unidirectional, mask_filter_value, attention_bias)
    y, scores = attend(op, q, k, v, added, scale=scale or None, mode=BIASED)
    return unheads(op, y), k, v, scores


@definition("DecoderMaskedMultiHeadAttention", domain="com.microsoft")
def decoder_masked_multi_head_attention(
    op, query, key=None, value=None, mask=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, beam_width=None, cache_indirection=None, bias=None, *,
    num_heads, mask_filter_value=MASKED, output_qk=0, past_present_share_buffer=0, scale=None,
):  # fmt: skip
    """Attention of one token: to keys and values by head, or to those in a buffer, into which its own are written."""
    if beam_width is not None or cache_indirection is not None:
        raise Unknown("it reads its cache by beam")
    if output_qk:
        raise Unknown("its products of queries and keys are an output (output_qk)")
    if key is None or value is None or query.shape[1] != 1:
        raise Unknown("its queries, keys and values are packed, or they are of several tokens")
    q, k, v = query, key, value
    size = query.shape[2]
    if bias is not None:
        if not isinstance(size, int):
            raise Unknown("the size of its heads is unknown")
        parts = op.split(bias, [size, size, size], axis=0)
        q = q + parts[0]
        if key.rank == 3:
            k, v = k + parts[1], v + parts[2]
    q = heads(op, q, num_heads)
    if past_key is None:
        if key.rank != 4 or attention_bias is not None:
            raise Unknown("it has no cache, and its keys are not by head or have a bias")
        added = _added(op, q, k, mask, 0, False, 0, mask_filter_value, None)
        return unheads(op, attend(op, q, k, v, added, scale=scale or None)[0])
    if not past_present_share_buffer or past_sequence_length is None or key.rank != 3:
        raise Unknown("its cache is not a buffer, which onnxruntime's CPU kernel needs")
    count = op.reshape(op.cast(past_sequence_length, TensorProto.INT64), [1])
    buffers = [_inserted(op, past, heads(op, new, num_heads), count) for past, new in ((past_key, k), (past_value, v))]
    k, v = (op.Slice(x, op.ints([0]), count + 1, op.ints([2]), shape=(*x.shape[:2], None, x.shape[3])) for x in buffers)
    added = _added(op, q, k, mask, 0, False, 0, mask_filter_value, attention_bias)
    return unheads(op, attend(op, q, k, v, added, scale=scale or None)[0]), *buffers


def _inserted(op: Op, buffer: Val, new: Val, place: Val) -> Val:
    """Return a buffer of keys or values, [batch, heads, tokens, size], with a token written at a place."""
    here = op.Equal(op.steps(op.size(buffer, 2), axis=2, rank=4), place)
    return op.state(op.Where(here, new, buffer), buffer.shape)


@definition("RotaryEmbedding", domain="com.microsoft", needs_opset=16)
def rotary_embedding(
    op, x, positions, cos_cache, sin_cache, *,
    interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, scale=1.0,
):  # fmt: skip
    """As the standard's, but that tokens may be counted from one first position."""
    if is_packed_batching or scale != 1.0:
        raise Unknown("it rotates packed batches, or scales, which onnxruntime's CPU kernel does not")
    v, axis = _by_head(op, x, op.size(cos_cache, 1), num_heads, rotary_embedding_dim)
    if positions.rank < 2:
        positions = op.reshape(positions, [1, 1]) + op.steps(op.size(x, 1 if x.rank == 3 else 2))
    y = rotated(op, v, cos_cache, sin_cache, positions, interleaved, axis=axis, size=rotary_embedding_dim)
    return op.reshape_like(y, x)


@definition("MRotaryEmbedding", domain="com.microsoft", needs_opset=16)
def multimodal_rotary_embedding(
    op, x, positions, cos_cache, sin_cache, *, mrope_section, mrope_layout=0,
    interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, scale=1.0,
):  # fmt: skip
    """A token has three positions, [3, batch, tokens]; each pair of a head's numbers is rotated by one of them."""
    if is_packed_batching or scale != 1.0:
        raise Unknown("it rotates packed batches, or scales, which onnxruntime's CPU kernel does not")
    half = sum(mrope_section)
    v, axis = _by_head(op, x, half, num_heads, rotary_embedding_dim)
    if mrope_layout:  # by turns, for as long as there are pairs of the second and third kind
        pair = np.arange(half)
        kind = sum(np.where((pair % 3 == i) & (pair < 3 * mrope_section[i]), i, 0) for i in (1, 2))
    else:
        kind = np.repeat(np.arange(3), mrope_section)

    def chosen(cache: Val) -> Val:
        by_kind = op.split(op.Gather(cache, positions, axis=0), [1, 1, 1], axis=0)
        first, second, third = (op.squeeze(part, [0]) for part in by_kind)
        mixed = op.Where(op.const(kind == 1), second, op.Where(op.const(kind == 2), third, first))
        return op.unsqueeze(mixed, [axis])

    y = _turned(op, v, chosen(cos_cache), chosen(sin_cache), half, interleaved, rotary_embedding_dim)
    return op.reshape_like(y, x)


def _by_head(op: Op, x: Val, half: int | Val, count: int, size: int) -> tuple[Val, int]:
    """`x` with an axis for its heads, and which one that is; heads are of twice `half` numbers without a `size`."""
    if x.rank == 4:
        return x, 1
    if size:
        return split_heads(op, x, count), 2
    if not isinstance(half, int):
        raise Unknown("the size of its heads is unknown")
    width = x.shape[2]
    heads = width // (2 * half) if isinstance(width, int) else None
    return op.Reshape(x, op.ints([0, 0, -1, 2 * half]), shape=(*x.shape[:2], heads, 2 * half)), 2


def rotated(
    op: Op, x: Val, cos_cache: Val, sin_cache: Val, positions: Val, interleaved: int, *, axis: int = 1, size: int = 0
) -> Val:
    """`x` of [batch, heads, tokens, size], or with the heads at another `axis`, rotated by its tokens' positions.

    Args:
        cos_cache, sin_cache: [positions, pairs].
        positions: [batch or 1, tokens].
        size: how many numbers of a head are rotated; 0 is all of them.
    """
    cos, sin = (op.unsqueeze(op.Gather(cache, positions, axis=0), [axis]) for cache in (cos_cache, sin_cache))
    return _turned(op, x, cos, sin, op.size(cos_cache, 1), interleaved, size)


def _turned(op: Op, x: Val, cos: Val, sin: Val, half: int | Val, interleaved: int, size: int) -> Val:
    """`x`, of whose heads `half` pairs of numbers are rotated by angles of these cosines and sines."""
    a, b, rest = pairs(op, x, half, interleaved, size)
    return unpaired(op, a * cos - b * sin, a * sin + b * cos, rest, interleaved)


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
