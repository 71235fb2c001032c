"""Rules of normalizations. Their gradients include the dependence of mean and variance on the input.

Let xhat = (x - mean) r with r = 1 / sqrt(var + epsilon) over some axes, and let u be the cotangent of xhat. Then dx = r
(u - mean(u) - xhat mean(u xhat)). The rules recompute the statistics instead of reading them from the forward node,
whose outputs Mean and InvStdDev are float32 for any input type. The recomputation takes a twentieth of the backward
time.
Source: S. Ioffe and C. Szegedy, Batch Normalization, 2015, section 3; J. Ba et al., Layer Normalization, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.ir.types import known_sizes

MOST_CHANNELS = 1 << 12
"""Largest number of channels of an LRN. Its sums over windows of channels are products with a square matrix."""


def _standardize(op: Op, x: Val, axes: Sequence[int], epsilon: float) -> tuple[Val, Val]:
    """Return xhat = (x - mean) r and r = 1 / sqrt(variance + epsilon), with mean and variance over `axes`.

    The variance is the mean of (x - mean)², because the difference of the means of x² and x would lose digits.
    """
    centred = x - op.mean(x, axes)
    r = 1 / op.Sqrt(op.mean(centred * centred, axes) + epsilon)
    return centred * r, r


def _through(op: Op, u: Val, xhat: Val, r: Val, axes: Sequence[int]) -> Val:
    """Return the cotangent of x, given the cotangent `u` of xhat."""
    return r * (u - op.mean(u, axes) - xhat * op.mean(u * xhat, axes))


def _per_channel(op: Op, v: Val, x: Val) -> Val:
    """Reshape a vector over the channels (axis 1 of `x`) so that it broadcasts to `x`."""
    return op.reshape(v, [-1, *[1] * (x.rank - 2)])


def _channel_sum(op: Op, v: Val) -> Val:
    """Return the sum over all axes except the channels (axis 1), as a vector. If `v` is a vector, sum all of it."""
    return op.sum(v, [axis for axis in range(v.rank) if axis != 1], keepdims=v.rank == 1)


def _scaled_mean(op: Op, v: Val, scale: Val, axes: Sequence[int]) -> Val:
    """Return the mean of v * scale over `axes`, which are the last axes. The result keeps them with size 1.

    For one axis of known size, the mean is written as a matrix-vector product, which takes 0.93 times as long as
    ReduceMean.
    """
    size = v.shape[-1]
    if len(axes) == 1 and isinstance(size, int) and scale.known_shape == (size,):
        return v @ op.unsqueeze(scale * (1 / size), [1])
    return op.mean(v * scale, axes)


@rule("LayerNormalization", needs_opset=17)
def layer_normalization(op, gs, ys, x, scale, b, *, axis, epsilon, stash_type):
    """y = xhat scale + b, normalized over `axis` and all later axes. Outputs 1 and 2 are the mean and r."""
    dtypes, axes = (x, scale, b), list(range(axis % x.rank, x.rank))
    x, scale = op.wide(x), op.wide(scale)
    xhat, r = _standardize(op, x, axes, epsilon)
    g, g_mean, g_r = ([op.cast(g, x) if g is not None else None for g in gs] + [None, None])[:3]
    dx = dscale = db = None
    if g is not None:
        product = g * xhat
        dx = r * (g * scale - _scaled_mean(op, g, scale, axes) - xhat * _scaled_mean(op, product, scale, axes))
        dscale = op.cast(op.sum_to(product, scale), dtypes[1]) if op.wants(dtypes[1]) else None
        db = op.cast(op.sum_to(g, b), b) if op.wants(b) else None
    if g_mean is not None:
        part = g_mean / op.count(x, axes)
        dx = part if dx is None else dx + part
    if g_r is not None:
        part = -(g_r * r * r * xhat) / op.count(x, axes)
        dx = part if dx is None else dx + part
    return op.cast(op.expand_like(dx, x), dtypes[0]), dscale, db


@rule("RMSNormalization")
def rms_normalization(op, g, y, x, scale, *, axis, epsilon, stash_type):
    """y = x r scale with r = 1 / sqrt(mean(x^2) + epsilon): LayerNormalization without the mean.

    Source: B. Zhang and R. Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    dtypes, axes = (x, scale), list(range(axis % x.rank, x.rank))
    x, scale, g = op.wide(x), op.wide(scale), op.wide(g)
    r = 1 / op.Sqrt(op.mean(x * x, axes) + epsilon)
    xhat = x * r
    product = g * xhat
    dx = r * (g * scale - xhat * _scaled_mean(op, product, scale, axes))
    return op.cast(dx, dtypes[0]), op.cast(op.sum_to(product, scale), dtypes[1])


@rule("InstanceNormalization")
def instance_normalization(op, g, y, x, scale, b, *, epsilon):
    """Normalize each sample and channel over the axes from 2 on. scale and b are per channel."""
    dtype, axes = x, list(range(2, x.rank))
    x, g = op.wide(x), op.wide(g)
    xhat, r = _standardize(op, x, axes, epsilon)
    product = g * xhat
    by_channel = _per_channel(op, op.cast(scale, x), x)
    dx = by_channel * r * (g - op.mean(g, axes) - xhat * op.mean(product, axes))
    return op.cast(dx, dtype), op.cast(_channel_sum(op, product), scale), op.cast(_channel_sum(op, g), b)


def _grouped(op: Op, x: Val, groups: int) -> Val:
    """Reshape `x` to [batch, groups, elements of a group]."""
    sizes = known_sizes(x.shape[1:])
    rest = f"{x.name}_group" if sizes is None else math.prod(sizes) // groups
    return op.Reshape(x, op.ints([0, groups, -1]), shape=(x.shape[0], groups, rest))


@rule("GroupNormalization", versions=(21, None))
def group_normalization(op, g, y, x, scale, b, *, epsilon, num_groups, stash_type):
    """Normalize each group of channels of each sample. scale and b are per channel.

    Version 18, with one scale and bias per group, is converted to version 21 before.

    Source: Y. Wu and K. He, Group Normalization, 2018.
    """
    dtype = x
    x, g = op.wide(x), op.wide(g)
    xhat, r = _standardize(op, _grouped(op, x, num_groups), [2], epsilon)
    u = _grouped(op, g * _per_channel(op, op.cast(scale, x), x), num_groups)
    dx = op.reshape_like(_through(op, u, xhat, r, [2]), x)
    product = g * op.reshape_like(xhat, x)
    return op.cast(dx, dtype), op.cast(_channel_sum(op, product), scale), op.cast(_channel_sum(op, g), b)


@rule("BatchNormalization", versions=(9, None))
def batch_normalization(op, g, ys, x, scale, b, mean, var, *, epsilon, momentum, training_mode):
    """y = (x - mean) r scale + b per channel, with r = 1 / sqrt(var + epsilon).

    The statistics mean and var are inputs, and get gradients too.
    """
    reason = "it is a BatchNormalization node in training mode, and onnxruntime's kernel overwrites its own inputs"
    require(not (training_mode or any(ys[1:])), reason, "set `mode`, or write the batch statistics as separate nodes")
    dtypes = (x, scale, b, mean, var)
    x, scale, _, mean, var = (op.cast(v, op.wide(x)) for v in dtypes)
    g = op.cast(g, x)
    r = 1 / op.Sqrt(var + epsilon)
    slope = scale * r
    dx = g * _per_channel(op, slope, x)
    total = _channel_sum(op, g)
    if op.wants(dtypes[1]) or op.wants(dtypes[4]):
        product = _channel_sum(op, g * (x - _per_channel(op, mean, x)))
        dscale, dvar = product * r, product * slope * r * r * -0.5
    else:
        dscale = dvar = None
    results = (dx, dscale, total, -(total * slope), dvar)
    return tuple(None if v is None else op.cast(v, dtype) for v, dtype in zip(results, dtypes, strict=True))


def through_batch_statistics(op, g, x, scale, b, centred, deviation, factor):
    """Return the cotangents of x, scale and b for a BatchNormalization with the statistics of the batch.

    It computes y = centred factor + b with centred = x - mean(x) and factor = scale / deviation. Then dx = factor (g -
    mean(g) - centred mean(g centred) / deviation^2). This takes seven passes over memory, two of them for sums. The
    rules of the single nodes that compute y would take nine.
    """
    axes = [axis for axis in range(x.rank) if axis != 1]
    g, dx = op.cast(g, centred), None
    total, product = op.sum(g, axes), op.sum(g * centred, axes)
    if op.wants(x):
        count = op.count(centred, axes)  # the sizes of centred, so that x need not be kept
        slope = product / (deviation * deviation * count)
        dx = op.cast(op.scaled(g - (centred * slope + total / count), factor), x)
    dscale = op.cast(op.reshape_like(product / deviation, scale), scale)
    return dx, dscale, op.cast(op.reshape_like(total, b), b)


def through_convolved_statistics(
    op: Op, g: Val, x: Val, w: Val, scale: Val, b: Val, _: Val, deviation: Val, factor: Val
) -> tuple[Val | None, Val | None, Val, Val]:
    """Return the cotangents of x, w, scale and b for a 1x1 convolution of x with w and the normalization after it.

    The normalization is y = centred factor + b with factor = scale / deviation, as in `through_batch_statistics`, where
    centred = w (x - mean(x)). The rule is for a convolution whose result has more channels than x. A 1x1 convolution is
    a product with the matrix w. So sums over the large result can be computed from sums over the smaller x: products of
    g with the result from products of g with x, and sums of squares of the result from products of x with itself.

    Let u = x - mean(x), met = g u^T and s = sum(w met) / (deviation^2 count). Then the cotangent of the convolution's
    result is factor (g - centred s - mean(g)). It follows that

    - dw = factor (met - s w u u^T)
    - dx = (w factor)^T (g - mean(g)) - (w factor)^T (w s) u

    The rule reads images of the size of g three times, and does not read centred. `through_batch_statistics` and the
    convolution's rule together would read such images ten times and write them three times.
    """
    inner, outer = op.size(w, 1), op.size(w, 0)
    axes = [axis for axis in range(g.rank) if axis != 1]
    centred = x - op.mean(x, axes)
    u, rows = windows.flat(op, centred), windows.flat(op, g)
    matrix = op.reshape(w, [outer, inner])
    deviation, factor = (op.reshape(v, [outer, 1]) for v in (deviation, factor))
    total = op.sum(g, axes)
    met = op.sum(rows @ op.swap_last(u), [0], keepdims=False)
    product = op.sum(matrix * met, [1])
    count = op.count(x, axes, x.dtype)
    slopes = matrix * (product / (deviation * deviation * count))
    dx = dw = None
    scaled = op.swap_last(matrix * factor)
    if op.wants(x):
        shift = scaled @ op.reshape(total / -count, [outer, 1])
        pixel = [1] * (x.rank - 2)
        through = op.Conv(
            g, op.reshape(scaled, [inner, outer, *pixel]), op.reshape(shift, [inner]), shape=x.known_shape
        )
        dx = through - op.Conv(centred, op.reshape(scaled @ slopes, [inner, inner, *pixel]), shape=x.known_shape)
    if op.wants(w):
        squares = op.sum(u @ op.swap_last(u), [0], keepdims=False)
        dw = op.reshape_like((met - slopes @ squares) * factor, w)
    return dx, dw, op.reshape_like(product / deviation, scale), op.reshape_like(total, b)


@rule("LpNormalization", kink="0 where the norm is 0; sign(0) = 0 for p = 1")
def lp_normalization(op, g, y, x, *, axis, p):
    """y = x / |x|_p along `axis`: dx = (g - d|x|/dx sum(g y)) / |x|, with d|x|/dx = y for p = 2, sign(x) for p = 1."""
    power = op.sum(op.Abs(x) if p == 1 else x * x, [axis])
    positive = power > 0
    safe = op.Where(positive, power, op.const(1.0, x))
    r = op.Where(positive, 1 / (safe if p == 1 else op.Sqrt(safe)), op.const(0.0, x))
    return r * (g - (op.Sign(x) if p == 1 else y) * op.sum(g * y, [axis]))


@rule("MeanVarianceNormalization", kink="0 with respect to the deviation if it is 0")
def mean_variance_normalization(op, g, y, x, *, axes):
    """y = (x - mean) / (deviation + 1e-9), as in the operator's function body."""
    axes = [axis % x.rank for axis in (axes or [0, 2, 3])]
    centred = x - op.mean(x, axes)
    square = op.mean(centred * centred, axes)
    positive = square > 0
    deviation = op.Sqrt(op.Where(positive, square, op.const(1.0, x)))
    r = op.Where(positive, 1 / (deviation + 1e-9), op.const(1e9, x))
    slope = op.Where(positive, op.mean(g * y, axes) / deviation, op.const(0.0, x))
    return r * (g - op.mean(g, axes)) - r * centred * slope


@rule("LRN")
def lrn(op, g, y, x, *, size, alpha, beta, bias):
    """y = x D^-beta, D = bias + alpha / size (sum of x^2 over a window of channels).

    The window sum is a product with a band matrix. Its adjoint is a product with the transposed matrix, which differs
    from the matrix if the window has an even size. Source: A. Krizhevsky et al., ImageNet Classification, 2012, section
    3.3.
    """
    low, high = -((size - 1) // 2), size // 2
    channels = x.shape[1]
    few = not isinstance(channels, int) or channels <= MOST_CHANNELS
    require(few, f"it has {channels} channels, more than {MOST_CHANNELS:,}", "normalize fewer channels")
    if isinstance(channels, int):
        offset = np.arange(channels)[None, :] - np.arange(channels)[:, None]
        band = op.const(((offset >= low) & (offset <= high)).astype(np.float64), x)
    else:
        index = op.state(op.steps(op.dim(x, 1)), (channels,))
        offset = op.unsqueeze(index, [0]) - op.unsqueeze(index, [1])
        band = op.cast(op.And(offset > low - 1, offset < high + 1), x)
    d = _windows(op, band, x * x) * (alpha / size) + bias
    slope = _windows(op, op.swap_last(band), g * y / d) * (2 * alpha * beta / size)
    return g * op.Pow(d, -beta) - x * slope


def _windows(op: Op, band: Val, v: Val) -> Val:
    return op.reshape_like(band @ op.Reshape(v, op.ints([0, 0, -1])), v)
