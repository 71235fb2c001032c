"""The gradient of a depthwise convolution's weight from products of whole rows.

A tap meets the pixels of an image's row with those of the cotangent's row, each with the one that it reads. The product
of the two rows, as a column and a row, has what each pixel meets with any other, and what belongs to one tap lies on a
diagonal. Products of matrices add that up over rows and samples, fast enough to throw the rest away: the shifted images
are read and written once for each row of taps, not three times for each tap.
"""

from __future__ import annotations

from onnxgrad_cli.autodiff.rules.windows import Window, pad
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val


def correlation(op: Op, x: Val, g: Val, win: Window) -> Val:
    """The correlation of each channel of an image with that of the cotangent of its convolution, summed over the batch.

    Args:
        x: the image, [N, C, H, W], and `g` the cotangent, [N, C, P, Q]; all sizes but the batch's are known.

    Returns:
        [C, kH * kW].
    """
    (high, wide), (down, across), (below, beside) = win.sizes, win.strides, win.dilations
    channels, rows, columns = win.group, int(g.shape[2]), int(g.shape[3])
    image = op.transpose(pad(op, x, win.begins, win.ends), [1, 0, 2, 3])
    width = int(image.shape[3])
    g_rows = op.reshape(op.transpose(g, [1, 0, 2, 3]), [channels, -1, columns])
    products = []
    for first in range(0, high * below, below):
        last = first + (rows - 1) * down + 1
        read = op.Slice(image, op.ints([first]), op.ints([last]), op.ints([2]), op.ints([down]))
        met = op.swap_last(op.reshape(read, [channels, -1, width])) @ g_rows
        products.append(op.reshape(met, [channels, 1, width * columns]))
    flat = op.Concat(*products, axis=1) if high > 1 else products[0]
    step = across * columns + 1  # from one place of a diagonal to the next one
    taps = []
    for first in range(0, wide * beside * columns, beside * columns):
        last = first + (columns - 1) * step + 1
        diagonal = op.Slice(flat, op.ints([first]), op.ints([last]), op.ints([2]), op.ints([step]))
        taps.append(op.sum(diagonal, [2]))
    dw = op.reshape(op.Concat(*taps, axis=2) if wide > 1 else taps[0], [channels, high * wide])
    if isinstance(g.shape[0], int) and g.shape[0] > 0:
        return dw
    return op.Where(op.Equal(op.dim(g, 0), op.ints([0])), op.const(0.0, dw), dw)  # else what lay in memory
