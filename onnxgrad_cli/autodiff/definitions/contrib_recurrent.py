"""Definitions of recurrent layers in the domain com.microsoft by standard operators.

Hybrid language models such as LFM2 and Qwen3.5 use linear attention and causal convolutions with a state. In a packed
batch, the sequences follow each other along one axis. The definitions pad it to [sequences, tokens of the longest] and
pack the result again.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md, and the CPU kernels where the page
is ambiguous.
"""

from __future__ import annotations

from typing import NamedTuple

from onnx import TensorProto

from onnxgrad_cli.autodiff.definitions.recent import convolved, recurrence
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.autodiff.rules.recurrent import DIRECTIONS
from onnxgrad_cli.autodiff.rules.rotary_embedding import split_heads
from onnxgrad_cli.emission.bodies import scan
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import MICROSOFT
from onnxgrad_cli.ir.types import MAX_INT64

# -- packed batches --------------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """The map between a packed batch [tokens, ...] and a padded one [sequences, tokens of the longest, ...].

    Attributes:
        rows: for each position of the padded batch, the row in the packed batch, [sequences, tokens of the longest].
        valid: booleans in the shape of `rows`, true for a token and false for padding.
        places: for each packed token, its flat index in the padded batch, [tokens].
        lengths: the number of tokens of each sequence, [sequences].
    """

    rows: Val
    valid: Val
    places: Val
    lengths: Val

    def padded(self, op: Op, x: Val) -> Val:
        """Pad packed values [tokens, ...] to [sequences, tokens of the longest, ...], by repeating the last token."""
        return op.Gather(x, self.rows, axis=0)

    def masked(self, op: Op, x: Val) -> Val:
        """Return padded values with zeros in the padding."""
        valid = op.unsqueeze(self.valid, list(range(2, x.rank)))
        return op.Where(valid, x, op.const(0.0, x))

    def packed(self, op: Op, x: Val, like: Val) -> Val:
        """Pack padded values to [tokens, ...]. The result gets the symbol for the number of tokens of `like`."""
        flat = op.reshape(x, [-1, *op.sizes(x, range(2, x.rank))])
        return op.state(op.Gather(flat, self.places, axis=0), (like.shape[0], *x.shape[2:]))


def _packing(op: Op, offsets: Val) -> Packing:
    """Return the `Packing` of sequences. Sequence i consists of the tokens from offsets[i] up to offsets[i + 1]."""
    offsets = op.cast(offsets, TensorProto.INT64)
    starts = op.Slice(offsets, op.ints([0]), op.ints([-1]), op.ints([0]))
    ends = op.Slice(offsets, op.ints([1]), op.ints([MAX_INT64]), op.ints([0]))
    lengths = ends - starts
    longest = op.ReduceMax(lengths, keepdims=1)
    steps = op.steps(longest, axis=1, rank=2)
    valid = steps < op.unsqueeze(lengths, [1])
    rows = op.Min(op.unsqueeze(starts, [1]) + steps, op.unsqueeze(ends - 1, [1]))
    tokens = op.steps(op.Slice(offsets, op.ints([-1]), op.ints([MAX_INT64]), op.ints([0])))
    later = op.cast(op.unsqueeze(tokens, [1]) >= op.unsqueeze(ends, [0]), TensorProto.INT64)
    sequence = op.sum(later, [1], keepdims=False)
    places = sequence * longest + (tokens - op.Gather(starts, sequence))
    return Packing(rows, valid, places, lengths)


# -- causal convolutions ---------------------------------------------------------------------------------------------


@definition("CausalConvWithState", domain=MICROSOFT)
def causal_conv_with_state(
    op, x, weight, bias=None, past_state=None, *, activation="none", dilation=1, channels_last=0
):  # fmt: skip
    """The standard operator CausalConvWithState with two additional attributes: dilation and channels_last."""
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
        channels = op.sizes(x, range(2, x.rank))
        state = op.reshape(state, [op.size(x, 0), op.size(state, 1), *channels])
    return op.reshape_like(op.transpose(y, [0, 2, 1]), x), state


@definition("VarlenCausalConvWithState", domain=MICROSOFT)
def varlen_causal_conv_with_state(
    op, x, weight, offsets, bias=None, past_state=None, capture_count=None, kernel_delta=None, previous_mask=None, *,
    activation="none", dilation=1,
):  # fmt: skip
    """The causal convolution of each sequence of a packed batch [tokens, channels]."""
    if capture_count is not None or kernel_delta is not None or previous_mask is not None:
        raise Unknown("onnxruntime's CPU kernel can't capture its states or change its filter at each token")
    require(past_state is not None, "it has no initial state")
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
    """Outputs: the decay, which is scale * softplus(a + bias) computed in float32, and the update rate sigmoid(b)."""
    wide = op.wide(a)
    decay = op.cast(op.cast(scale, wide) * op.Softplus(wide + op.cast(bias, wide)), a)
    return decay, None if b is None else op.cast(op.Sigmoid(op.wide(b)), b)


@definition("LinearAttention", domain=MICROSOFT, needs_opset=16)
def linear_attention(
    op, query, key, value, past_state=None, decay=None, beta=None, *,
    q_num_heads, kv_num_heads, scale=0.0, update_rule="gated_delta", chunk_size=64,
):  # fmt: skip
    """The standard operator LinearAttention, extended by value heads that share a head of queries and keys.

    There may be fewer heads of queries and keys than of values.
    """
    width, key_width = (x.known_size(2, "the size of its heads") for x in (query, key))
    size = width // q_num_heads
    q = split_heads(op, op.wide(query), q_num_heads)
    if q_num_heads < kv_num_heads:
        q = op.unsqueeze(_repeated(op, q, kv_num_heads), [3])
    else:
        shared = q_num_heads // kv_num_heads
        q = op.Reshape(q, op.ints([0, 0, kv_num_heads, shared, size]), shape=(*q.shape[:2], kv_num_heads, shared, size))
    k = _repeated(op, split_heads(op, op.wide(key), key_width // size), kv_num_heads)
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
    """Linear attention of inputs [tokens, heads, size]. The operator also computes its gates from further inputs.

    The sequences have equal lengths, or are packed and begin at `offsets`. States are stored transposed, [value size,
    key size].
    """
    require(capture_count is None, "its attribute capture_count requests the states after some tokens")
    q, k, v = _parts(op, query, key, value, initial_state)
    heads, _ = (x.known_size(-2, "the number of its heads") for x in (v, k))
    packing = None if offsets is None else _packing(op, offsets)

    def batch(x: Val, axes: int) -> Val:
        """Return values with `axes` axes after the token axis as [batch, tokens, ...] in float32."""
        x = op.wide(x)
        if packing is not None:
            return packing.padded(op, x)
        if x.rank == axes + 2:
            return x
        if initial_state is None:
            raise Unknown("its number of sequences is unknown, because it has neither an initial state nor offsets")
        return op.reshape(x, [op.size(initial_state, 0), -1, *op.sizes(x, range(1, x.rank))])

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
            raise Unknown(f"its beta_activation '{beta_activation}' is not supported")
    if packing is not None:  # padding must not change the state
        k = packing.masked(op, k)
        g = None if g is None else packing.masked(op, g)
    state = None if initial_state is None else op.swap_last(op.wide(initial_state))
    y, last = recurrence(op, op.unsqueeze(q, [3]), k, v, state, g, rate, scale, update_rule)
    y = op.squeeze(y, [3])
    y = op.reshape_like(y, y_like) if packing is None else packing.packed(op, y, y_like)
    return op.cast(y, query), op.swap_last(last)


def _parts(op: Op, query: Val, key: Val | None, value: Val | None, state: Val | None) -> tuple[Val, Val, Val]:
    """Return queries, keys and values split into heads. If keys and values are absent, `query` contains all three."""
    if key is not None and value is not None:
        return query, key, value
    if state is None or key is not None or value is not None:
        raise Unknown("its queries, keys and values are packed, and it has no initial state to infer their sizes from")
    last = query.rank - 1
    sizes = [size for size in (query.shape[last], *state.shape[1:]) if isinstance(size, int)]
    require(len(sizes) >= 4, "the size of its heads is unknown")
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
    """Apply the gate's activation to `g`. Return the logarithm of the decay, [batch, tokens, heads, key size or 1]."""
    if activation == "none":
        return g
    heads, size = op.size(g, 2), op.size(g, 3)
    if a_log is None or bias is None:
        raise Unknown(f"its gate_activation '{activation}' requires the inputs a_log and dt_bias")
    by_key = bias.rank == 2 or bias.shape[0] != a_log.shape[0]
    g = g + (op.reshape(op.cast(bias, g), [heads, size]) if by_key else op.unsqueeze(op.cast(bias, g), [1]))
    factor = op.Exp(op.unsqueeze(op.cast(a_log, g), [1]))
    if activation in ("softplus", "qwen"):
        return -(factor * op.Softplus(g))
    if activation in ("sigmoid", "kda"):
        return op.Sigmoid(factor * g) * lower
    raise Unknown(f"its gate_activation '{activation}' is not supported")


def _repeated(op: Op, x: Val, heads: int) -> Val:
    """Repeat each head of [batch, tokens, fewer heads, size], so that there are `heads` heads."""
    count = x.shape[2]
    if count == heads:
        return x
    if not isinstance(count, int) or heads % count:
        raise Unknown(f"its {heads} heads of values can't share {count} heads of queries or keys")
    each = op.Expand(op.unsqueeze(x, [3]), op.ints([1, 1, 1, heads // count, 1]))
    return op.Reshape(each, op.ints([0, 0, heads, -1]), shape=(*x.shape[:2], heads, x.shape[3]))


def _times(size: int | str, count: int) -> int | None:
    return size * count if isinstance(size, int) else None


# -- an LSTM that attends to a memory --------------------------------------------------------------------------------


@definition("AttnLSTM", domain=MICROSOFT, needs_opset=16)
def attention_lstm(
    op, x, weight, recurrence, bias=None, lengths=None, initial_h=None, initial_c=None, peepholes=None,
    query_weight=None, memory_weight=None, score_weight=None, memory=None, memory_lengths=None, output_weight=None, *,
    hidden_size, activations=None, activation_alpha=None, activation_beta=None, clip=None, direction="forward",
    input_forget=0,
):  # fmt: skip
    """An LSTM with attention to a memory. Outputs: the outputs of all steps, the last ones, and the last cell states.

    Each step reads its input and the attention vector of the previous step. The output of the step is the query for
    softmax weights over the memory. The attention vector is the weighted sum of the memory, or a projection of the
    output and that sum.

    Source: D. Bahdanau et al., Neural Machine Translation by Jointly Learning to Align and Translate, 2015, appendix
    A.1.2.
    """
    if lengths is not None or peepholes is not None or input_forget or clip or activation_alpha or activation_beta:
        raise Unknown("it has lengths, peepholes, coupled gates, a clip, or activations with parameters")
    names = [name.decode() if isinstance(name, bytes) else name for name in activations or ()]
    if [name.lower() for name in names] != ["sigmoid", "tanh", "tanh"] * (len(names) // 3):
        raise Unknown(f"its activations are {', '.join(names)}")
    if direction not in DIRECTIONS or memory is None or query_weight is None:
        raise Unknown("it has no cell state, or its direction is unknown")
    parts: list[tuple[Val, Val, Val]] = []
    for at, reverse in enumerate(DIRECTIONS[direction]):
        own = [
            None if each is None else op.Gather(each, op.const(at), axis=0)
            for each in (weight, recurrence, bias, initial_h, initial_c, query_weight, memory_weight, score_weight,
                         output_weight)
        ]  # fmt: skip
        parts.append(_direction(op, x, memory, memory_lengths, own, hidden_size, reverse))
    return (
        op.Concat(*(op.unsqueeze(y, [1]) for y, _, _ in parts), axis=1),
        *(op.Concat(*(op.unsqueeze(part[i], [0]) for part in parts), axis=0) for i in (1, 2)),
    )


def _direction(
    op: Op, x: Val, memory: Val, lengths: Val | None, weights: list[Val | None], size: int, reverse: bool
) -> tuple[Val, Val, Val]:
    """Return the outputs of one direction at all steps, the last output, and the last cell state."""
    w, r, bias, h, c, query_weight, memory_weight, score_weight, output_weight = weights
    assert w is not None and r is not None and query_weight is not None and memory_weight is not None
    w, r = op.swap_last(w), op.swap_last(r)
    batch, valid = op.size(x, 1), None
    if lengths is not None:
        valid = op.steps(op.size(memory, 1), axis=1, rank=2) < op.unsqueeze(op.cast(lengths, TensorProto.INT64), [1])
        memory = op.Where(op.unsqueeze(valid, [2]), memory, op.const(0.0, memory))
    keys = memory @ memory_weight
    both = None if bias is None else op.sum(op.reshape(bias, [2, 4 * size]), [0])
    width = op.size(memory if output_weight is None else output_weight, -1)
    states = [each if each is not None else op.zeros([batch, size], x) for each in (h, c)]
    states.append(op.zeros([batch, width], x))

    def step(op: Op, states: list[Val], steps: list[Val]) -> tuple[list[Val], list[Val]]:
        h, c, attention = states
        z = op.Concat(steps[0], attention, axis=1) @ w + h @ r
        gates = op.split(z if both is None else z + both, [size] * 4, axis=1)
        i, o, f = (op.Sigmoid(gate) for gate in gates[:3])
        cell = f * c + i * op.Tanh(gates[3])
        y = o * op.Tanh(cell)
        scores = op.sum(op.Tanh(op.unsqueeze(y @ query_weight, [1]) + keys) * score_weight, [2], keepdims=False)
        if valid is not None:
            scores = op.Where(valid, scores, op.const(float("-inf"), scores))
        share = op.unsqueeze(op.Softmax(scores, axis=1), [1])
        seen = op.squeeze(share @ memory, [1])
        after = seen if output_weight is None else op.Concat(y, seen, axis=1) @ output_weight
        return [op.state(new, old.shape) for new, old in zip((y, cell, after), states, strict=True)], [y]

    (last_h, last_c, _), (y,) = scan(op, step, states, [x], reverse=reverse)
    return y, last_h, last_c
