"""Definition of GroupQueryAttention (domain com.microsoft), which is common in deployed language models.

Each sample has its own number of tokens, which `seqlens_k` gives. The new tokens of a sample follow the tokens in its
cache. The *place* of a token is its position among all tokens of its sample, cached and new. The places determine which
keys are visible, how queries and keys are rotated, and in which rows of the caches tokens are stored.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. That page does not describe queries
and keys after the end of a sample, and unused rows of caches. There, the definition follows onnxruntime's CPU kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.autodiff.definitions.attention import appended, attend, heads, unheads
from onnxgrad_cli.autodiff.definitions.contrib_attention import rotated
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import MICROSOFT


class Places(NamedTuple):
    """The positions of the new tokens among all tokens of their sample.

    Attributes:
        query: a value [batch, tokens, ...] with all new tokens, including those after the end of a sample.
        end: the number of tokens of each sample after this step, int64 [batch, 1, 1, 1].
        before: the number of tokens of each sample before this step; None if there is no cache, which means 0.
        gone: two numbers: how many tokens the cache has dropped before this step, and how many after it.
    """

    query: Val
    end: Val
    before: Val | None
    gone: tuple[int | Val, int | Val] = (0, 0)

    def new(self, op: Op, axis: int) -> Val:
        """Return the positions of the new tokens as int64 of rank 4: [batch or 1] on axis 0, the tokens on `axis`."""
        steps = _steps(op, self.query, 1, axis)
        return steps if self.before is None else steps + self.before


@definition("GroupQueryAttention", domain=MICROSOFT, needs_opset=16)
def group_query_attention(
    op, query, key=None, value=None, past_key=None, past_value=None, seqlens_k=None, total_sequence_length=None,
    cos_cache=None, sin_cache=None, position_ids=None, attention_bias=None, head_sink=None, k_scale=None,
    v_scale=None, q_norm_weight=None, k_norm_weight=None, query_seqlens=None, *,
    num_heads, kv_num_heads, scale=None, softcap=0.0, do_rotary=0, rotary_interleaved=0,
    local_window_size=-1, smooth_softmax=-1, causal=1, qk_norm_epsilon=1e-6, q_norm_epsilon=None, k_norm_epsilon=None,
    qk_output=0, sliding_window_cache=0, kv_cache_bit_width=0, k_quant_type="NONE", v_quant_type="NONE",
):  # fmt: skip
    """Attention of each sample to its cached and new tokens. Further outputs: the caches including the new tokens."""
    require(not qk_output, "it returns the products of queries and keys (qk_output)")
    if kv_cache_bit_width or {k_quant_type, v_quant_type} != {"NONE"} or not (k_scale is None is v_scale):
        raise Unknown("its caches are quantized")
    q, k, v = _projections(op, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None:
        q = _normalized(op, q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)
        k = _normalized(op, k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)
    places = _places(op, query, seqlens_k, query_seqlens, past_key, local_window_size if sliding_window_cache else 0)
    if do_rotary:
        at = _rotary_places(op, places, position_ids, None if query_seqlens is not None else total_sequence_length)
        half = cos_cache.known_size(1, "how many numbers of a head it rotates")
        q, k = (rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved, size=2 * half) for x in (q, k))
    at = places.new(op, 3)
    keys, values, present_key, present_value = k, v, k, v
    if places.before is not None:
        keys = appended(op, past_key, k)
        values = op.state(appended(op, past_value, v), keys.shape)
        slot, past = _steps(op, keys, 2, 3), op.size(past_key, 2)
        held = slot + places.gone[0]
        held = op.Where(held < places.before, held, places.end)  # unused rows of the cache are hidden from all queries
        at = op.Where(slot < past, held, slot + (places.before - past))
        total = None if sliding_window_cache else total_sequence_length
        present_key, present_value = _caches(op, (keys, values), (past_key, k), places, total)
    bias = _hidden(op, q, at, places, causal, local_window_size)
    if attention_bias is not None:
        added = attention_bias if places.before is None else _of_keys(op, attention_bias, at)
        bias = bias + added
    y, _ = attend(
        op, q, keys, values, bias, scale=scale or None, softcap=softcap, precision=op.wide(q).dtype,
        always=local_window_size < 0 and attention_bias is None, sink=_sink(op, head_sink, smooth_softmax, q),
    )  # fmt: skip
    return unheads(op, y), present_key, present_value


def _projections(
    op: Op, query: Val, key: Val | None, value: Val | None, count: int, kv_count: int
) -> tuple[Val, Val, Val]:
    """Return queries, keys and values split into heads. If keys and values are absent, `query` contains all three."""
    if key is None or value is None:
        size = query.known_size(2, "the size of its heads") // (count + 2 * kv_count)
        query, key, value = op.split(query, [count * size, kv_count * size, kv_count * size], axis=2)
    elif key.shape[1] == 0:
        raise Unknown("it adds no keys to its cache, which another layer fills")
    return heads(op, query, count), heads(op, key, kv_count), heads(op, value, kv_count)


def _normalized(op: Op, x: Val, scale: Val, epsilon: float) -> Val:
    """Divide the vector of each head by its root mean square, and multiply it by `scale`."""
    v = op.wide(x)
    return op.cast(v / op.Sqrt(op.mean(v * v, [3]) + epsilon) * op.cast(scale, v), x)


def _places(op: Op, query: Val, last: Val, valid: Val | None, past: Val | None, window: int) -> Places:
    """Return the positions of the new tokens.

    Args:
        op: the emitter.
        query: a value with all new tokens.
        last: the position of the last token of each sample, counted from 0, with the cached tokens.
        valid: the number of new tokens of each sample, without padding. None: every token of `query` is new, except
            that a sample has no more new tokens than `last` + 1.
        past: a cache, or None.
        window: the number of most recent tokens that the cache always contains; 0 if it contains all tokens.
    """
    end = _each(op, last) + 1
    if past is None:
        return Places(query, end, None)
    before = op.Max(end - op.size(query, 1), op.const(0)) if valid is None else end - _each(op, valid)
    if not window:
        return Places(query, end, before)
    return Places(query, end, before, (_gone(op, before, past, window), _gone(op, end, past, window)))


def _gone(op: Op, tokens: Val, cache: Val, window: int) -> Val:
    """Return the number of tokens that a cache has dropped after `tokens` tokens.

    When the cache is full, it drops all tokens outside the window at once, so the number grows in steps.
    """
    room = op.vector([op.size(cache, 2)])
    batch = op.Max(room - (window - 1), op.const(1))
    over = op.Max(tokens - room, op.const(0))
    return (over + (batch - 1)) / batch * batch


def _each(op: Op, counts: Val) -> Val:
    """Reshape one number per sample, [batch] or [batch, 1], to int64 [batch, 1, 1, 1]."""
    return op.unsqueeze(op.cast(counts, TensorProto.INT64), [1, 2, 3][counts.rank - 1 :])


def _steps(op: Op, x: Val, axis: int, to: int) -> Val:
    """Return 0, 1, ..., n - 1 along axis `to` of an int64 tensor of rank 4, where n is the size of axis `axis` of `x`.

    A Range is not used, because onnx does not infer that its length is n. Sums with a Range would then have an unknown
    shape.
    """
    size = op.size(x, axis)
    if isinstance(size, int):
        return op.steps(size, axis=to, rank=4)
    one = numpy_helper.from_array(np.ones(1, np.int64))
    ones = op.ConstantOfShape(size, value=one, shape=(x.shape[axis],))
    return op.unsqueeze(op.CumSum(ones, op.const(0), exclusive=1), [i for i in range(4) if i != to])


def _rotary_places(op: Op, places: Places, given: Val | None, total: Val | None) -> Val:
    """Return the position by which each new token is rotated, [batch or 1, tokens].

    Args:
        op: the emitter.
        places: the places of the new tokens.
        given: the input position_ids, or None if tokens are rotated by their places.
        total: the largest number of tokens of a sample, or None. If it equals the number of new tokens, the step is a
            prompt. Of `given`, only the first position is used then, and the others count up from it.
    """
    if given is None:
        return op.squeeze(places.new(op, 3), [1, 2])
    if total is None:
        return given
    first = op.Slice(op.reshape(given, [-1]), op.ints([0]), op.ints([1]), op.ints([0]), shape=(1,))
    tokens = op.size(places.query, 1)
    is_prompt = op.Equal(op.reshape(op.cast(total, TensorProto.INT64), [1]), op.vector([tokens]))
    steps = op.squeeze(_steps(op, places.query, 1, 3), [1, 2])
    return op.Where(is_prompt, steps + first, given)


def _hidden(op: Op, q: Val, at: Val, places: Places, causal: int, window: int) -> Val:
    """Return the term to add to the scores: -inf for keys that are hidden from a query, and 0 for the others.

    Args:
        op: the emitter.
        q: the queries.
        at: the places of the keys.
        places: the places of the new tokens, which are the queries.
        causal: True to hide keys after the query.
        window: the number of keys that a causal query can see: its own and those before it. Negative for all.
    """
    visible = at < places.end
    if causal:
        query = places.new(op, 2)
        visible = op.And(visible, at <= query)
        if window >= 0:
            visible = op.And(visible, at > query - window)
    return op.Where(visible, op.const(0.0, q), op.const(-np.inf, q))


def _of_keys(op: Op, bias: Val, at: Val) -> Val:
    """Select from `bias`, which has one column per place, the columns for the keys at the places `at`."""
    last = op.dim(bias, 3) - 1
    lead = [op.dim(at, 0), *(op.dim(bias, axis) for axis in (1, 2))]
    index = op.Expand(op.Min(at, last), op.vector([*lead, op.dim(at, 3)]))
    every = op.Expand(bias, op.vector([*lead, op.dim(bias, 3)]))
    return op.GatherElements(every, index, axis=3)


def _caches(
    op: Op, both: tuple[Val, Val], parts: tuple[Val, Val], places: Places, total: Val | None
) -> tuple[Val, ...]:
    """Return the caches after this step: the old tokens of a sample, then the new ones, then zeros.

    Args:
        op: the emitter.
        both: the keys and the values. Each holds the cached tokens, followed by the new ones.
        parts: the cached keys and the new keys.
        places: the places of the new tokens.
        total: the largest number of tokens of a sample. The caches grow if this is larger than their size. None keeps
            their size.
    """
    past, new = parts
    kept = op.size(past, 2)
    length = op.vector([kept])
    if total is not None:
        length = op.Max(op.reshape(op.cast(total, TensorProto.INT64), [1]), length)
    place = op.steps(length, axis=2, rank=4) + places.gone[1]
    behind = op.Min(place - places.before, op.vector([op.size(new, 2)])) + kept  # rows from here on are zero
    index = op.Where(place < places.before, place - places.gone[0], behind)
    batch, count, size = op.sizes(new, (0, 1, 3))
    index = op.Expand(index, op.vector([batch, count, length, size]))
    zeros = op.zeros([batch, count, 1, size], new)
    shape = (new.shape[0], new.shape[1], None, new.shape[3])
    padded = (op.Concat(each, zeros, axis=2) for each in both)
    return tuple(op.state(op.GatherElements(each, index, axis=2), shape) for each in padded)


def _sink(op: Op, sink: Val | None, smooth: int, q: Val) -> Val | None:
    """Return the attention sink (the score of a key without a value) of each head, [heads, 1, 1], or None."""
    if sink is not None:
        return op.unsqueeze(sink, [1, 2])
    return op.const(np.zeros((1, 1, 1)), q) if smooth == 1 else None
