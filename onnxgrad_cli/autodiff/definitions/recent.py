"""Definitions of operators from recent opsets by older operators.

Models with these operators then also run on runtimes that do not load the newer opset or lack its kernels. Mod and
SpaceToDepth have a gradient rule, so they are replaced only if the model is converted to an older opset. Operators for
which a newer opset only allows more types need no definition; `passes.prepare.opset` converts them.
"""

from __future__ import annotations

import math

from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.autodiff.rules.rotary_embedding import split_heads
from onnxgrad_cli.emission.bodies import scan
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.types import MAX_INT64, is_float


@definition("Swish")
def swish(op, x, *, alpha=1.0):
    """x sigmoid(alpha x). onnxruntime 1.31 supports Swish only at opset 24, not at newer ones."""
    return x * op.Sigmoid(x if alpha == 1.0 else x * alpha)


@definition("SwiGLU")
def swiglu(op, a, b, *, alpha=1.0):
    return swish(op, a, alpha=alpha) * b


@definition("Mod", versions=(28, None))
def mod(op, a, b, *, fmod=0):
    """Remainder of floats with the quotient rounded down: C's fmod(a, b), plus b if fmod and b have opposite signs."""
    require(not fmod and is_float(a.type), "it has the definition from before opset 28")
    r = op.Mod(a, b, fmod=1)
    return r + op.Where(r * op.Sign(b) < 0, b, op.const(0.0, b))


@definition("SpaceToDepth", versions=(28, None))
def space_to_depth(op, x, *, blocksize, mode="DCR"):
    """Mode CRD orders output channels by input channel, then position in the block. Mode DCR has the opposite order."""
    require(mode != "DCR", "it has the definition from before opset 28")
    blocks = op.SpaceToDepth(x, blocksize=blocksize)
    batch, height, width = op.sizes(blocks, (0, 2, 3))
    channels = op.size(x, 1)
    by_place = op.reshape(blocks, [batch, blocksize**2, channels, height, width])
    return op.reshape_like(op.transpose(by_place, [0, 2, 1, 3, 4]), blocks)


@definition("CausalConvWithState")
def causal_conv_with_state(op, x, weight, bias=None, past_state=None, *, activation="none"):
    """Depthwise causal convolution with k taps along the tokens. The state is the last k - 1 inputs of each channel.

    Source: T. Dao and A. Gu, Transformers are SSMs, 2024, section 7.
    """
    return convolved(op, x, weight, bias, past_state, activation)


def convolved(
    op: Op, x: Val, weight: Val, bias: Val | None, past: Val | None, activation: str, dilation: int = 1,
    whole: bool = False,
) -> tuple[Val, Val]:  # fmt: skip
    """Return the depthwise causal convolution of `x`, and the state: the last inputs, which the next tokens read.

    Args:
        op: the emitter.
        x: the values of the tokens, [batch, channels, tokens].
        weight, bias: the filters and the bias of the channels.
        past: the inputs before the first token; None means zeros.
        activation: the activation of the result: "none", "silu" or "swish".
        dilation: the distance between taps.
        whole: True to return `past` and `x` concatenated, instead of the state.
    """
    require(activation in ("none", "silu", "swish"), f"its activation '{activation}' is not supported")
    known = {weight.shape[0], x.shape[1], *(bias.shape if bias is not None else ())}
    channels = next((count for count in known if isinstance(count, int)), None)
    if channels is None:
        raise Unknown("the number of its channels is unknown")
    if past is None:
        taps = op.size(weight, 2)
        past = op.zeros([op.size(x, 0), channels, (taps - 1) * dilation], x)
    padded = op.Concat(past, x, axis=2)
    spread = {"dilations": [dilation]} if dilation != 1 else {}
    y = op.Conv(padded, weight, bias, group=channels, shape=x.known_shape, **spread)
    if activation != "none":
        y = op.cast(op.wide(y) * op.Sigmoid(op.wide(y)), y)
    if whole:
        return y, padded
    return y, op.Slice(padded, op.dim(x, 2), op.ints([MAX_INT64]), op.ints([2]), shape=past.known_shape)


@definition("LinearAttention", needs_opset=16)
def linear_attention(
    op, query, key, value, past_state=None, decay=None, beta=None, *,
    q_num_heads=None, kv_num_heads=None, scale=0.0, update_rule="gated_delta", chunk_size=64,
):  # fmt: skip
    """Linear attention: each token multiplies S by exp(g), adds k (b (v - k S)) to it, and returns q S.

    S is the state of a head, [key size, value size]; g is the decay and b is `beta`.
    Source: S. Yang et al., Gated Delta Networks, 2024, section 3.
    """
    q = split_heads(op, op.wide(query), q_num_heads)
    groups = op.Reshape(q, op.ints([0, 0, kv_num_heads, q_num_heads // kv_num_heads, -1]),
                        shape=(*q.shape[:2], kv_num_heads, q_num_heads // kv_num_heads, q.shape[3]))  # fmt: skip
    k, v = (split_heads(op, op.wide(x), kv_num_heads) for x in (key, value))
    state = None if past_state is None else op.wide(past_state)
    g = None if decay is None else split_heads(op, op.wide(decay), kv_num_heads)
    b = None if beta is None else op.wide(beta)
    y, last = recurrence(op, groups, k, v, state, g, b, scale, update_rule)
    width = value.shape[2]
    width = q_num_heads * (width // kv_num_heads) if isinstance(width, int) else -1
    y = op.reshape(y, [op.size(query, 0), op.size(query, 1), width])
    return op.cast(y, query), op.cast(last, past_state if past_state is not None else query)


def recurrence(
    op: Op, q: Val, k: Val, v: Val, state: Val | None, decay: Val | None, beta: Val | None, scale: float, rule: str
) -> tuple[Val, Val]:
    """Return the outputs of a linear attention, [batch, tokens, heads, queries, value size], and the last state.

    Args:
        op: the emitter.
        q: the queries of each head, [batch, tokens, heads, queries, key size].
        k, v: keys and values, [batch, tokens, heads, size].
        state: the first state, [batch, heads, key size, value size]; None means zeros.
        decay: logarithms of the factors by which the state decays, [batch, tokens, heads, key size or 1].
        beta: update rates, [batch, tokens, heads or 1].
        scale: the factor of the queries; 0 is 1 / sqrt(key size).
        rule: the update rule, as in the operator LinearAttention.
    """
    size, by_time = q.shape[4], [1, 0, 2, 3]
    factor = scale or (1 / math.sqrt(size) if isinstance(size, int) else 1 / op.Sqrt(op.count(q, [4], q.dtype)))
    steps = [op.transpose(q, [1, 0, 2, 3, 4]) * factor]
    steps += [op.unsqueeze(op.transpose(x, by_time), [3]) for x in (k, v)]
    gated, delta = "gated" in rule, "delta" in rule
    if gated:
        if decay is None:
            raise Unknown(f"its update rule '{rule}' requires a decay")
        steps.append(op.unsqueeze(op.Exp(op.transpose(decay, by_time)), [4]))
    if delta:
        if beta is None:
            raise Unknown(f"its update rule '{rule}' requires an update rate")
        steps.append(op.unsqueeze(op.transpose(beta, [1, 0, 2]), [3, 4]))
    if state is None:
        state = op.zeros([op.size(k, 0), op.size(k, 2), op.size(k, 3), op.size(v, 3)], k)

    def step(op: Op, states: list[Val], steps: list[Val]) -> tuple[list[Val], list[Val]]:
        (s,), (q, k, v, *more) = states, steps
        if gated:
            s = s * more[0]
        if delta:
            v = more[-1] * (v - k @ s)
        s = s + op.transpose(k, [0, 1, 3, 2]) @ v
        if not op.same_shape(s, states[0]):  # the shapes are equal, but their symbols do not show this
            s = op.Reshape(s, op.shape(states[0]), shape=states[0].shape)
        return [s], [q @ s]

    (last,), (y,) = scan(op, step, [state], steps)
    return op.transpose(y, [1, 0, 2, 3, 4]), last
