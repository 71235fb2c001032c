"""Linear attention and causal convolutions with a state (domain com.microsoft), in operators of the standard.

Hybrid language models such as LFM2 and Qwen3.5 use them. A packed batch, whose sequences follow each other along one
axis, is padded to [sequences, tokens of the longest] and packed again.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md, and the CPU kernels where the page
leaves something open.
"""

from __future__ import annotations

from typing import NamedTuple

from onnx import TensorProto

from onnxgrad_cli.autodiff.definitions.recent import GREATEST, convolved, recurrence
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.autodiff.rules.attention import split_heads
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

MICROSOFT = "com.microsoft"


# -- packed batches --------------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """The positions of the sequences of a packed batch.

    Attributes:
        rows: the packed row of each place of the padded batch, [sequences, tokens of the longest].
        valid: True where a place of the padded batch holds a token, in the same shape.
        places: the place of each packed token in the padded batch, counted over all sequences, [tokens].
        lengths: the number of tokens of each sequence, [sequences].
    """

    rows: Val
    valid: Val
    places: Val
    lengths: Val

    def padded(self, op: Op, x: Val) -> Val:
        """Return packed values, [tokens, ...], as [sequences, tokens of the longest, ...]; padding repeats a token."""
        return op.Gather(x, self.rows, axis=0)

    def masked(self, op: Op, x: Val) -> Val:
        """Return padded values with zeros where the batch is padded."""
        valid = op.unsqueeze(self.valid, list(range(2, x.rank)))
        return op.Where(valid, x, op.const(0.0, x))

    def packed(self, op: Op, x: Val, like: Val) -> Val:
        """Return the values of a padded batch by token, where the packed value `like` has as many tokens."""
        flat = op.reshape(x, [-1, *(op.size(x, axis) for axis in range(2, x.rank))])
        return op.state(op.Gather(flat, self.places, axis=0), (like.shape[0], *x.shape[2:]))


def _packing(op: Op, offsets: Val) -> Packing:
    """Return the positions of sequences that begin and end at `offsets`, [sequences + 1]."""
    offsets = op.cast(offsets, TensorProto.INT64)
    starts = op.Slice(offsets, op.ints([0]), op.ints([-1]), op.ints([0]))
    ends = op.Slice(offsets, op.ints([1]), op.ints([GREATEST]), op.ints([0]))
    lengths = ends - starts
    longest = op.ReduceMax(lengths, keepdims=1)
    steps = op.steps(longest, axis=1, rank=2)
    valid = steps < op.unsqueeze(lengths, [1])
    rows = op.Min(op.unsqueeze(starts, [1]) + steps, op.unsqueeze(ends - 1, [1]))
    tokens = op.steps(op.Slice(offsets, op.ints([-1]), op.ints([GREATEST]), op.ints([0])))
    later = op.cast(op.unsqueeze(tokens, [1]) >= op.unsqueeze(ends, [0]), TensorProto.INT64)
    sequence = op.sum(later, [1], keepdims=False)
    places = sequence * longest + (tokens - op.Gather(starts, sequence))
    return Packing(rows, valid, places, lengths)


# -- causal convolutions ---------------------------------------------------------------------------------------------


@definition("CausalConvWithState", domain=MICROSOFT)
def causal_conv_with_state(
    op, x, weight, bias=None, past_state=None, *, activation="none", dilation=1, channels_last=0
):  # fmt: skip
    """As the standard's operator; the taps may be apart, and the channels may come last, on any number of axes."""
    if not channels_last:
        return convolved(op, x, weight, bias, past_state, activation, dilation)
    flat = op.Reshape(x, op.ints([0, 0, -1]), shape=(*x.shape[:2], weight.shape[0]))
    past = past_state
    if past is not None:
        past = op.Reshape(past, op.ints([0, 0, -1]), shape=(*past.shape[:2], weight.shape[0]))
        past = op.transpose(past, [0, 2, 1])
    y, state = convolved(op, op.transpose(flat, [0, 2, 1]), weight, bias, past, activation, dilation)
    state = op.transpose(state, [0, 2, 1])
    if x.rank > 3:
        channels = [op.size(x, axis) for axis in range(2, x.rank)]
        state = op.reshape(state, [op.size(x, 0), op.size(state, 1), *channels])
    return op.reshape_like(op.transpose(y, [0, 2, 1]), x), state


@definition("VarlenCausalConvWithState", domain=MICROSOFT)
def varlen_causal_conv_with_state(
    op, x, weight, offsets, bias=None, past_state=None, capture_count=None, kernel_delta=None, previous_mask=None, *,
    activation="none", dilation=1,
):  # fmt: skip
    """The causal convolution of each sequence of a packed batch, [tokens, channels]."""
    if capture_count is not None or kernel_delta is not None or previous_mask is not None:
        raise Unknown("it captures states, or changes its kernel by token, which onnxruntime's CPU kernel does not")
    if past_state is None:
        raise Unknown("it has no initial state")
    packing = _packing(op, offsets)
    rows = op.transpose(packing.padded(op, x), [0, 2, 1])
    y, padded = convolved(op, rows, weight, bias, past_state, activation, dilation, whole=True)
    y = packing.packed(op, op.transpose(y, [0, 2, 1]), x)
    kept = op.steps(op.size(past_state, 2), axis=2, rank=3) + op.unsqueeze(packing.lengths, [1, 2])
    index = op.Expand(kept, op.shape(past_state))
    return op.state(y, x.shape), op.state(op.GatherElements(padded, index, axis=2), past_state.shape)


# -- linear attention ------------------------------------------------------------------------------------------------


@definition("LinearAttentionGate", domain=MICROSOFT)
def linear_attention_gate(op, a, bias, scale, b=None):
    """The decay scale softplus(a + bias), in float32, and the update rate sigmoid(b)."""
    wide = op.wide(a)
    decay = op.cast(op.cast(scale, wide) * op.Softplus(wide + op.cast(bias, wide)), a)
    return decay, None if b is None else op.cast(op.Sigmoid(op.wide(b)), b)


@definition("LinearAttention", domain=MICROSOFT, needs_opset=16)
def linear_attention(
    op, query, key, value, past_state=None, decay=None, beta=None, *,
    q_num_heads, kv_num_heads, scale=0.0, update_rule="gated_delta", chunk_size=64,
):  # fmt: skip
    """As the standard's operator; queries and keys may also have fewer heads than the values, and share them."""
    width = query.shape[2]
    if not isinstance(width, int) or not isinstance(key.shape[2], int):
        raise Unknown("the size of its heads is unknown")
    size = width // q_num_heads
    q = split_heads(op, op.wide(query), q_num_heads)
    if q_num_heads < kv_num_heads:
        q = op.unsqueeze(_repeated(op, q, kv_num_heads), [3])
    else:
        shared = q_num_heads // kv_num_heads
        q = op.Reshape(q, op.ints([0, 0, kv_num_heads, shared, size]), shape=(*q.shape[:2], kv_num_heads, shared, size))
    k = _repeated(op, split_heads(op, op.wide(key), key.shape[2] // size), kv_num_heads)
    v = split_heads(op, op.wide(value), kv_num_heads)
    g = None if decay is None else split_heads(op, op.wide(decay), kv_num_heads)
    state, rate = (None if x is None else op.wide(x) for x in (past_state, beta))
    y, last = recurrence(op, q, k, v, state, g, rate, scale, update_rule)
    y = op.Reshape(y, op.ints([0, 0, -1]), shape=(*query.shape[:2], _times(v.shape[3], max(q_num_heads, kv_num_heads))))
    return op.cast(y, query), op.cast(last, past_state if past_state is not None else query)


@definition("GatedDeltaNet", domain=MICROSOFT, needs_opset=16)
def gated_delta_net(
    op, query, key=None, value=None, offsets=None, decay=None, beta=None, initial_state=None, a_log=None, dt_bias=None,
    capture_count=None, state_update_active=None, *,
    beta_activation="none", gate_activation="none", gate_lower_bound=-5.0, qk_l2_norm=0, scale=0.0,
    update_rule="gated_delta", chunk_size=64,
):  # fmt: skip
    """Linear attention of token-major values, [tokens, heads, size], with gates of its own; its states are turned.

    The sequences have equal lengths, or follow each other between `offsets`.
    """
    if capture_count is not None:
        raise Unknown("it captures states after tokens")
    q, k, v = _parts(op, query, key, value, initial_state)
    heads = v.shape[v.rank - 2]
    if not isinstance(heads, int) or not isinstance(k.shape[k.rank - 2], int):
        raise Unknown("the number of its heads is unknown")
    packing = None if offsets is None else _packing(op, offsets)

    def batch(x: Val, axes: int) -> Val:
        """[batch, tokens, ...] in float32, of values that have `axes` axes besides the tokens."""
        x = op.wide(x)
        if packing is not None:
            return packing.padded(op, x)
        if x.rank == axes + 2:
            return x
        if initial_state is None:
            raise Unknown("its number of sequences is unknown: it has neither an initial state nor offsets")
        return op.reshape(x, [op.size(initial_state, 0), -1, *(op.size(x, axis) for axis in range(1, x.rank))])

    y_like = v
    q, k, v = (batch(x, 2) for x in (q, k, v))
    if qk_l2_norm:
        q, k = (_unit(op, x) for x in (q, k))
    q, k = _repeated(op, q, heads), _repeated(op, k, heads)
    g = rate = None
    if "gated" in update_rule and decay is not None:
        by_key = decay.rank == y_like.rank
        g = batch(decay, 2 if by_key else 1)
        g = _decayed(op, g if by_key else op.unsqueeze(g, [3]), a_log, dt_bias, gate_activation, gate_lower_bound)
    if "delta" in update_rule and beta is not None:
        rate = batch(beta, 1)
        if beta_activation == "sigmoid":
            rate = op.Sigmoid(rate)
        elif beta_activation != "none":
            raise Unknown(f"its beta_activation '{beta_activation}' is not known")
    if packing is not None:  # a padded token changes no state
        k = packing.masked(op, k)
        g = None if g is None else packing.masked(op, g)
    state = None if initial_state is None else op.swap_last(op.wide(initial_state))
    y, last = recurrence(op, op.unsqueeze(q, [3]), k, v, state, g, rate, scale, update_rule)
    y = op.squeeze(y, [3])
    y = op.reshape_like(y, y_like) if packing is None else packing.packed(op, y, y_like)
    return op.cast(y, query), op.swap_last(last)


def _parts(op: Op, query: Val, key: Val | None, value: Val | None, state: Val | None) -> tuple[Val, Val, Val]:
    """Return queries, keys and values by head, of which the queries hold all where there are no keys and values."""
    if key is not None and value is not None:
        return query, key, value
    if state is None or key is not None or value is not None:
        raise Unknown("its queries, keys and values are packed, and no initial state gives their sizes")
    last = query.rank - 1
    sizes = [size for size in (query.shape[last], *state.shape[1:]) if isinstance(size, int)]
    if len(sizes) < 4:
        raise Unknown("the size of its heads is unknown")
    width, heads, v_size, k_size = sizes
    shared = (width - heads * v_size) // 2
    parts = op.split(query, [shared, shared, heads * v_size], axis=last)
    by_head = [(shared // k_size, k_size), (shared // k_size, k_size), (heads, v_size)]
    q, k, v = (
        op.Reshape(part, op.ints([0] * last + [count, size]), shape=(*query.shape[:last], count, size))
        for part, (count, size) in zip(parts, by_head, strict=True)
    )
    return q, k, v


def _unit(op: Op, x: Val) -> Val:
    """Return the vectors along the last axis, each divided by its length."""
    return x / op.Sqrt(op.sum(x * x, [x.rank - 1]) + 1e-12)


def _decayed(op: Op, g: Val, a_log: Val | None, bias: Val | None, activation: str, lower: float) -> Val:
    """Return the logarithm of the decay, [batch, tokens, heads, key size or 1]."""
    if activation == "none":
        return g
    heads, size = op.size(g, 2), op.size(g, 3)
    if a_log is None or bias is None:
        raise Unknown(f"its gate_activation '{activation}' needs the inputs a_log and dt_bias")
    by_key = bias.rank == 2 or bias.shape[0] != a_log.shape[0]
    g = g + (op.reshape(op.cast(bias, g), [heads, size]) if by_key else op.unsqueeze(op.cast(bias, g), [1]))
    factor = op.Exp(op.unsqueeze(op.cast(a_log, g), [1]))
    if activation in ("softplus", "qwen"):
        return -(factor * op.Softplus(g))
    if activation in ("sigmoid", "kda"):
        return op.Sigmoid(factor * g) * lower
    raise Unknown(f"its gate_activation '{activation}' is not known")


def _repeated(op: Op, x: Val, heads: int) -> Val:
    """Return [batch, tokens, heads, size] of fewer heads with neighbours that are equal."""
    count = x.shape[2]
    if count == heads:
        return x
    if not isinstance(count, int) or heads % count:
        raise Unknown(f"it has {count} heads of queries or keys, which {heads} heads of values can't share")
    each = op.Expand(op.unsqueeze(x, [3]), op.ints([1, 1, 1, heads // count, 1]))
    return op.Reshape(each, op.ints([0, 0, heads, -1]), shape=(*x.shape[:2], heads, x.shape[3]))


def _times(size: int | str, count: int) -> int | None:
    return size * count if isinstance(size, int) else None
