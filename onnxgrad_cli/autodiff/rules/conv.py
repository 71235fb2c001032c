"""Convolution and its transpose. Each is the other's gradient in the input; both share the gradient of the weight.

Stock onnxruntime has no kernel for a convolution's gradients, so they are written as the convolutions and matrix
products that it does run fast; which, is chosen by shape in `input_gradient` and `weight_gradient`.
"""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import diagonals, shifted_images, windows
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.types import HALVES

SMALL, MANY, LARGE = 196, 128, 100_000
"""Positions of an image up to which it is small beside weights; channels from which copying rows of them is fast;
numbers in a weight from which moving them takes time."""

NARROW = 64
"""The width of an image up to which products of whole rows are worth their diagonals."""

WIDE = 32
"""The width of a kernel from which its columns are not read one by one: each would be a node."""

HEAVY = 1 << 19
"""Numbers in the weight of single pixels from which its transpose takes longer than that of small images."""

LONG, LARGEST_BLOCK = 512, 1 << 12
"""Taps of a kernel up to which a matrix of each by each is worth its size, and of a block up to which there is one."""


@rule("Conv")
def conv(op, g, y, x, w, b, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """dX is the transposed convolution of G, dW the correlation of X with G, dB the sum of G.

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
    """`g` before its channels were scaled, as by the adjoint of a normalization, and the factors, shaped for `w`; `g`
    and None where the weight, which is scaled in its place, is not smaller than a sample of `g`: it is twice. Sums of
    what is not yet scaled down might leave the range of 16 bits."""
    found, sizes = op.unscaled(g) if g.dtype not in HALVES else None, w.shape
    if found is None or not all(isinstance(size, int) for size in sizes) or windows.cells(g) < 2 * prod(sizes[1:]):
        return g, None
    return found[0], op.reshape(found[1], [sizes[0], *[1] * (w.rank - 1)])


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
        win, over = win._replace(begins=(0,) * len(win.kernel), ends=(0,) * len(win.kernel)), []
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
    return win._replace(begins=tuple(begins), ends=tuple(ends)), over


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
    groups, and strides, stay with ConvTranspose (28x28: 0.4 against 1.9), but for those of many channels, which are
    one product with gathered columns (14x14: 1.2 against 1.3, 7x7: 1.4 against 1.8; 32 channels: 2.0 against 1.6). A
    weight of a million single pixels the convolution would transpose: one product of all samples takes 0.6-0.85 of its
    time at 7x7.
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
            default = "gathered product" if spread and sizes <= SMALL and channels >= MANY else default
            if all(k == 1 for k in win.kernel):
                forms.append("product")
                default = "product" if _outweighs(w, g) and prod(w.shape) >= HEAVY else default
    form = op.variant("input gradient", forms, default)
    if form == "gathered product":
        return _by_gathering(op, g, w, x, backwards)
    if form == "product":
        channels = op.size(w, 1)
        dx = op.swap_last(op.reshape(w, [op.size(w, 0), channels])) @ _joined(op, g)
        return op.reshape_like(op.transpose(op.reshape(dx, [channels, -1, windows.cells(g)]), [1, 0, 2]), x)
    if form == "convolution":
        return op.Conv(g, _flipped(op, w, win), **backwards.attributes, shape=x.known_shape)
    return windows.spread(op, g, w, x, win)


def _backwards(win):
    """The window of the convolution with the flipped weight that gives dX; None where there is none."""
    if not win.known or any(s != 1 for s in win.strides):
        return None
    rest = [extent - 1 - pad for extent, pad in zip(win.extents * 2, (*win.begins, *win.ends), strict=True)]
    half = len(win.kernel)
    return win._replace(begins=tuple(rest[:half]), ends=tuple(rest[half:])) if min(rest) >= 0 else None


def _by_gathering(op, g, w, x, win):
    """The convolution of G with the weight as it lies: windows are read backwards, a row of channels a tap."""
    channels, inner = op.size(w, 1), w.shape[0]
    count = int(np.prod(win.kernel))
    rows = op.transpose(windows.flat(op, windows.pad(op, g, win.begins, win.ends)), [0, 2, 1])
    columns = op.Gather(rows, windows.places(op, win, g, x, [range(size)[::-1] for size in win.kernel]), axis=1)
    w_rows = op.transpose(op.reshape(w, [inner, channels, count]), [2, 0, 1])
    dx = op.reshape(columns, [-1, count * inner]) @ op.reshape(w_rows, [count * inner, channels])
    return op.reshape_like(op.transpose(op.reshape(dx, [-1, windows.cells(x), channels]), [0, 2, 1]), x)


def _flipped(op, w, win):
    """The weight with input and output channels exchanged in each group, and its spatial axes reversed.

    The reversal is a product with a permutation matrix while that is small: a strided Slice is slow on large weights.
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
    rows = op.Reshape(w, op.ints([0, 0, taps]))
    if taps > LONG:
        return op.Reshape(op.Gather(rows, op.ints(range(taps - 1, -1, -1)), axis=2), op.ints([0, 0, *kernel]))
    return op.Reshape(rows @ op.const(np.eye(taps)[::-1], w), op.ints([0, 0, *kernel]))


def _size(op, x, axis, parts):
    """One axis of `x` divided by `parts`: an int where it is static, else an int64 vector of one element."""
    size = op.size(x, axis)
    return size // parts if isinstance(size, int) else size / parts


def weight_gradient(op, x, g, w, win):
    """The cotangent of a convolution's weight: the correlation of its input `x` with its output's cotangent.

    Ratios to PyTorch's time, where the textbook convolution (2-7) serves all others. 1x1: one batched product,
    0.2-0.9. Few channels, or rows of pixels about as long as those of channels: columns of pixels, 1.0-2.4 (a stem 1.4,
    64x56x56 1.3, 16x128x128 2.2); else columns of channels (128x28x28 1.2, 256x14x14 1.1, 512x7x7 0.8), each slower
    than the other beyond that. Depthwise at stride 1, shifted images take 0.7-0.9 of the time of the convolution, and
    products of whole rows, of which only diagonals are summed, 0.5-0.9 of theirs up to 56 pixels a row (14: 0.56, 28:
    0.62, 56: 0.89; 112: 1.14); of that of the convolution at stride 2 0.67-0.9 (112: 1.08), of 7x7 taps 0.5-0.64. Of
    wide kernels on few channels, as filters of sound are, the convolution takes 0.16-0.85 of the time of pixels.
    """
    form = op.variant("weight gradient", *weight_forms(x, g, w, win))
    return op.reshape_like(WEIGHT_FORMS[form](op, x, g, w, win), w)


def weight_forms(x, g, w, win):
    """The forms that there are of the gradient of a weight, and the one that suits its shapes."""
    channels = w.shape[1] if isinstance(w.shape[1], int) else 16
    width = g.shape[-1] if isinstance(g.shape[-1], int) else 0
    if not win.known:
        return ["convolution"], "convolution"
    forms, default = ["convolution", "channels"], "channels" if channels >= 16 else "convolution"
    if win.group == 1 and len(win.kernel) <= 2 and win.kernel[-1] < WIDE:
        forms.append("pixels")
        default = "pixels" if channels < 16 or width >= max(0.8 * channels, 16) else default
    if w.shape[:2] == (win.group, 1) and max(win.strides) == 1 and np.prod(win.kernel) <= 25:
        forms.append("shifts")
        default = "shifts" if win.group > 1 else default
    if w.shape[:2] == (win.group, 1) and len(win.kernel) == 2 and windows.cells(g) > 0 and windows.cells(x) > 0:
        forms.append("diagonals")
        default = "diagonals" if win.group > 1 and x.shape[3] <= NARROW and win.kernel[1] > 1 else default
    if win.group == 1 and all(k == 1 for k in win.kernel) and not any((*win.begins, *win.ends)):
        forms.append("product")
        default = "product"
    return forms, default


def _by_pixels(op, x, g, w, win):
    """The product of the columns that windows read, which are rows of pixels, with G.

    Shapes: x [N, C, H, W], g [N, M, P, Q] -> [M, C, kH, kW]; one spatial axis is W. Of a small image the batch is in
    the product too (6x10x10: 0.5 of the time), of a large one it is summed over afterwards (3x112x112: 0.8). Where no
    pixels are skipped, shifted images take 0.6-0.9 of the time of gathered rows (16x128x128: 0.6, 64x56x56: 0.85), but
    of few channels beside G's, whose copies are then many (3x224x224 and 64: 1.7).
    """
    if len(win.kernel) == 1:
        x, g = op.unsqueeze(x, [2]), op.unsqueeze(g, [2])
        none, one = (0,), (1,)
        win = win._replace(kernel=one + win.kernel, strides=one + win.strides, dilations=one + win.dilations,
                      begins=none + win.begins, ends=none + win.ends)  # fmt: skip
    (high, wide), channels, outputs = win.kernel, op.size(w, 1), op.size(w, 0)
    small = 0 < windows.cells(g) <= SMALL
    many = isinstance(channels, int) and isinstance(outputs, int) and outputs <= 2 * channels
    if many and not small and max(win.strides) == 1:
        return shifted_images.correlation(op, x, g, win)
    x = windows.pad(op, x, win.begins, win.ends)
    if small:
        rows = _row_reads(op, win, g)
        columns = _column_reads(op, op.transpose(x, [1, 2, 0, 3]), g, win, 1)
        columns = op.reshape(op.Gather(columns, rows, axis=2), [channels * (wide * high), -1])
        dw = columns @ op.swap_last(op.reshape(op.transpose(g, [1, 2, 0, 3]), [outputs, -1]))
    else:
        columns = op.Gather(_column_reads(op, x, g, win, 2), _row_reads(op, win, g), axis=3)
        dw = op.sum(_matrices(op, columns) @ op.swap_last(_matrices(op, g)), [0], keepdims=False)
    return op.transpose(op.reshape(dw, [channels, wide, high, outputs]), [3, 0, 2, 1])


def _row_reads(op, win, g):
    """The rows that each tap reads: [kH, P]."""
    rows = windows.reads(op, win, 0, g, range(win.kernel[0]), (1, 0), 2)
    return rows if isinstance(rows, Val) else op.const(rows)


def _column_reads(op, x, g, win, axis):
    """The pixels of the last axis of `x` that each tap reads, the taps along a new `axis`."""
    width, stride, dilation = op.size(g, 3), win.strides[1], win.dilations[1]
    reads = []
    for start in range(0, win.kernel[1] * dilation, dilation):
        stop = op.vector([(width - 1) * stride + (start + 1)])
        reads.append(op.unsqueeze(op.Slice(x, op.ints([start]), stop, op.ints([3]), op.ints([stride])), [axis]))
    return op.Concat(*reads, axis=axis) if len(reads) > 1 else reads[0]


def _matrices(op, x):
    """`x` as a matrix a sample, whose columns are the pixels of the last two axes."""
    rows = prod(op.size(x, axis) for axis in range(1, x.rank - 2))
    return windows.matrices(op, x, rows, op.size(x, -2) * op.size(x, -1))


def _known(size):
    """A size that is known at build time; else None."""
    return size if isinstance(size, int) and size > 0 else None


def _by_shifts(op, x, g, w, win):
    """Each weight meets the image shifted to it: [C, taps], for one channel a group.

    A small image lies flat, so that a tap reads one piece of memory and not a short one a row (960x7x7: 0.6 of the
    time, 384x14x14: 0.9); at 28x28 that is as fast, beyond it is slower.
    """
    if len(win.kernel) == 2 and 0 < windows.cells(g) <= SMALL and windows.cells(x) > 0:
        x, g, starts = shifted_images.flattened(op, x, g, win)
    else:
        x = windows.pad(op, x, win.begins, win.ends)
        starts = np.array(list(np.ndindex(*win.kernel))) * win.dilations
    axes = list(range(2, g.rank))
    sizes = op.vector([op.size(g, axis) for axis in axes])
    sums = []
    for start in starts:
        stop = op.ints(start + sizes.const) if sizes.const is not None else op.ints(start) + sizes
        met = op.Slice(x, op.ints(start), stop, op.ints(axes), shape=g.known_shape)
        sums.append(op.unsqueeze(op.sum(met * g, [0, *axes], keepdims=False), [1]))
    return op.Concat(*sums, axis=1)


def _by_product(op, x, g, w, win):
    """A product for each sample, and their sum in the shape of `w`: a view of a result is copied into an output.

    Where a weight has many more numbers than the images, one product of all samples takes 0.46-0.75 of the time (49
    pixels and 2048x512 channels 0.46, 960x160 0.72; 196 and 1024x256 0.94, 576x96 1.22).
    """
    if any(s != 1 for s in win.strides):
        n = len(win.kernel)
        x = op.Slice(x, op.ints([0] * n), op.ints([windows.LAST] * n), op.ints(win.axes), op.ints(win.strides))
    if _outweighs(w, g):
        return _joined(op, g) @ op.swap_last(_joined(op, x))
    products = windows.flat(op, g) @ op.swap_last(windows.flat(op, x))
    shape = op.vector([0, *(op.size(w, axis) for axis in range(w.rank))])
    return op.sum(op.Reshape(products, shape, shape=[g.shape[0], *w.shape]), [0], keepdims=False)


def _outweighs(w, g):
    """Whether the weight of single pixels surely has twice the numbers of a sample of its convolution's images."""
    cells, sizes = windows.cells(g), w.shape[:2]
    return cells > 0 and all(isinstance(size, int) for size in sizes) and 2 * cells * sum(sizes) <= prod(sizes)


def _joined(op, x):
    """Images as one matrix, with a row for each channel of the pixels of all samples."""
    return op.reshape(op.transpose(windows.flat(op, x), [1, 0, 2]), [op.size(x, 1), -1])


def _by_channels(op, x, g, w, win):
    """The product of G with the columns that its windows read, which are gathered as rows of channels.

    A product a kernel row takes 0.8-1.0 of the time of one for all taps and a third of the memory; where images are
    small the weights are what is large, and one product takes less (512 channels at 7x7: 0.9). In the end the taps go
    behind the channels; of large weights one thread would move them, where the threads of a product with ones on the
    diagonal take 0.5-0.9 of the time.
    """
    per, channels = _size(op, w, 0, win.group), op.size(w, 1)
    lead = [win.group] if win.group > 1 else []
    rows = _grouped(op, windows.pad(op, x, win.begins, win.ends), win.group, channels, [0, 2, 1])
    g_rows = op.reshape(_grouped(op, g, win.group, per, [1, 0, 2]), [*lead, per, -1])
    count = int(np.prod(win.kernel))
    first, *rest = (range(size) for size in win.kernel)
    whole = len(win.kernel) == 1 or 0 < windows.cells(g) <= SMALL
    parts = [first] if whole else [[i] for i in first]
    width = channels * (count // len(parts))
    products = []
    for taps in parts:
        columns = op.Gather(rows, windows.places(op, win, x, g, [taps, *rest]), axis=1 + len(lead))
        columns = op.reshape(columns, [*lead, -1, width])
        products.append(g_rows @ columns)
    dw = op.Concat(*products, axis=1 + len(lead)) if len(parts) > 1 else products[0]
    dw = op.swap_last(op.reshape(dw, [-1, count, channels]))
    large = all(isinstance(size, int) for size in w.shape) and prod(w.shape) >= LARGE
    return dw @ op.const(np.eye(count), dw) if large and count <= LONG else dw


def _grouped(op, x, group, channels, perm):
    """`x` with its spatial axes made one and its axes (batch, channels of a group, cells) permuted; groups first."""
    if group == 1:
        return op.transpose(windows.flat(op, x), perm)
    cells = windows.cells(x)
    shape = [x.shape[0], group, _known(channels), _known(cells)]
    x = op.Reshape(x, op.vector([0, group, channels, cells]), shape=shape)
    batch, *rest = ([0, 2, 3][axis] for axis in perm)
    return op.transpose(x, [1, batch, *rest])


def _by_convolution(op, image, g, w, win):
    """The textbook form: batch as channels, strides and dilations exchanged, the cotangent as the kernel."""
    image, g = _filled(op, image), _filled(op, g)
    spatial, x = win.axes, image
    if win.group == 1:
        x = op.transpose(x, [1, 0, *spatial])
    else:
        sizes = [op.size(x, axis) for axis in spatial]
        x = op.reshape(x, [op.size(x, 0), win.group, op.size(w, 1), *sizes])
        x = op.transpose(x, [2, 1, 0, *(axis + 1 for axis in spatial)])
        x = op.reshape(x, [op.size(w, 1), -1, *sizes])
    # A stride leaves cells beyond the last window, over which the kernel takes more steps than it has taps.
    steps = tuple(
        "?" if rest is None and stride > 1 else tap if stride == 1 else tap + rest // dilation
        for tap, rest, stride, dilation in zip(
            win.kernel, windows.remainder(win, image, g), win.strides, win.dilations, strict=True
        )
    )
    channels = (w.shape[1], g.shape[1])
    result = op.Conv(
        x,
        op.transpose(g, [1, 0, *spatial]),
        strides=list(win.dilations),
        dilations=list(win.strides),
        pads=[*win.begins, *win.ends],
        group=win.group,
        shape=(*channels, *steps),
    )
    if steps != win.kernel:
        starts, stops = op.ints([0] * len(spatial)), windows.kernel_sizes(op, win, w)
        result = op.Slice(result, starts, stops, op.ints(spatial), shape=(*channels, *win.kernel))
    return op.transpose(result, [1, 0, *spatial])


def _filled(op, x):
    """`x`, or where its batch is empty a sample of zeros: convolutions of no channels may never return."""
    if isinstance(x.shape[0], int) and x.shape[0] > 0:
        return x
    missing = op.cast(op.Equal(op.dim(x, 0), op.ints([0])), TensorProto.INT64)
    return op.Pad(x, op.vector([*[0] * x.rank, missing, *[0] * (x.rank - 1)]), shape=(None, *x.shape[1:]))


def _by_diagonals(op, x, g, w, win):
    return diagonals.correlation(op, x, g, win)


WEIGHT_FORMS = {
    "product": _by_product,
    "pixels": _by_pixels,
    "channels": _by_channels,
    "shifts": _by_shifts,
    "diagonals": _by_diagonals,
    "convolution": _by_convolution,
}
"""How the gradient of a weight may be written."""


@rule("Col2Im")
def col2im(op, g, y, x, image_shape, block_shape, *, dilations, pads, strides):
    """The windows of G, laid out as columns: a convolution whose kernels have a single 1 each.

    Its time is 0.2-3 of PyTorch's; gathering the windows takes 2-5 times as long as PyTorch, or more.
    """
    block = block_shape.const
    if block is not None:
        taps = int(np.prod(block))
        if taps > LARGEST_BLOCK:
            return op.no(f"its blocks of {' x '.join(map(str, block))} elements are too large", "make them smaller")
        kernels = op.const(np.eye(taps).reshape(taps, 1, *block), g)
    else:
        taps = op.ReduceProd(block_shape, keepdims=1)
        numbers = op.steps(taps)
        single = op.cast(op.Equal(op.unsqueeze(numbers, [1]), numbers), g)
        kernels = op.Reshape(single, op.vector([taps, 1, block_shape]), shape=[None, 1, *[None] * (g.rank - 2)])
    planes = op.reshape(g, [-1, 1, *(op.size(g, axis) for axis in range(2, g.rank))])
    windowed = op.Conv(planes, kernels, dilations=dilations, pads=pads, strides=strides)
    return op.reshape_like(windowed, x)
