"""The gradient of a convolution's weight, in several forms that compute the same. The shapes determine the default.

A tap is one position of the kernel. Some forms read shifted images. They put zeros after each row of an image and
flatten it. A tap then reads a contiguous part of the flat image, which begins at an offset. Beyond the end of a row it
reads a zero. The shifted copies of an image are stored one after the other, with zeros in between. This takes a few
long memory copies. Without flattening, each row of pixels would be cut out and padded on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.types import MAX_INT64

MAX_SMALL_IMAGE, MIN_LARGE_WEIGHT = 196, 100_000
"""Largest number of pixels of a small image, and smallest number of elements of a large weight.

For small images, the weights have more elements than the images. Transposing a large weight takes noticeable time.
"""

NARROW = 64
"""Largest width of an image, in pixels, for which the form "diagonals" (products of whole rows) is the default."""

MIN_WIDE_KERNEL = 32
"""Smallest width of a kernel that excludes the form "pixels", which needs one node for each column of the kernel."""

MAX_IDENTITY_TAPS = 512
"""Largest number of taps for which the axis of the taps is moved or reversed by a product with a square matrix."""


def weight_gradient(op, x, g, w, win):
    """Return the cotangent of a convolution's weight: the correlation of the input `x` with the output's cotangent `g`.

    Times of the forms, as ratios to PyTorch's time:

    - "product": 0.2-0.9, for 1x1 kernels. It is one batched product.
    - "pixels": 1.0-2.4 (a stem 1.4, 64x56x56 1.3, 16x128x128 2.2), for few channels, or for rows that have about as
      many pixels as there are channels.
    - "channels": 0.8-1.2 (128x28x28 1.2, 256x14x14 1.1, 512x7x7 0.8), for more channels. In the range of "pixels", it
      is slower than "pixels", and vice versa.
    - "convolution": 2-7. It is the textbook form, for all other cases.

    The other ratios compare two forms with each other:

    - Depthwise at stride 1, "shifts" takes 0.7-0.9 of the time of "convolution".
    - Depthwise at stride 1, "diagonals" takes 0.5-0.9 of the time of "shifts" up to 56 pixels a row (14: 0.56, 28:
      0.62, 56: 0.89; 112: 1.14).
    - Depthwise, "diagonals" takes 0.67-0.9 of the time of "convolution" at stride 2 (112: 1.08), and 0.5-0.64 for 7x7
      taps, for which there are no "shifts".
    - For wide kernels on few channels, such as audio filters, "convolution" takes 0.16-0.85 of the time of "pixels".
    """
    form = op.variant("weight gradient", *weight_forms(x, g, w, win))
    return op.reshape_like(WEIGHT_FORMS[form](op, x, g, w, win), w)


def weight_forms(x, g, w, win):
    """Return the names of the forms that can compute the gradient of a weight, and the default form for its shapes."""
    channels = w.shape[1] if isinstance(w.shape[1], int) else 16
    width = g.shape[-1] if isinstance(g.shape[-1], int) else 0
    if not win.known:
        return ["convolution"], "convolution"
    forms, default = ["convolution", "channels"], "channels" if channels >= 16 else "convolution"
    if win.group == 1 and len(win.kernel) <= 2 and win.kernel[-1] < MIN_WIDE_KERNEL:
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
    """Multiply `g` by the matrix of the elements that each tap reads from `x`, gathered as rows of pixels.

    Shapes: x [N, C, H, W], g [N, M, P, Q] -> [M, C, kH, kW]. A single spatial axis counts as W. For small images, one
    product sums over the pixels of all samples. It takes 0.5 times as long as one product per sample for 6x10x10. For
    large images, there is one product per sample, and the products are summed. This takes 0.8 times as long as one
    product for 3x112x112. At stride 1, shifted images take 0.6-0.9 times as long as gathered rows (16x128x128: 0.6,
    64x56x56: 0.85). They are slower if `x` has far fewer channels than `g`, because they copy `g` many times (3x224x224
    and 64 channels in `g`: 1.7).
    """
    if len(win.kernel) == 1:
        x, g = op.unsqueeze(x, [2]), op.unsqueeze(g, [2])
        none, one = (0,), (1,)
        win = win._replace(kernel=one + win.kernel, strides=one + win.strides, dilations=one + win.dilations,
                      begins=none + win.begins, ends=none + win.ends)  # fmt: skip
    (high, wide), channels, outputs = win.kernel, op.size(w, 1), op.size(w, 0)
    small = 0 < windows.cells(g) <= MAX_SMALL_IMAGE
    many = isinstance(channels, int) and isinstance(outputs, int) and outputs <= 2 * channels
    if many and not small and max(win.strides) == 1:
        return _shifted_correlation(op, x, g, win)
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
    """Return the indices of the rows of the image that each tap reads, [kH, P]."""
    rows = windows.reads(op, win, 0, g, range(win.kernel[0]), (1, 0), 2)
    return rows if isinstance(rows, Val) else op.const(rows)


def _column_reads(op, x, g, win, axis):
    """Return the elements that each tap reads along the last axis of `x`, stacked along a new axis `axis`."""
    width, stride, dilation = op.size(g, 3), win.strides[1], win.dilations[1]
    reads = []
    for start in range(0, win.kernel[1] * dilation, dilation):
        stop = op.vector([(width - 1) * stride + (start + 1)])
        reads.append(op.unsqueeze(op.Slice(x, op.ints([start]), stop, op.ints([3]), op.ints([stride])), [axis]))
    return op.Concat(*reads, axis=axis) if len(reads) > 1 else reads[0]


def _matrices(op, x):
    """Return `x` as one matrix per sample. Its columns are the pixels of the last two axes."""
    rows = prod(op.sizes(x, range(1, x.rank - 2)))
    return windows.matrices(op, x, rows, op.size(x, -2) * op.size(x, -1))


def _by_shifts(op, x, g, w, win):
    """Return the sum of `g` times the image shifted by each tap, [C, taps], for a depthwise convolution.

    A small image is flattened, so that a tap reads one piece of memory instead of a short piece for each row. This
    takes 0.6 times as long for 960x7x7 and 0.9 times as long for 384x14x14. At 28x28 it takes equally long, and for
    larger images longer.
    """
    if len(win.kernel) == 2 and 0 < windows.cells(g) <= MAX_SMALL_IMAGE and windows.cells(x) > 0:
        x, g, starts = _flattened(op, x, g, win)
    else:
        x = windows.pad(op, x, win.begins, win.ends)
        starts = np.array(list(np.ndindex(*win.kernel))) * win.dilations
    axes = list(range(2, g.rank))
    sizes = op.vector(op.sizes(g, axes))
    sums = []
    for start in starts:
        stop = op.ints(start + sizes.const) if sizes.const is not None else op.ints(start) + sizes
        met = op.Slice(x, op.ints(start), stop, op.ints(axes), shape=g.known_shape)
        sums.append(op.unsqueeze(op.sum(met * g, [0, *axes], keepdims=False), [1]))
    return op.Concat(*sums, axis=1)


def _by_product(op, x, g, w, win):
    """Return the sum of one matrix product per sample, for 1x1 kernels.

    The products are reshaped to the shape of `w` before the sum. A Reshape after the sum would copy the result if the
    result is an output of the model. If the weight has many more elements than the images (see `outweighs`), one
    product for all samples is used. It takes 0.46-0.75 times as long as one product per sample (49 pixels and 2048x512
    channels 0.46, 960x160 channels 0.72). For smaller weights it would take longer (196 pixels and 1024x256 channels
    0.94, 576x96 channels 1.22).
    """
    if any(s != 1 for s in win.strides):
        n = len(win.kernel)
        x = op.Slice(x, op.ints([0] * n), op.ints([MAX_INT64] * n), op.ints(win.axes), op.ints(win.strides))
    if outweighs(w, g):
        return joined(op, g) @ op.swap_last(joined(op, x))
    products = windows.flat(op, g) @ op.swap_last(windows.flat(op, x))
    shape = op.vector([0, *op.sizes(w, range(w.rank))])
    return op.sum(op.Reshape(products, shape, shape=[g.shape[0], *w.shape]), [0], keepdims=False)


def outweighs(w, g):
    """Return True if the weight of a 1x1 convolution is at least twice as large as one sample of input plus output.

    If a size is unknown, return False.
    """
    cells, sizes = windows.cells(g), w.shape[:2]
    return cells > 0 and all(isinstance(size, int) for size in sizes) and 2 * cells * sum(sizes) <= prod(sizes)


def joined(op, x):
    """Return images as one matrix, with one row per channel and one column for each pixel of all samples."""
    return op.reshape(op.transpose(windows.flat(op, x), [1, 0, 2]), [op.size(x, 1), -1])


def _by_channels(op, x, g, w, win):
    """Multiply `g` by the matrix of the elements that each tap reads from `x`, gathered as rows of channels.

    One product for each kernel row takes 0.8-1.0 times as long as one product for all taps, and a third of the memory.
    For small images the weights are larger than the images, and one product for all taps is faster (0.9 times as long
    for 512 channels at 7x7). At the end, the axis of the taps is moved after the channels. For large weights, this is
    done by a product with an identity matrix. It runs in all threads, while a Transpose runs in one thread, and takes
    0.5-0.9 times as long.
    """
    per, channels = windows.divided(op, w, 0, win.group), op.size(w, 1)
    lead = [win.group] if win.group > 1 else []
    rows = _grouped(op, windows.pad(op, x, win.begins, win.ends), win.group, channels, [0, 2, 1])
    g_rows = op.reshape(_grouped(op, g, win.group, per, [1, 0, 2]), [*lead, per, -1])
    count = int(np.prod(win.kernel))
    first, *rest = (range(size) for size in win.kernel)
    whole = len(win.kernel) == 1 or 0 < windows.cells(g) <= MAX_SMALL_IMAGE
    parts = [first] if whole else [[i] for i in first]
    width = channels * (count // len(parts))
    products = []
    for taps in parts:
        columns = op.Gather(rows, windows.places(op, win, x, g, [taps, *rest]), axis=1 + len(lead))
        columns = op.reshape(columns, [*lead, -1, width])
        products.append(g_rows @ columns)
    dw = op.Concat(*products, axis=1 + len(lead)) if len(parts) > 1 else products[0]
    dw = op.swap_last(op.reshape(dw, [-1, count, channels]))
    large = all(isinstance(size, int) for size in w.shape) and prod(w.shape) >= MIN_LARGE_WEIGHT
    return dw @ op.const(np.eye(count), dw) if large and count <= MAX_IDENTITY_TAPS else dw


def _grouped(op, x, group, channels, perm):
    """Flatten the spatial axes of `x` and permute [batch, channels of a group, pixels] by `perm`.

    If there are several groups, the result has an axis of groups in front.
    """
    if group == 1:
        return op.transpose(windows.flat(op, x), perm)
    sizes = [channels, windows.cells(x)]
    shape = [x.shape[0], group, *(size if isinstance(size, int) and size > 0 else None for size in sizes)]
    x = op.Reshape(x, op.vector([0, group, *sizes]), shape=shape)
    batch, *rest = ([0, 2, 3][axis] for axis in perm)
    return op.transpose(x, [1, batch, *rest])


def _by_convolution(op, image, g, w, win):
    """Return the convolution of the input with the kernel `g`. It has the batch as channels, strides as dilations.

    The strides of this convolution are the dilations of the forward convolution.
    """
    image, g = _filled(op, image), _filled(op, g)
    spatial, x = win.axes, image
    if win.group == 1:
        x = op.transpose(x, [1, 0, *spatial])
    else:
        sizes = op.sizes(x, spatial)
        x = op.reshape(x, [op.size(x, 0), win.group, op.size(w, 1), *sizes])
        x = op.transpose(x, [2, 1, 0, *(axis + 1 for axis in spatial)])
        x = op.reshape(x, [op.size(w, 1), -1, *sizes])
    # A stride can leave elements beyond the last window. This convolution reads them and returns more values than taps.
    each = zip(win.kernel, windows.remainder(win, image, g), win.strides, win.dilations, strict=True)
    steps = tuple(
        "?" if rest is None and stride > 1 else tap if stride == 1 else tap + rest // dilation
        for tap, rest, stride, dilation in each
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
    """Return `x`, or one sample of zeros if the batch is empty.

    The batch becomes the channels of a convolution, and a convolution without channels may hang.
    """
    if isinstance(x.shape[0], int) and x.shape[0] > 0:
        return x
    missing = op.cast(op.Equal(op.dim(x, 0), op.ints([0])), TensorProto.INT64)
    return op.Pad(x, op.vector([*[0] * x.rank, missing, *[0] * (x.rank - 1)]), shape=(None, *x.shape[1:]))


def _by_diagonals(op, x, g, w, win):
    """Correlate each channel of `x` with the same channel of `g` by products of rows, for depthwise convolutions.

    The result is [C, kH * kW].

    A tap multiplies each pixel of a row of `g` by the pixel of the image that the tap reads. The outer product of the
    two rows has the products of all pairs of pixels, and the pairs of one tap lie on one of its diagonals. A matrix
    product adds up the outer products over rows and samples. Most of its results are not used, but it is fast: the
    shifted images are read and written once for each row of taps, instead of three times for each tap.

    All sizes except the batch size must be known.
    """
    (high, wide), (down, across), (below, beside) = win.sizes, win.strides, win.dilations
    channels, rows, columns = win.group, int(g.shape[2]), int(g.shape[3])
    image = op.transpose(windows.pad(op, x, win.begins, win.ends), [1, 0, 2, 3])
    width = int(image.shape[3])
    g_rows = op.reshape(op.transpose(g, [1, 0, 2, 3]), [channels, -1, columns])
    products = []
    for first in range(0, high * below, below):
        last = first + (rows - 1) * down + 1
        read = op.Slice(image, op.ints([first]), op.ints([last]), op.ints([2]), op.ints([down]))
        met = op.swap_last(op.reshape(read, [channels, -1, width])) @ g_rows
        products.append(op.reshape(met, [channels, 1, width * columns]))
    flat = op.Concat(*products, axis=1) if high > 1 else products[0]
    step = across * columns + 1  # from one element of a diagonal to the next
    taps = []
    for first in range(0, wide * beside * columns, beside * columns):
        last = first + (columns - 1) * step + 1
        diagonal = op.Slice(flat, op.ints([first]), op.ints([last]), op.ints([2]), op.ints([step]))
        taps.append(op.sum(diagonal, [2]))
    dw = op.reshape(op.Concat(*taps, axis=2) if wide > 1 else taps[0], [channels, high * wide])
    if isinstance(g.shape[0], int) and g.shape[0] > 0:
        return dw
    # The product over an empty batch is uninitialized memory.
    return op.Where(op.Equal(op.dim(g, 0), op.ints([0])), op.const(0.0, dw), dw)


def _shifted_correlation(op: Op, x: Val, g: Val, win: windows.Window) -> Val:
    """Correlate an image with the cotangent of its convolution (strides of 1), and sum over the batch.

    The tap (r, s) multiplies the pixel (i, j) of g by the pixel (i + r - top, j + s - left) of x, which is `r - top`
    rows and `s - left` pixels further on. g is shifted by the rows and x by the pixels. So there is one copy of g for
    each tap in a column of the kernel, and one copy of x for each tap in a row. Each row of g is followed by zeros too,
    so the elements of x at these positions add nothing.

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
    columns = _laid(op, windows.pad(op, x, [0, 0], [0, zeros]), ahead, length)
    g_rows = _laid(op, windows.pad(op, g, [0, 0], [0, behind]), [r * down * row + lead for r in range(high)], length)
    dw = op.sum(g_rows @ op.swap_last(columns), [0], keepdims=False)
    return op.transpose(op.reshape(dw, [outputs, high, channels, wide]), [0, 2, 1, 3])


def _flattened(op: Op, x: Val, g: Val, win: windows.Window) -> tuple[Val, Val, np.ndarray]:
    """Pad the rows of an image and of the cotangent of its convolution (stride 1) to equal length, and flatten both.

    Args:
        x: the image, [N, C, H, W], its last two sizes known.
        g: the cotangent, [N, M, P, Q].

    Returns:
        `x`, [N, C, cells], and `g`, [N, M, cells], with zeros between the rows. The third result is the offset in `x`
        at which each tap starts to read, [kH * kW, 1].
    """
    (top, left), (bottom, _) = win.begins, win.ends
    zeros, behind = _gaps(win)
    row = int(x.shape[3]) + zeros
    steps = [row * win.dilations[0], win.dilations[1]]
    rows = -(-(win.extents[1] - 1) // row)  # rows of zeros that the last taps read below the image
    x = windows.pad(op, x, [top, left], [bottom + rows, zeros - left])
    g = windows.pad(op, g, [0, 0], [0, behind])
    return windows.flat(op, x), windows.flat(op, g), np.array([[np.dot(tap, steps)] for tap in np.ndindex(*win.sizes)])


def _gaps(win: windows.Window) -> tuple[int, int]:
    """Return the number of zeros to put after each row of the image, and the number to put after each row of G.

    The rows of both are then equally long, and a tap that reads beyond either end of a row of the image reads a zero.
    """
    left, right = win.begins[1], win.ends[1]
    wider = left + right - (win.extents[1] - 1)  # the width of G minus the width of the image
    zeros = max(left, right, wider)
    return zeros, zeros - wider


def _laid(op: Op, x: Val, ahead: Sequence[int | Val], length: int | Val) -> Val:
    """Flatten each plane of `x`. Return several copies of it, each shifted by a number of zeros in front.

    Args:
        x: [N, C, H, W].
        ahead: for each copy, the number of zeros in front of the plane.
        length: the length of a copy; zeros fill it after the plane.

    Returns:
        [N, C * copies, length].
    """
    batch, channels, size = op.size(x, 0), op.size(x, 1), op.size(x, 2) * op.size(x, 3)
    behind = length - size
    gaps = [ahead[0], *(behind - before + after for before, after in pairwise(ahead)), behind - ahead[-1]]
    plane = windows.matrices(op, x, channels, size)
    parts = [op.zeros([batch, channels, gaps[0]], x)]
    for gap in gaps[1:]:
        parts += [plane, op.zeros([batch, channels, gap], x)]
    return windows.matrices(op, op.Concat(*parts, axis=2), channels * len(ahead), length)


WEIGHT_FORMS = {
    "product": _by_product,
    "pixels": _by_pixels,
    "channels": _by_channels,
    "shifts": _by_shifts,
    "diagonals": _by_diagonals,
    "convolution": _by_convolution,
}
"""Map from the name of each form of the weight gradient to the function that writes it."""
