"""GroupQueryAttention (domain com.microsoft), which deployed language models hold, in operators of the standard.

Each sample has its own number of tokens, counted in `seqlens_k`, and the new ones follow those in its cache: at their
places, which decide what is visible, how queries and keys are rotated, and where the caches hold them.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; what it leaves open (queries and
keys behind the end of a sample, rows of caches that are not in use) is what onnxruntime's CPU kernel computes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.autodiff.definitions.attention import appended, attend, heads, unheads
from onnxgrad_cli.autodiff.definitions.contrib_attention import rotated
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown


class Places(NamedTuple):
    """Where the new tokens stand among all tokens of their sample.

    Attributes:
        query: [batch, tokens, ...] with all new tokens, those behind the end of a sample among them.
        end: how many tokens a sample has after this step, int64 [batch, 1, 1, 1].
        before: how many it had before this step; None where there is no cache, so that it had none.
        gone: how many of those its cache holds no longer, and will hold no longer after this step.
    """

    query: Val
    end: Val
    before: Val | None
    gone: tuple[int | Val, int | Val] = (0, 0)

    def new(self, op: Op, axis: int) -> Val:
        """The places of the new tokens along `axis` of [batch or 1, 1, 1, 1]."""
        steps = _steps(op, self.query, 1, axis)
        return steps if self.before is None else steps + self.before


@definition("GroupQueryAttention", domain="com.microsoft", needs_opset=16)
def group_query_attention(
    op, query, key=None, value=None, past_key=None, past_value=None, seqlens_k=None, total_sequence_length=None,
    cos_cache=None, sin_cache=None, position_ids=None, attention_bias=None, head_sink=None, k_scale=None,
    v_scale=None, q_norm_weight=None, k_norm_weight=None, query_seqlens=None, *,
    num_heads, kv_num_heads, scale=None, softcap=0.0, do_rotary=0, rotary_interleaved=0,
    local_window_size=-1, smooth_softmax=-1, causal=1, qk_norm_epsilon=1e-6, q_norm_epsilon=None, k_norm_epsilon=None,
    qk_output=0, sliding_window_cache=0, kv_cache_bit_width=0, k_quant_type="NONE", v_quant_type="NONE",
):  # fmt: skip
    """Attention over the cached and the new tokens of each sample, and the caches with the new tokens in them."""
    if qk_output:
        raise Unknown("its products of queries and keys are an output (qk_output)")
    if kv_cache_bit_width or {k_quant_type, v_quant_type} != {"NONE"} or not (k_scale is None is v_scale):
        raise Unknown("its caches are quantized")
    q, k, v = _projections(op, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None:
        q = _normalized(op, q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)
        k = _normalized(op, k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)
    places = _places(op, query, seqlens_k, query_seqlens, past_key, local_window_size if sliding_window_cache else 0)
    if do_rotary:
        at = _rotary_places(op, places, position_ids, None if query_seqlens is not None else total_sequence_length)
        half = op.size(cos_cache, 1)
        if not isinstance(half, int):
            raise Unknown("how many numbers of a head it rotates is unknown")
        q, k = (rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved, size=2 * half) for x in (q, k))
    at = places.new(op, 3)
    keys, values, present_key, present_value = k, v, k, v
    if places.before is not None:
        keys = appended(op, past_key, k)
        values = op.state(appended(op, past_value, v), keys.shape)
        slot, past = _steps(op, keys, 2, 3), op.size(past_key, 2)
        held = slot + places.gone[0]
        held = op.Where(held < places.before, held, places.end)  # what the cache does not use is hidden from all
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
    """Queries, keys and values by head; without keys and values, all three lie side by side in the queries."""
    if key is None or value is None:
        width, groups = query.shape[2], count + 2 * kv_count
        if not isinstance(width, int):
            raise Unknown("the size of its heads is unknown")
        size = width // groups
        query, key, value = op.split(query, [count * size, kv_count * size, kv_count * size], axis=2)
    elif key.shape[1] == 0:
        raise Unknown("it adds no keys to a cache that another layer fills")
    return heads(op, query, count), heads(op, key, kv_count), heads(op, value, kv_count)


def _normalized(op: Op, x: Val, scale: Val, epsilon: float) -> Val:
    """Each head's row over its root mean square."""
    v = op.wide(x)
    return op.cast(v / op.Sqrt(op.mean(v * v, [3]) + epsilon) * op.cast(scale, v), x)


def _places(op: Op, query: Val, last: Val, valid: Val | None, past: Val | None, window: int) -> Places:
    """Where the new tokens stand.

    Args:
        last: the place of each sample's last token.
        valid: how many new ones each has; None: all that fit.
        past: a cache.
        window: how many of the last tokens it holds at least; 0: it holds all.
    """
    end = _each(op, last) + 1
    if past is None:
        return Places(query, end, None)
    before = op.Max(end - op.size(query, 1), op.const(0)) if valid is None else end - _each(op, valid)
    if not window:
        return Places(query, end, before)
    return Places(query, end, before, (_gone(op, before, past, window), _gone(op, end, past, window)))


def _gone(op: Op, tokens: Val, cache: Val, window: int) -> Val:
    """How many of so many tokens a cache holds no longer: from time to time it drops all that no window needs."""
    room = op.vector([op.size(cache, 2)])
    batch = op.Max(room - (window - 1), op.const(1))
    over = op.Max(tokens - room, op.const(0))
    return (over + (batch - 1)) / batch * batch


def _each(op: Op, counts: Val) -> Val:
    """A number of each sample, int64 [batch, 1, 1, 1], of [batch] or [batch, 1]."""
    return op.unsqueeze(op.cast(counts, TensorProto.INT64), [1, 2, 3][counts.rank - 1 :])


def _steps(op: Op, x: Val, axis: int, to: int) -> Val:
    """0, 1, ... for each place along an axis of `x`, int64, along the axis `to` of four.

    Of a Range onnx does not infer that it is as long as that axis, and what it is added to would lose its shape.
    """
    size = op.size(x, axis)
    if isinstance(size, int):
        return op.steps(size, axis=to, rank=4)
    one = numpy_helper.from_array(np.ones(1, np.int64))
    ones = op.ConstantOfShape(size, value=one, shape=(x.shape[axis],))
    return op.unsqueeze(op.CumSum(ones, op.const(0), exclusive=1), [i for i in range(4) if i != to])


def _rotary_places(op: Op, places: Places, given: Val | None, total: Val | None) -> Val:
    """By how many steps each new token is rotated, [batch or 1, tokens].

    Of positions that are given for a prompt, of as many tokens as there are in `total`, the first one counts.
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
    """-inf for the keys that a query must not see, by the places `at` which they stand; 0 for the others."""
    visible = at < places.end
    if causal:
        query = places.new(op, 2)
        visible = op.And(visible, at <= query)
        if window >= 0:
            visible = op.And(visible, at > query - window)
    return op.Where(visible, op.const(0.0, q), op.const(-np.inf, q))


def _of_keys(op: Op, bias: Val, at: Val) -> Val:
    """The columns of `bias`, which are for places, that belong to the keys."""
    last = op.dim(bias, 3) - 1
    lead = [op.dim(at, 0), *(op.dim(bias, axis) for axis in (1, 2))]
    index = op.Expand(op.Min(at, last), op.vector([*lead, op.dim(at, 3)]))
    every = op.Expand(bias, op.vector([*lead, op.dim(bias, 3)]))
    return op.GatherElements(every, index, axis=3)


def _caches(
    op: Op, both: tuple[Val, Val], parts: tuple[Val, Val], places: Places, total: Val | None
) -> tuple[Val, ...]:
    """The caches after this step: the new tokens behind those of a sample, then zeros.

    Args:
        both: keys and values of the caches before this step, followed by the new ones.
        parts: the keys of both kinds.
        total: how many tokens the longest sample has, for which there is room; None: as much room as there was.
    """
    past, new = parts
    kept = op.size(past, 2)
    length = op.vector([kept])
    if total is not None:
        length = op.Max(op.reshape(op.cast(total, TensorProto.INT64), [1]), length)
    place = op.steps(length, axis=2, rank=4) + places.gone[1]
    behind = op.Min(place - places.before, op.vector([op.size(new, 2)])) + kept  # the zeros come after all tokens
    index = op.Where(place < places.before, place - places.gone[0], behind)
    batch, count, size = (op.size(new, axis) for axis in (0, 1, 3))
    index = op.Expand(index, op.vector([batch, count, length, size]))
    zeros = op.zeros([batch, count, 1, size], new)
    shape = (new.shape[0], new.shape[1], None, new.shape[3])
    padded = (op.Concat(each, zeros, axis=2) for each in both)
    return tuple(op.state(op.GatherElements(each, index, axis=2), shape) for each in padded)


def _sink(op: Op, sink: Val | None, smooth: int, q: Val) -> Val | None:
    """The score of a key without a value that each head may attend to, [heads, 1, 1]."""
    if sink is not None:
        return op.unsqueeze(sink, [1, 2])
    return op.const(np.zeros((1, 1, 1)), q) if smooth == 1 else None
