"""The attention operators of onnxruntime's optimizer (domain com.microsoft), defined by standard operators.

They differ from the standard operator Attention. A mask adds -10000 to the scores instead of -inf. Keys and values may
share one cache tensor. The projections may be part of the operator. `definitions.attention` computes the attention.
Settings for which onnxruntime has no CPU kernel are refused, because their gradient could not be checked.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.definitions.attention import BIASED, appended, attend, heads, unheads
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.autodiff.rules.rotary_embedding import pairs, split_heads, unpaired
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import MICROSOFT

MASKED = -10000.0


@definition("Attention", domain=MICROSOFT)
def attention(
    op, x, weights, bias=None, mask=None, past=None, attention_bias=None, past_sequence_length=None, *,
    num_heads, unidirectional=0, scale=None, mask_filter_value=MASKED, qkv_hidden_sizes=None,
    do_rotary=0, rotary_embedding_dim=0, past_present_share_buffer=0,
):  # fmt: skip
    """Attention that computes Q, K and V from its input with one weight. The cache is a single tensor: K, then V."""
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise Unknown("it rotates, or writes into a shared buffer, which onnxruntime's CPU kernel does not support")
    width = weights.shape[1]
    require(qkv_hidden_sizes or not isinstance(width, str), "the size of its projections is unknown")
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


@definition("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    op, query, key=None, value=None, bias=None, mask=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, cache_indirection=None, *,
    num_heads, unidirectional=0, scale=None, mask_filter_value=MASKED,
):  # fmt: skip
    """Attention of given Q, K and V. K and V are [batch, tokens, size], or are already split into heads.

    The operator adds the biases of the projections if it has them as an input.
    """
    if key is None or value is None or query.rank != 3 or key.rank == 5:
        raise Unknown("its queries, keys and values are packed, which onnxruntime's CPU kernel does not support")
    require(past_sequence_length is None and cache_indirection is None, "it writes into a shared buffer")
    q, k, v = query, key, value
    if bias is not None:
        size, total = (x.known_size(-1, "the size of its heads") for x in (query, bias))
        parts = op.split(bias, [size, size, total - 2 * size], axis=0)
        q, k, v = _biased(q, k, v, parts)
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


@definition("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked_multi_head_attention(
    op, query, key=None, value=None, mask=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, beam_width=None, cache_indirection=None, bias=None, *,
    num_heads, mask_filter_value=MASKED, output_qk=0, past_present_share_buffer=0, scale=None,
):  # fmt: skip
    """Attention of one new token to given keys and values (already split into heads), or to those in a buffer.

    With a buffer, the key and the value of the new token are first written into it.
    """
    require(beam_width is None and cache_indirection is None, "it reads its cache by beam")
    require(not output_qk, "it returns the products of queries and keys (output_qk)")
    if key is None or value is None or query.shape[1] != 1:
        raise Unknown("its queries, keys and values are packed, or contain several tokens")
    q, k, v = query, key, value
    if bias is not None:
        parts = op.split(bias, [query.known_size(2, "the size of its heads")] * 3, axis=0)
        q, k, v = _biased(q, k, v, parts)
    q = heads(op, q, num_heads)
    if past_key is None:
        if key.rank != 4 or attention_bias is not None:
            raise Unknown("it has no cache, and its keys are not split into heads or have a bias")
        added = _added(op, q, k, mask, 0, False, 0, mask_filter_value, None)
        return unheads(op, attend(op, q, k, v, added, scale=scale or None)[0])
    if not past_present_share_buffer or past_sequence_length is None or key.rank != 3:
        raise Unknown("its cache is not a buffer, but onnxruntime's CPU kernel requires one")
    count = op.reshape(op.cast(past_sequence_length, TensorProto.INT64), [1])
    buffers = [_inserted(op, past, heads(op, new, num_heads), count) for past, new in ((past_key, k), (past_value, v))]
    k, v = (op.Slice(x, op.ints([0]), count + 1, op.ints([2]), shape=(*x.shape[:2], None, x.shape[3])) for x in buffers)
    added = _added(op, q, k, mask, 0, False, 0, mask_filter_value, attention_bias)
    return unheads(op, attend(op, q, k, v, added, scale=scale or None)[0]), *buffers


def _biased(q: Val, k: Val, v: Val, biases: Sequence[Val]) -> tuple[Val, Val, Val]:
    """Add biases. Keys and values that are split into heads already include theirs."""
    return q + biases[0], *((k, v) if k.rank == 4 else (k + biases[1], v + biases[2]))


def _inserted(op: Op, buffer: Val, new: Val, place: Val) -> Val:
    """Return a buffer of keys or values, [batch, heads, tokens, size], in which the token at `place` is `new`."""
    here = op.Equal(op.steps(op.size(buffer, 2), axis=2, rank=4), place)
    return op.state(op.Where(here, new, buffer), buffer.shape)


@definition("RotaryEmbedding", domain=MICROSOFT, needs_opset=16)
def rotary_embedding(
    op, x, positions, cos_cache, sin_cache, *,
    interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, scale=1.0,
):  # fmt: skip
    """The standard operator RotaryEmbedding, except that `positions` may hold only the position of the first token."""
    _check_rotation(is_packed_batching, scale)
    v, axis = _by_head(op, x, op.size(cos_cache, 1), num_heads, rotary_embedding_dim)
    if positions.rank < 2:
        positions = op.reshape(positions, [1, 1]) + op.steps(op.size(x, 1 if x.rank == 3 else 2))
    y = rotated(op, v, cos_cache, sin_cache, positions, interleaved, axis=axis, size=rotary_embedding_dim)
    return op.reshape_like(y, x)


@definition("MRotaryEmbedding", domain=MICROSOFT, needs_opset=16)
def multimodal_rotary_embedding(
    op, x, positions, cos_cache, sin_cache, *, mrope_section, mrope_layout=0,
    interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, scale=1.0,
):  # fmt: skip
    """Rotary embedding with three positions per token, [3, batch, tokens], of which each pair of a head uses one."""
    _check_rotation(is_packed_batching, scale)
    half = sum(mrope_section)
    v, axis = _by_head(op, x, half, num_heads, rotary_embedding_dim)
    if mrope_layout:  # the three kinds of positions alternate until the second and third kind are used up
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


def _check_rotation(packed: int, scale: float) -> None:
    known = not packed and scale == 1.0
    require(known, "it rotates packed batches, or has scales, which onnxruntime's CPU kernel does not support")


def _by_head(op: Op, x: Val, half: int | Val, count: int, size: int) -> tuple[Val, int]:
    """Return `x` with a separate axis for heads, and that axis. If `size` is 0, a head has 2 * `half` elements."""
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
    """Rotate `x` by the positions of its tokens.

    Args:
        x: [batch, heads, tokens, size] if `axis` is 1. `axis` is the position of the heads.
        cos_cache, sin_cache: [positions, pairs].
        positions: [batch or 1, tokens].
        size: the number of elements of a head to rotate; 0 means all of them.
    """
    cos, sin = (op.unsqueeze(op.Gather(cache, positions, axis=0), [axis]) for cache in (cos_cache, sin_cache))
    return _turned(op, x, cos, sin, op.size(cos_cache, 1), interleaved, size)


def _turned(op: Op, x: Val, cos: Val, sin: Val, half: int | Val, interleaved: int, size: int) -> Val:
    """Rotate `half` pairs of elements in each head of `x`, by the angles whose cosines and sines are given."""
    a, b, rest = pairs(op, x, half, interleaved, size)
    return unpaired(op, a * cos - b * sin, a * sin + b * cos, rest, interleaved)


def _added(
    op: Op, q: Val, k: Val, mask: Val | None, past: int | Val, square: bool, causal: int, masked: float,
    bias: Val | None,
) -> Val | None:  # fmt: skip
    """Return the sum of mask, causal mask and bias, which is added to the scores, or None if all are absent.

    The mask adds `masked` to the scores of keys that it hides. The causal mask adds the lowest float32 number to the
    scores of later keys.

    Args:
        past: the number of keys that come from a cache.
        square: True if it is known at build time that the number of queries equals the number of keys that do not come
            from a cache.
    """
    terms = [] if bias is None else [bias]
    # A mask with a single flag per sample adds the same number to all scores, so it does not change the softmax.
    if mask is not None and not (mask.rank == 2 and mask.shape[1] == 1):
        terms.append(op.Where(_shown(op, q, k, mask), op.const(0.0, q), op.const(masked, q)))
    if causal:
        query = op.steps(op.size(q, 2), axis=0, rank=2)
        seen = op.steps(op.size(k, 2)) <= query + past
        if not square:  # onnxruntime's kernel hides no key from the last query
            seen = op.Or(seen, op.Equal(query + 1, op.dim(q, 2)))
        terms.append(op.Where(seen, op.const(0.0, q), op.const(np.finfo(np.float32).min, q)))
    return reduce(add, terms) if terms else None


def _shown(op: Op, q: Val, k: Val, mask: Val) -> Val:
    """Return a boolean value that is true for the keys that are not masked.

    A mask of rank 2 has a flag for each key, and a mask of rank 3 a flag for each pair of query and key. A mask of rank
    1 holds the positions at which the keys of each sample end, and maybe also those at which they begin.
    """
    if mask.rank == 2:
        return op.unsqueeze(mask > 0, [1, 2])
    if mask.rank == 3:
        return op.unsqueeze(mask > 0, [1])
    require(mask.rank == 1, "onnxruntime's CPU kernel does not support the shape of its mask")
    batch, count = q.shape[0], mask.shape[0]
    key = op.cast(op.steps(op.size(k, 2)), mask)
    if batch == count != "?":
        return key < op.unsqueeze(mask, [1, 2, 3])
    if isinstance(batch, int) and count in (2 * batch, 3 * batch + 2):
        parts = op.split(mask, [batch] * 2 if count == 2 * batch else [batch, 2 * batch + 2], axis=0)
        shown = key < op.unsqueeze(parts[0], [1, 2, 3])
        return op.And(shown, key >= op.unsqueeze(parts[1], [1, 2, 3])) if count == 2 * batch else shown
    raise Unknown(
        "it is unknown whether its mask has only the ends of the keys of each sample, or also their beginnings"
    )
