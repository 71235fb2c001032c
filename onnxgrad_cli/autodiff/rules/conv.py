"""Rules of convolution, transposed convolution and Col2Im.

The gradient of a convolution with respect to its input is a transposed convolution, and vice versa. The gradient with
respect to the weight has the same formula for both. onnxruntime has no kernels for these gradients, so they are written
as convolutions and matrix products that it runs fast. `input_gradient` and `conv_weights.weight_gradient` choose the
form by the shapes.
"""

from __future__ import annotations

from math import prod

import numpy as np

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.autodiff.rules.conv_weights import (
    MAX_IDENTITY_TAPS,
    MAX_SMALL_IMAGE,
    joined,
    outweighs,
    weight_gradient,
)
from onnxgrad_cli.ir.types import HALVES, MAX_INT64

MIN_CHANNELS_OF_ROWS = 128
"""Smallest number of channels for which gathering rows of channels is fast."""

MIN_HEAVY_WEIGHT = 1 << 19
"""Smallest number of elements of a 1x1 weight for which transposing it takes longer than transposing small images."""

LARGEST_BLOCK = 1 << 12
"""Largest number of elements n in a block of a Col2Im. Its rule writes a matrix of n rows and n columns."""


@rule("Conv")
def conv(op, g, y, x, w, b, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """dX is the transposed convolution of G with W, dW the correlation of X with G, dB the sum of G per channel.

    Source: V. Dumoulin and F. Visin, A guide to convolution arithmetic for deep learning, 2016, chapter 4.
    """
    win = windows.window(windows.kernel_of(kernel_shape, w), strides, dilations, pads, group)
    win, late = windows.auto_window(op, win, x, auto_pad)
    image = windows.pad(op, x, *late) if late else x
    g, factors = _unscaled(op, g, w)
    dx = dw = None
    if op.wants(x):
        dx = input_gradient(op, g, w if factors is None else w * factors, image, win)
        if late:
            dx = windows.crop_like(op, dx, late[0], x)
    if op.wants(w):
        dw = weight_gradient(op, image, g, w, win)
        dw = dw if factors is None else dw * factors
    db = bias_gradient(op, g, b)
    return dx, dw, db if db is None or factors is None else db * op.reshape_like(factors, db)


def _unscaled(op, g, w):
    """If `g` is the product of images g' and a factor per channel, return g' and the factors.

    The gradient of a normalization scales the channels of `g` in this way. The caller then scales the weight and its
    gradient instead of the images. This is faster if the weight is at most half as large as a sample of `g`.

    Returns:
        (g', factors in a shape that broadcasts to `w`). (g, None) if `g` was not scaled, if the weight is too large, or
        if `g` is a 16-bit float, because sums of g' might overflow.
    """
    found, sizes = op.unscaled(g) if g.dtype not in HALVES else None, w.shape
    if found is None or not all(isinstance(size, int) for size in sizes) or windows.cells(g) < 2 * prod(sizes[1:]):
        return g, None
    return found[0], op.reshape(found[1], [sizes[0], *[1] * (w.rank - 1)])


@rule("ConvTranspose")
def conv_transpose(
    op, g, y, x, w, b, *, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
):
    """dX is the convolution of G with the same weight, and dW is the correlation of G with X.

    Y is the part [begin, begin + size) of the full (unpadded) transposed convolution, with zeros beyond its ends.
    """
    win = windows.window(windows.kernel_of(kernel_shape, w), strides, dilations, pads, group)
    why = None
    if g.rank != x.rank:
        why = "its output_shape is smaller than the input, so its shape was inferred wrongly"
    elif auto_pad.startswith("SAME") and any(s > e for s, e in zip(win.strides, win.extents, strict=True)):
        why = f"it has {auto_pad} and a stride larger than the kernel; runtimes disagree on the size of its output"
    elif auto_pad.startswith("SAME") and any(output_padding or ()):
        why = f"it has {auto_pad} and output_padding, so its shape was inferred wrongly"
    if why:
        no = op.no(why, "replace auto_pad and output_shape by explicit pads")
        return no, no, bias_gradient(op, g, b)
    if output_shape and not (win.known and all(isinstance(size, int) for size in x.shape[2:])):
        begins, ends = _late_pads(op, win, x, w, auto_pad, output_padding, output_shape)
        win, over = win._replace(begins=(0,) * len(win.kernel), ends=(0,) * len(win.kernel)), []
        g_inner = windows.pad(op, g, begins, ends)
    else:
        win, over = _transposed_pads(win, x, auto_pad, output_padding, output_shape)
        g_inner = g
    if any(over):
        starts, stops = op.ints([0] * len(over)), op.ints([-n if n else MAX_INT64 for n in over])
        g_inner = op.Slice(g, starts, stops, op.ints(win.axes))
    dx = op.Conv(g_inner, w, **win.attributes, shape=x.known_shape) if op.wants(x) else None
    dw = weight_gradient(op, g_inner, x, w, win) if op.wants(w) else None
    return dx, dw, bias_gradient(op, g, b)


def _transposed_pads(win, x, auto_pad, output_padding, output_shape):
    """Return the window of the convolution from Y to X, and for each spatial axis the number of last elements to cut.

    The weight does not contribute to these elements at the end of Y.
    """
    extra = output_padding or [0] * len(win.kernel)
    begins, ends, over = [], [], []
    for i, stride in enumerate(win.strides):
        begin, end = win.begins[i], win.ends[i] - extra[i]
        if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            total = win.extents[i] - stride + extra[i]
            if output_shape:
                total += x.shape[2 + i] * stride - output_shape[-len(win.kernel) :][i]
            begin = windows.split_pads(max(total, 0), auto_pad)[0]
            end = total - begin - extra[i]
        elif auto_pad == "VALID":
            begin, end = 0, -extra[i]
        begins.append(begin)
        ends.append(max(end, 0))
        over.append(max(-end, 0))
    return win._replace(begins=tuple(begins), ends=tuple(ends)), over


def _late_pads(op, win, x, w, auto_pad, output_padding, output_shape):
    """Return the begin pads and the end pads of Y, if they depend on output_shape and are known only at run time.

    A pad is the number of elements of the full transposed convolution that Y lacks at one end. If it is negative, no
    weight contributes to that number of elements at this end of Y.
    """
    strides, dilations = op.ints(win.strides), op.ints(win.dilations)
    extra = op.ints(output_padding or [0] * len(win.kernel))
    sizes = op.vector(op.sizes(x, win.axes))
    full = (sizes - 1) * strides + (windows.kernel_sizes(op, win, w) - 1) * dilations + 1
    total = full + extra - op.ints(output_shape[-len(win.kernel) :])
    begins, _ = windows.split_pads(op.Max(total, op.ints([0])), auto_pad)
    return begins, total - begins - extra


def bias_gradient(op, g, b):
    return op.sum(g, [0, *range(2, g.rank)], keepdims=False) if op.wants(b) else None


def input_gradient(op, g, w, x, win):
    """Return the cotangent of a convolution's input, computed in a form that depends on the shapes.

    Pairs such as "1.2 instead of 1.6" are times relative to PyTorch, in the form that is used and in a different form.

    - At stride 1, a convolution with the flipped weight, which uses threads better than ConvTranspose: 1.2 instead of
      1.6 (3x3 at 56x56), 0.8 instead of 1.3 (1x1), 0.9 instead of 3.7 (depthwise).
    - ConvTranspose for small images without groups (28x28: 0.4 instead of 1.9), and for other strides.
    - One product with gathered columns for small images with many channels (14x14: 1.2 instead of 1.3, 7x7: 1.4 instead
      of 1.8; with 32 channels it would be 2.0 instead of 1.6).
    - One product for all samples, if a 1x1 weight has `MIN_HEAVY_WEIGHT` elements or more, because the convolution
      would transpose the weight. For 7x7 images, the product takes 0.6 to 0.85 times as long as the convolution.
    """
    forms, default = ["transposed convolution"], "transposed convolution"
    backwards = _backwards(win)
    if backwards:
        forms.append("convolution")
        sizes, channels = windows.cells(x), w.shape[0]
        spread = win.group == 1 and any(k != 1 for k in win.kernel) and 0 < sizes <= 32 * 32
        default = default if spread else "convolution"
        if win.group == 1 and sizes > 0 and isinstance(channels, int):
            forms.append("gathered product")
            if spread and sizes <= MAX_SMALL_IMAGE and channels >= MIN_CHANNELS_OF_ROWS:
                default = "gathered product"
            if all(k == 1 for k in win.kernel):
                forms.append("product")
                default = "product" if outweighs(w, g) and prod(w.shape) >= MIN_HEAVY_WEIGHT else default
    form = op.variant("input gradient", forms, default)
    if form == "gathered product":
        return _by_gathering(op, g, w, x, backwards)
    if form == "product":
        channels = op.size(w, 1)
        dx = op.swap_last(op.reshape(w, [op.size(w, 0), channels])) @ joined(op, g)
        return op.reshape_like(op.transpose(op.reshape(dx, [channels, -1, windows.cells(g)]), [1, 0, 2]), x)
    if form == "convolution":
        return op.Conv(g, _flipped(op, w, win), **backwards.attributes, shape=x.known_shape)
    return windows.spread(op, g, w, x, win)


def _backwards(win):
    """Return the window of the convolution with the flipped weight that computes dX, or None if there is none."""
    if not win.known or any(s != 1 for s in win.strides):
        return None
    rest = [extent - 1 - pad for extent, pad in zip(win.extents * 2, (*win.begins, *win.ends), strict=True)]
    half = len(win.kernel)
    return win._replace(begins=tuple(rest[:half]), ends=tuple(rest[half:])) if min(rest) >= 0 else None


def _by_gathering(op, g, w, x, win):
    """Return dX as one matrix product of the weight and a matrix of columns.

    For each pixel of X, the matrix has the rows of channels of G that the taps connect with the pixel.
    """
    channels, inner = op.size(w, 1), w.shape[0]
    count = int(np.prod(win.kernel))
    rows = op.transpose(windows.flat(op, windows.pad(op, g, win.begins, win.ends)), [0, 2, 1])
    columns = op.Gather(rows, windows.places(op, win, g, x, [range(size)[::-1] for size in win.kernel]), axis=1)
    w_rows = op.transpose(op.reshape(w, [inner, channels, count]), [2, 0, 1])
    dx = op.reshape(columns, [-1, count * inner]) @ op.reshape(w_rows, [count * inner, channels])
    return op.reshape_like(op.transpose(op.reshape(dx, [-1, windows.cells(x), channels]), [0, 2, 1]), x)


def _flipped(op, w, win):
    """Return the weight with input and output channels swapped within each group, and spatial axes reversed.

    A small kernel is reversed by a product with a permutation matrix, because a strided Slice is slow for large
    weights.
    """
    kernel, taps = list(win.kernel), int(np.prod(win.kernel))
    spatial = list(range(2, w.rank))
    if win.group == 1:
        w = op.transpose(w, [1, 0, *spatial])
    elif w.shape[0] != win.group or w.shape[1] != 1:
        per = windows.divided(op, w, 0, win.group)
        w = op.reshape(w, [win.group, per, op.size(w, 1), *kernel])
        w = op.transpose(w, [0, 2, 1, *(axis + 1 for axis in spatial)])
        w = op.reshape(w, [-1, per, *kernel])
    if taps == 1:
        return w
    rows = op.Reshape(w, op.ints([0, 0, taps]))
    if taps > MAX_IDENTITY_TAPS:
        return op.Reshape(op.Gather(rows, op.ints(range(taps - 1, -1, -1)), axis=2), op.ints([0, 0, *kernel]))
    return op.Reshape(rows @ op.const(np.eye(taps)[::-1], w), op.ints([0, 0, *kernel]))


@rule("Col2Im")
def col2im(op, g, y, x, image_shape, block_shape, *, dilations, pads, strides):
    """dX is Im2Col of G: a convolution whose kernels have a single 1 each, at different positions.

    It takes 0.2 to 3 times as long as PyTorch. Gathering the windows instead would take 2 to 5 times as long as the
    convolution, or more.
    """
    block = block_shape.const
    if block is not None:
        taps = int(np.prod(block))
        if taps > LARGEST_BLOCK:
            return op.no(f"its blocks of {' x '.join(map(str, block))} elements are too large", "use smaller blocks")
        kernels = op.const(np.eye(taps).reshape(taps, 1, *block), g)
    else:
        taps = op.ReduceProd(block_shape, keepdims=1)
        numbers = op.steps(taps)
        single = op.cast(op.Equal(op.unsqueeze(numbers, [1]), numbers), g)
        kernels = op.Reshape(single, op.vector([taps, 1, block_shape]), shape=[None, 1, *[None] * (g.rank - 2)])
    planes = op.reshape(g, [-1, 1, *op.sizes(g, range(2, g.rank))])
    windowed = op.Conv(planes, kernels, dilations=dilations, pads=pads, strides=strides)
    return op.reshape_like(windowed, x)
