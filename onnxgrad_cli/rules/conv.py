"""Convolution and its transpose. Each is the other's gradient in the input; both share the gradient of the weight.

Stock onnxruntime has no kernel for a convolution's gradients, so they are written as the convolutions and matrix
products that it does run fast; which, is chosen by shape in `input_gradient` and `weight_gradient`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxgrad_cli.registry import rule
from onnxgrad_cli.rules import windows


@rule("Conv")
def conv(op, g, y, x, w, b, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """dX is the transposed convolution of G, dW the correlation of X with G, dB the sum of G.

    Source: V. Dumoulin and F. Visin, A guide to convolution arithmetic for deep learning, 2016, chapter 4.
    """
    win = windows.window(windows.kernel_of(kernel_shape, w), strides, dilations, pads, group)
    win, late = windows.auto_window(op, win, x, auto_pad)
    image = windows.pad(op, x, *late) if late else x
    dx = dw = None
    if op.wants(x):
        dx = input_gradient(op, g, w, image, win)
        if late:
            dx = windows.crop_like(op, dx, late[0], x)
    if op.wants(w):
        dw = weight_gradient(op, image, g, w, win)
    return dx, dw, bias_gradient(op, g, b)


@rule("ConvTranspose")
def conv_transpose(
    op,
    g,
    y,
    x,
    w,
    b,
    *,
    auto_pad,
    dilations,
    group,
    kernel_shape,
    output_padding,
    output_shape,
    pads,
    strides,
):
    """Y is the window [begin, begin + size) of the full transposed convolution, zeros where that ends before.

    So dX is the convolution of G with the same weight, and dW the correlation of G with X.
    """
    win = windows.window(windows.kernel_of(kernel_shape, w), strides, dilations, pads, group)
    why = None
    if g.rank != x.rank:
        why = "output_shape is smaller than the input, for which its shape was inferred wrongly"
    elif auto_pad.startswith("SAME") and any(s > e for s, e in zip(win.strides, win.extents, strict=True)):
        why = f"{auto_pad} with a stride beyond the kernel: runtimes disagree on the size of its output"
    elif auto_pad.startswith("SAME") and any(output_padding or ()):
        why = f"{auto_pad} with output_padding, with which its shape was inferred wrongly"
    if why:
        return op.no(why, "write its pads out"), op.no(why, "write its pads out"), bias_gradient(op, g, b)
    if output_shape and not (win.known and all(isinstance(size, int) for size in x.shape[2:])):
        begins, ends = _late_pads(op, win, x, w, auto_pad, output_padding, output_shape)
        win, over = replace(win, begins=(0,) * len(win.kernel), ends=(0,) * len(win.kernel)), []
        g_inner = windows.pad(op, g, begins, ends)
    else:
        win, over = _transposed_pads(win, x, auto_pad, output_padding, output_shape)
        g_inner = g
    if any(over):
        axes = win.axes
        g_inner = op.Slice(
            g, op.ints([0] * len(axes)), op.ints([-n if n else windows.LAST for n in over]), op.ints(axes)
        )
    dx = dw = None
    if op.wants(x):
        dx = op.Conv(g_inner, w, **win.attributes, shape=x.known_shape)
    if op.wants(w):
        dw = weight_gradient(op, g_inner, x, w, win)
    return dx, dw, bias_gradient(op, g, b)


def _transposed_pads(win, x, auto_pad, output_padding, output_shape):
    """The window whose convolution maps Y's sizes to X's, and how many cells of Y's ends no weight reaches."""
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
    return replace(win, begins=tuple(begins), ends=tuple(ends)), over


def _late_pads(op, win, x, w, auto_pad, output_padding, output_shape):
    """What is missing around Y, of the full transposed convolution, where that follows at run time from output_shape;
    negative where no weight reaches.
    """
    strides, dilations = op.ints(win.strides), op.ints(win.dilations)
    extra = op.ints(output_padding or [0] * len(win.kernel))
    sizes = op.vector([op.size(x, axis) for axis in win.axes])
    full = (sizes - 1) * strides + (windows.kernel_sizes(op, win, w) - 1) * dilations + 1
    total = full + extra - op.ints(output_shape[-len(win.kernel) :])
    begins, _ = windows.split_pads(op.Max(total, op.ints([0])), auto_pad)
    return begins, total - begins - extra


def bias_gradient(op, g, b):
    return op.sum(g, [0, *range(2, g.rank)], keepdims=False) if op.wants(b) else None


def input_gradient(op, g, w, x, win):
    """The cotangent of a convolution's input.

    At stride 1 a convolution with the flipped weight, which threads better than ConvTranspose: a ratio to PyTorch
    of 1.2 against 1.6 (3x3 at 56x56), 0.8 against 1.3 (1x1), 0.9 against 3.7 (depthwise). Small images without
    groups, and strides, stay with ConvTranspose (28x28: 0.4 against 1.9, 14x14: 1.4 against 1.5).
    """
    if not win.known:
        return windows.spread(op, g, w, x, win)
    rest = [extent - 1 - pad for extent, pad in zip(win.extents * 2, (*win.begins, *win.ends), strict=True)]
    pointwise = all(k == 1 for k in win.kernel)
    sizes = [size for size in x.shape[2:] if isinstance(size, int)]
    small = len(sizes) == len(win.kernel) and np.prod(sizes) <= 32 * 32 and win.group == 1 and not pointwise
    if any(s != 1 for s in win.strides) or min(rest) < 0 or small:
        return windows.spread(op, g, w, x, win)
    half = len(win.kernel)
    flipped = replace(win, begins=tuple(rest[:half]), ends=tuple(rest[half:]))
    return op.Conv(g, _flipped(op, w, win), **flipped.attributes, shape=x.known_shape)


def _flipped(op, w, win):
    """The weight with input and output channels exchanged in each group, and its spatial axes reversed.

    The reversal is a product with a small permutation matrix: a strided Slice is slow on large weights.
    """
    kernel, taps = list(win.kernel), int(np.prod(win.kernel))
    spatial = list(range(2, w.rank))
    if win.group == 1:
        w = op.transpose(w, [1, 0, *spatial])
    elif w.shape[0] != win.group or w.shape[1] != 1:
        per = _size(op, w, 0, win.group)
        w = op.reshape(w, [win.group, per, op.size(w, 1), *kernel])
        w = op.transpose(w, [0, 2, 1, *(axis + 1 for axis in spatial)])
        w = op.reshape(w, [-1, per, *kernel])
    if taps == 1:
        return w
    reverse = op.const(np.eye(taps)[::-1], w)
    return op.Reshape(op.Reshape(w, op.ints([0, 0, taps])) @ reverse, op.ints([0, 0, *kernel]))


def _size(op, x, axis, parts):
    """One axis of `x` divided by `parts`: an int where it is static, else an int64 vector of one element."""
    size = op.size(x, axis)
    return size // parts if isinstance(size, int) else size / parts


def weight_gradient(op, x, g, w, win):
    """The cotangent of a convolution's weight: the correlation of its input `x` with its output's cotangent.

    1x1: one batched product, 0.2-0.9 of PyTorch's time. From 16 channels a group one well-shaped product a tap,
    1.0-1.6, against 2-5 for the textbook convolution, which serves all others: at 8 channels the two are equal,
    in a stem 1.7 against 7, depthwise 6 against 54. Summing the diagonals of a product of columns (depthwise) was
    1.4 times faster at 56x56 and 1.7 times slower at 7x7, so it is not used.
    """
    channels = w.shape[1] if isinstance(w.shape[1], int) else 16
    if all(k == 1 for k in win.kernel) and win.group == 1 and not any((*win.begins, *win.ends)):
        dw = _by_product(op, x, g, win)
    elif win.known and len(win.kernel) <= 2 and channels >= 16:
        dw = _by_taps(op, x, g, w, win)
    else:
        dw = _by_convolution(op, x, g, w, win)
    return op.reshape_like(dw, w)


def _by_product(op, x, g, win):
    if any(s != 1 for s in win.strides):
        n = len(win.kernel)
        x = op.Slice(x, op.ints([0] * n), op.ints([windows.LAST] * n), op.ints(win.axes), op.ints(win.strides))
    return op.sum(windows.flat(op, g) @ op.swap_last(windows.flat(op, x)), [0], keepdims=False)


def _by_taps(op, x, g, w, win):
    """Rows that a kernel row meets are gathered in NHWC order; each kernel column is then one batched product.

    Shapes: x [N, G*C, H, W], g [N, G*M, P, Q] -> [G*M, C, kH, kW]; one spatial axis is H = 1.
    """
    x = windows.pad(op, x, win.begins, win.ends)
    strides, dilations, kernel = win.strides, win.dilations, win.kernel
    if len(kernel) == 1:
        x, strides, dilations, kernel = op.unsqueeze(x, [2]), (1, *strides), (1, *dilations), (1, *kernel)
    per, channels = _size(op, w, 0, win.group), op.size(w, 1)
    if win.group > 1:
        x = op.reshape(x, [-1, channels, op.size(x, 2), op.size(x, 3)])
        g_flat = op.reshape(g, [op.size(g, 0) * win.group, per, windows.cells(g)])
    else:
        g_flat = windows.flat(op, g)
    g_flat, x = op.unsqueeze(g_flat, [1]), op.transpose(x, [0, 2, 3, 1])
    if len(win.kernel) == 2:
        x = op.Gather(x, _meets(op, g, 2, kernel[0], strides[0], dilations[0]), axis=1)
    shape = op.vector([0, kernel[0], windows.cells(g), channels])
    products = []
    for tap in range(kernel[1]):
        column = op.Gather(x, _meets(op, g, -1, 1, strides[1], dilations[1], tap * dilations[1]), axis=2)
        products.append(g_flat @ op.state(op.Reshape(column, shape), [None, kernel[0], None, w.shape[1]]))
    stacked = op.Concat(*(op.unsqueeze(p, [4]) for p in products), axis=4)
    if win.group > 1:
        stacked = op.reshape(stacked, [-1, win.group, kernel[0], per, channels, kernel[1]])
        return op.transpose(op.sum(stacked, [0], keepdims=False), [0, 2, 3, 1, 4])
    return op.transpose(op.sum(stacked, [0], keepdims=False), [1, 2, 0, 3])


def _meets(op, g, axis, taps, stride, dilation, offset=0):
    """The positions that `taps` taps of the windows at all outputs along `axis` read, tap by tap."""
    first, size = np.arange(taps)[:, None] * dilation + offset, g.shape[axis]
    if isinstance(size, int):
        return op.const((first + np.arange(size) * stride).reshape(-1))
    outputs = op.steps(op.dim(g, axis))
    return op.reshape(op.Add(outputs * stride, op.const(first)), [-1])


def _by_convolution(op, image, g, w, win):
    """The textbook form: batch as channels, strides and dilations exchanged, the cotangent as the kernel."""
    spatial, x = win.axes, image
    if win.group == 1:
        x = op.transpose(x, [1, 0, *spatial])
    else:
        sizes = [op.size(x, axis) for axis in spatial]
        x = op.reshape(x, [op.size(x, 0), win.group, op.size(w, 1), *sizes])
        x = op.transpose(x, [2, 1, 0, *(axis + 1 for axis in spatial)])
        x = op.reshape(x, [op.size(w, 1), -1, *sizes])
    exact = all(
        stride == 1 or (rest is not None and rest < dilation)
        for rest, stride, dilation in zip(windows.remainder(win, image, g), win.strides, win.dilations, strict=True)
    )
    channels = (w.shape[1], g.shape[1])
    result = op.Conv(
        x,
        op.transpose(g, [1, 0, *spatial]),
        strides=list(win.dilations),
        dilations=list(win.strides),
        pads=[*win.begins, *win.ends],
        group=win.group,
        shape=(*channels, *(win.kernel if exact else "?" * len(spatial))),
    )
    if not exact:
        starts, stops = op.ints([0] * len(spatial)), windows.kernel_sizes(op, win, w)
        result = op.Slice(result, starts, stops, op.ints(spatial), shape=(*channels, *win.kernel))
    if not isinstance(image.shape[0], int):  # of no channels, which an empty batch is here, onnxruntime makes no zeros
        result = op.Where(op.dim(image, 0) > 0, result, op.const(0.0, g))
    return op.transpose(result, [1, 0, *spatial])


@rule("Col2Im")
def col2im(op, g, y, x, image_shape, block_shape, *, dilations, pads, strides):
    """The windows of G, laid out as columns: a convolution whose kernels have a single 1 each.

    Its time is 0.2-3 of PyTorch's; gathering the windows takes 2-5 times as long as PyTorch, or more.
    """
    block = block_shape.const
    if block is not None:
        taps = int(np.prod(block))
        kernels = op.const(np.eye(taps).reshape(taps, 1, *block), g)
    else:
        taps = op.ReduceProd(block_shape, keepdims=1)
        numbers = op.steps(taps)
        single = op.cast(op.Equal(op.unsqueeze(numbers, [1]), numbers), g)
        kernels = op.Reshape(single, op.vector([taps, 1, block_shape]), shape=[None, 1, *[None] * (g.rank - 2)])
    planes = op.reshape(g, [-1, 1, *(op.size(g, axis) for axis in range(2, g.rank))])
    windowed = op.Conv(planes, kernels, dilations=dilations, pads=pads, strides=strides)
    return op.reshape_like(windowed, x)
