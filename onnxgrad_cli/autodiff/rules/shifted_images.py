"""The gradient of a convolution's weight at stride 1 from shifted images.

Images lie flat, with so many zeros after each row that what a tap reads beyond either end of a row is a zero. Then all
that a tap reads is the flat image, shifted; shifted copies are laid one after the other with zeros between. These are
long copies of memory, where rows of pixels would be cut out and padded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from onnxgrad_cli.autodiff.rules.windows import Window, flat, matrices, pad
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val


def correlation(op: Op, x: Val, g: Val, win: Window) -> Val:
    """The correlation of an image with the cotangent of its convolution, whose strides are 1, summed over the batch.

    The tap (r, s) multiplies the pixel (i, j) of G with that at (i + r - top, j + s - left) of x, which lies `r - top`
    rows and `s - left` pixels further on. G is shifted by the rows and x by the pixels, so that each is copied once
    for each tap of one axis. Behind G's own rows are zeros too, so whatever stands there in x counts for nothing.

    Args:
        x: the image, [N, C, H, W].
        g: the cotangent, [N, M, P, Q].

    Returns:
        [M, C, kH, kW].
    """
    (down, across), (top, left), (bottom, _) = win.dilations, win.begins, win.ends
    (high, wide), far = win.sizes, win.extents[1] - 1
    zeros, behind = _gaps(win)
    channels, outputs, rows, row = op.size(x, 1), op.size(g, 1), op.size(x, 2), op.size(x, 3) + zeros
    lead = 0 if top else max(far - left, 0)
    length = (rows + (top + bottom)) * row + (lead + (0 if bottom else left))
    ahead = [top * row + (lead + left - s * across) for s in range(wide)]
    columns = _laid(op, pad(op, x, [0, 0], [0, zeros]), ahead, length)
    g_rows = _laid(op, pad(op, g, [0, 0], [0, behind]), [r * down * row + lead for r in range(high)], length)
    dw = op.sum(g_rows @ op.swap_last(columns), [0], keepdims=False)
    return op.transpose(op.reshape(dw, [outputs, high, channels, wide]), [0, 2, 1, 3])


def flattened(op: Op, x: Val, g: Val, win: Window) -> tuple[Val, Val, np.ndarray]:
    """An image and the cotangent of its convolution, whose strides are 1, as rows of one length one after the other.

    Args:
        x: the image, [N, C, H, W], its last two sizes known.
        g: the cotangent, [N, M, P, Q].

    Returns:
        `x`, [N, C, cells], and `g`, [N, M, cells], with zeros between the rows; and where each tap starts to read `x`,
        [kH * kW, 1].
    """
    (top, left), (bottom, _) = win.begins, win.ends
    zeros, behind = _gaps(win)
    row = int(x.shape[3]) + zeros
    steps = [row * win.dilations[0], win.dilations[1]]
    rows = -(-(win.extents[1] - 1) // row)  # that the last taps read beyond the last one
    x = pad(op, x, [top, left], [bottom + rows, zeros - left])
    g = pad(op, g, [0, 0], [0, behind])
    return flat(op, x), flat(op, g), np.array([[np.dot(tap, steps)] for tap in np.ndindex(*win.sizes)])


def _gaps(win: Window) -> tuple[int, int]:
    """How many zeros follow a row of the image, and one of G, so that both are equally long and a tap, beyond either
    end of a row, reads a zero."""
    left, right = win.begins[1], win.ends[1]
    wider = left + right - (win.extents[1] - 1)  # is a row of G than one of the image
    zeros = max(left, right, wider)
    return zeros, zeros - wider


def _laid(op: Op, x: Val, ahead: Sequence[int | Val], length: int | Val) -> Val:
    """Copies of each plane of `x`, [N, C, H, W], `length` long, behind zeros: [N, C * copies, length]."""
    batch, channels, size = op.size(x, 0), op.size(x, 1), op.size(x, 2) * op.size(x, 3)
    behind = length - size
    gaps = [ahead[0], *(behind - before + after for before, after in pairwise(ahead)), behind - ahead[-1]]
    plane = matrices(op, x, channels, size)
    parts = [op.zeros([batch, channels, gaps[0]], x)]
    for gap in gaps[1:]:
        parts += [plane, op.zeros([batch, channels, gap], x)]
    return matrices(op, op.Concat(*parts, axis=2), channels * len(ahead), length)
