"""Definitions of hyper-connections: layers with several gated residual streams (domain com.microsoft).

All definitions compute in float32 if the inputs are 16-bit floats.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import math

from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import MICROSOFT


@definition("HyperConnectionPreMix", domain=MICROSOFT)
def pre_mix(op, streams, gates, *, num_branches=0, reduction_scale=1.0):
    """The sum of all streams, each multiplied by its gates, times reduction_scale."""
    x = _grouped(op, op.wide(streams), num_branches)
    y = op.sum(x * _gates(op, gates, x, streams), [x.rank - 2], keepdims=False)
    return op.cast(y if reduction_scale == 1 else y * reduction_scale, streams)


@definition("HyperConnectionPostMix", domain=MICROSOFT)
def post_mix(op, streams, block, gates, mix=None, *, num_branches=0):
    """Each stream (with `mix`: a mix of all streams) plus the output of the block times the gates of the stream."""
    x = _grouped(op, op.wide(streams), num_branches)
    added = _gates(op, gates, x, streams) * op.unsqueeze(op.wide(block), [x.rank - 2])
    kept = x if mix is None else op.swap_last(op.cast(mix, x)) @ x
    return op.cast(op.reshape_like(kept + added, streams), streams)


@definition("BranchwiseRMSNorm", domain=MICROSOFT)
def branchwise_rms_norm(op, x, scale=None, *, epsilon=1e-5, num_branches=0):
    """Each branch divided by its root mean square, times a scale that the branches share, or one scale per branch."""
    v = _grouped(op, op.wide(x), num_branches)
    y = v * _inverse_root_mean_square(op, v, epsilon)
    if scale is not None:
        size, branches = v.shape[-1], v.shape[-2]
        if scale.rank == 1 and scale.shape[0] != size:
            if not isinstance(size, int) or not isinstance(branches, int) or scale.shape[0] != size * branches:
                raise Unknown("it is unknown whether its scale is for each branch or for all branches")
            scale = op.reshape(scale, [branches, size])
        y = y * op.cast(scale, y)
    return op.cast(op.reshape_like(y, x), x)


@definition("EngramGate", domain=MICROSOFT)
def engram_gate(op, key, query, value, key_scale, query_scale, conv_scale=None, *, epsilon=1e-5):
    """The value times sigmoid(sign(d) sqrt(max(|d|, 1e-6))); d is the scaled dot product of normalized key and query.

    With `conv_scale`, the second output is the result divided by its root mean square, times `conv_scale`.
    """
    k, q = (_normalized(op, op.wide(x), scale, epsilon) for x, scale in ((key, key_scale), (query, query_scale)))
    size = k.shape[3]
    d = op.sum(k * q, [3])
    d = d * (1 / math.sqrt(size)) if isinstance(size, int) else d / op.Sqrt(op.count(k, [3]))
    root = op.Sqrt(op.Max(op.Abs(d), op.const(1e-6, d)))
    gated = op.Sigmoid(op.Sign(d) * root) * op.unsqueeze(op.wide(value), [2])
    y = op.cast(gated, key)
    if conv_scale is None:
        return y
    normed = op.cast(y, gated) * _inverse_root_mean_square(op, gated, epsilon) * op.cast(conv_scale, gated)
    return y, op.cast(normed, key)


@definition("ScaledSiLU", domain=MICROSOFT)
def scaled_silu(op, x, scale=None, *, alpha=1.0):
    """z sigmoid(z), where z is x times the scale. Each intermediate result is rounded to the type of x."""
    wide = op.wide(x)
    z = wide if scale is None and alpha == 1 else wide * (alpha if scale is None else op.cast(scale, wide))
    z = op.cast(z, x)
    return op.cast(op.wide(z) * op.wide(op.cast(op.Sigmoid(op.wide(z)), x)), x)


def _grouped(op: Op, x: Val, branches: int) -> Val:
    """Return streams as [..., branches, size]. If `branches`, their number, is 0, they already have this shape."""
    if not branches:
        return x
    last = x.rank - 1
    width = x.shape[last]
    size = width // branches if isinstance(width, int) else None
    return op.Reshape(x, op.ints([0] * last + [branches, -1]), shape=(*x.shape[:last], branches, size))


def _gates(op: Op, gates: Val, x: Val, streams: Val) -> Val:
    """Return gates reshaped to [..., branches, 1 or size], so that they broadcast to the streams `x`.

    Args:
        op: the emitter.
        gates: one gate per branch, or one per element of a branch.
        x: the streams as [..., branches, size].
        streams: the streams as the operator reads them, which may be flattened.
    """
    gates = op.cast(gates, x)
    if gates.rank == x.rank:
        return gates
    require(gates.rank == x.rank - 1, "its gates and its streams have different numbers of axes")
    branches, count, last = x.shape[-2], gates.shape[-1], gates.rank - 1
    if streams.rank == x.rank or count == branches:
        return op.unsqueeze(gates, [gates.rank])
    if not isinstance(count, int) or not isinstance(branches, int) or count % branches:
        raise Unknown("it is unknown whether its gates are for each branch or for each value of a branch")
    shape = (*gates.shape[:last], branches, count // branches)
    return op.Reshape(gates, op.ints([0] * last + [branches, -1]), shape=shape)


def _inverse_root_mean_square(op: Op, x: Val, epsilon: float) -> Val:
    return 1 / op.Sqrt(op.mean(x * x, [x.rank - 1]) + epsilon)


def _normalized(op: Op, x: Val, scale: Val, epsilon: float) -> Val:
    return x * _inverse_root_mean_square(op, x, epsilon) * op.cast(scale, x)
