"""BatchNormalization by the statistics of the batch behind a convolution of single pixels, differentiated as one.

What is normalized has more channels than the images that the convolution reads. The convolution is a matrix, and so
most of what the gradient needs of the normalized images it has from the smaller ones: sums of products by the matrix
itself, and sums of squares by the products of the smaller images with each other.
"""

from __future__ import annotations

from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val


def through_convolved_statistics(
    op: Op, g: Val, x: Val, w: Val, scale: Val, b: Val, _: Val, deviation: Val, factor: Val
) -> tuple[Val | None, Val | None, Val, Val]:
    """The cotangents of x, w, scale and b where y = centred factor + b, and centred = w (x - mean(x)).

    With u = x - mean(x), met = g u^T and s = sum(w met) / (deviation^2 count), the cotangent of the convolution's
    result is factor (g - centred s - mean(g)). So dw = factor (met - s w u u^T), and dx = (w factor)^T (g - mean(g)) -
    (w factor)^T (w s) u. Images of the size of g are read three times, where `through_batch_statistics` and the
    convolution's rule read ten and write three, and centred is not kept.
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
