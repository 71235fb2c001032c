"""Pooling over windows and over all positions.

A maximum hands its cotangent to the element it took; an average is a linear map, one matrix an axis, and its
gradient is that map's transpose.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.autodiff.rules.index import last_of
from onnxgrad_cli.autodiff.rules.scatter_add import added
from onnxgrad_cli.emission.shapes import LONGEST

DENSE = 1 << 18
"""Entries of the band matrix of one axis up to which an average is spread by matrix products."""

MOST_TAPS = 1 << 12
"""Elements of a window up to which they are compared with the maximum one by one: each is some nodes."""

BEYOND = (
    "ceil_mode with windows that start beyond the image: its shape was inferred wrongly before opset 22",
    "export the model at opset 22, or without ceil_mode",
)


PADDED = (
    "auto_pad SAME with dilations, or with strides beyond the kernel, for which onnxruntime pads as nobody else does",
    "write its pads out",
)

SHORT = (
    "its window is longer than the padded image, of which runtimes make one window or none",
    "fix the model's shapes to larger ones, or export it with a window that fits",
)


@rule("MaxPool", kink="the first maximum of the window in row-major order takes all", needs_opset=16)
def max_pool(op, g, ys, x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides):
    """Where windows don't overlap, MaxUnpool (0.9-1.7 of PyTorch's time), which has no kernel for float64; otherwise
    cotangents are added up (3.2).

    A window in which no element lies has the lowest number there is, and hands its cotangent to none.

    For runtimes that have neither indices nor MaxUnpool, x is compared with the maxima instead (1-1.5 times that).
    """
    win = windows.window(kernel_shape, strides, dilations, pads)
    win, late = windows.auto_window(op, win, x, auto_pad)
    if why := _unlike(win, x, g, ceil_mode, auto_pad):
        return op.no(*why)
    if any(_may_miss(win, i, x, g) for i in range(len(win.kernel))):
        lowest = float(np.finfo(onnx.helper.tensor_dtype_to_np_dtype(x.dtype)).min)
        g = op.Where(ys[0] > lowest, g, op.const(0.0, g))
    attributes = {
        "auto_pad": auto_pad,
        "ceil_mode": ceil_mode,
        "dilations": dilations,
        "kernel_shape": kernel_shape,
        "pads": pads,
        "strides": strides,
    }
    if op.variant("gradient", ("indices", "compared"), "indices") == "compared":
        y, wide = op.comparable(ys[0], lambda x: op.MaxPool(x, **attributes), x)
        if np.prod(win.sizes) > MOST_TAPS:
            why = f"its windows of {' x '.join(map(str, win.sizes))} are too large to be compared tap by tap"
            return op.no(why, "choose a target that has the indices of MaxPool")
        return op.cast(_compared(op, op.wide(g), y, wide, win, late, ceil_mode), x)
    indices = ys[1] if len(ys) > 1 and not storage_order else None
    if indices is None:
        _, indices = op.MaxPool(x, outputs=2, **attributes)
    apart = all(s >= k and d == 1 for s, k, d in zip(win.strides, win.sizes, win.dilations, strict=True))
    if apart and not late and x.dtype != TensorProto.DOUBLE and windows.remainder(win, x, g) == [0] * len(win.kernel):
        pads = [*win.begins, *win.ends]
        return op.MaxUnpool(
            g, indices, kernel_shape=kernel_shape, strides=list(win.strides), pads=pads, shape=x.known_shape
        )
    return _scatter(op, g, indices, x)


def _may_miss(win, i, x, g):
    """Whether a window may lie in the pads alone along one axis: its taps are further apart than the image is long."""
    size, outputs = x.shape[2 + i], g.shape[2 + i]
    if win.dilations[i] == 1 or not (win.begins[i] or win.ends[i]):
        return False
    if not isinstance(size, int) or not isinstance(outputs, int) or outputs > LONGEST:
        return True
    return bool(np.any(_taps_inside(win, i, np.arange(outputs), size, False) == 0))


def _compared(op, g, y, x, win, late, ceil_mode):
    """`g` to the first element of each window that equals its maximum, found a tap of the window at a time.

    What a tap takes is gone for those after it; the last takes what is left, for one of them is the maximum.
    """
    begins, ends = late or (win.begins, _reach(win, x, g, ceil_mode))
    lowest = float(np.finfo(onnx.helper.tensor_dtype_to_np_dtype(x.dtype)).min)
    padded = windows.pad(op, x, begins, ends, lowest)
    axes, strides = op.ints(win.axes), op.ints(win.strides)
    sizes = op.vector([op.size(g, axis) for axis in win.axes])
    zero, rest, taken = op.const(0.0, g), g, []
    taps = list(np.ndindex(*win.sizes))
    for tap in taps[:-1]:
        first = np.multiply(tap, win.dilations)
        ends = sizes * strides + op.ints(first)
        here = op.Equal(op.Slice(padded, op.ints(first), ends, axes, strides, shape=g.known_shape), y)
        taken.append(op.Where(here, rest, zero))
        rest = op.Where(here, zero, rest)
    each = np.eye(len(taps)).reshape(-1, 1, *win.sizes)
    return _spread(op, [*taken, rest], each, win, x, late, exact=not ceil_mode)


def _reach(win, x, g, ceil_mode):
    """The pads behind an image with which no window hangs over."""
    return [end + _overhang(win, i, x, g, ceil_mode) for i, end in enumerate(win.ends)]


def _overhang(win, i, x, g, ceil_mode):
    """How far a window may hang over the pads behind an image, along one axis.

    Without ceil_mode none does but the one of an image shorter than it: onnxruntime, and onnx's type inference, count
    windows as (size - extent) / stride + 1, and round towards 0 where the text of ONNX says floor.
    """
    rest = windows.remainder(win, x, g)[i]
    if rest is not None:
        return max(-rest, 0)
    most = win.strides[i] - 1
    return most if ceil_mode else max(min(most, win.extents[i] - win.begins[i] - win.ends[i] - 1), 0)


def _scatter(op, g, indices, x):
    """Zeros in the shape of `x`, to which each entry of `g` is added at its flat index."""
    zeros = op.fill(0.0, op.reshape(x, [-1]))
    return op.reshape_like(added(op, zeros, op.reshape(indices, [-1]), op.reshape(g, [-1])), x)


@rule("MaxUnpool")
def max_unpool(op, g, y, x, indices, output_shape, *, kernel_shape, pads, strides):
    """Each entry went to one place, so its cotangent stands there. Of entries sent to one place the last stays, and
    takes it; indices of a MaxPool whose windows don't overlap are distinct.
    """
    win = windows.window(kernel_shape, strides, None, pads)
    if output_shape is not None and (output_shape.const is None or tuple(output_shape.const) != _unpooled(win, x)):
        hint = "leave output_shape away, or fix the model's shapes so that it is seen to be the default"
        return op.no("indices count in output_shape, or in the default: runtimes disagree", hint)
    maker, flat = op.maker(indices), op.reshape(indices, [-1])
    taken = op.Gather(op.reshape(g, [-1]), flat)
    apart = all(s >= k for s, k in zip(win.strides, win.sizes, strict=True))
    if not (apart and maker is not None and maker.op_type == "MaxPool"):
        taken = op.Where(last_of(op, flat, op.reshape(op.Size(y), [1])), taken, op.const(0.0, g))
    return op.reshape_like(taken, x)


def _unpooled(win, x):
    """The shape that MaxUnpool gives its result by itself; None where it is unknown."""
    sizes = x.shape[2:]
    if not all(isinstance(size, int) for size in sizes):
        return None
    spatial = zip(sizes, win.strides, win.begins, win.ends, win.kernel, strict=True)
    return (*x.shape[:2], *((size - 1) * stride - begin - end + k for size, stride, begin, end, k in spatial))


@rule("AveragePool")
def average_pool(op, g, y, x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    """Spread each cotangent, divided by how many elements its window had, over its window.

    One product with a constant band matrix an axis (0.17-0.5 of PyTorch's time) where sizes are static, else one
    transposed convolution with ones (0.6-1.4).
    """
    win = windows.window(kernel_shape, strides, dilations, pads)
    win, late = windows.auto_window(op, win, x, auto_pad)
    if why := _unlike(win, x, g, ceil_mode, auto_pad):
        return op.no(*why)
    bands = [_band(win, i, x.shape[2 + i], g.shape[2 + i], count_include_pad) for i in range(len(win.kernel))]
    if all(band is not None for band in bands):
        for axis, band in enumerate(bands, 2):
            g = windows.along(op, g, axis, band.T)
        return op.state(g, x.known_shape)
    for i in range(len(win.kernel)):
        g = g / _counts(op, win, i, x, g, late, ceil_mode, count_include_pad)
    return _spread(op, [g], np.ones((1, 1, *win.sizes)), win, x, late, exact=not ceil_mode)


def _spread(op, gs, shares, win, x, late, exact=True):
    """Each of `gs` added up over the windows that hold each element of `x`, by the share of the tap, a plane at a time.

    `shares` is [cotangents, 1, taps of each axis...].
    """
    image = windows.pad(op, x, *late) if late else x
    *planes, flat = (op.reshape(v, [-1, 1, *(op.size(v, axis) for axis in win.axes)]) for v in (*gs, image))
    planes = planes[0] if len(planes) == 1 else op.Concat(*planes, axis=1)
    result = op.reshape_like(windows.spread(op, planes, op.const(shares, x), flat, win, exact), image)
    return windows.crop_like(op, result, late[0], x) if late else result


def _unlike(win, x, g, ceil_mode, auto_pad):
    """Why (reason, hint) the windows that run are not those that were inferred; None where they are."""
    if ceil_mode and not _outputs_known(win, x, g):
        return BEYOND
    short = any(rest is not None and rest < 0 for rest in windows.remainder(win, x, g))
    if 0 in g.shape[2:] or (short and not ceil_mode and not auto_pad.startswith("SAME")):
        return SHORT
    wide = zip(win.sizes, win.extents, win.strides, strict=True)
    if auto_pad.startswith("SAME") and any(k != extent or s > k + 1 for k, extent, s in wide):
        return PADDED
    return None


def _outputs_known(win, x, g):
    """Whether no window that was inferred starts beyond the image and its leading pads."""
    return all(
        not isinstance(out, int) or not isinstance(size, int) or (out - 1) * stride < size + begin
        for out, size, stride, begin in zip(g.shape[2:], x.shape[2:], win.strides, win.begins, strict=True)
    )


def _band(win, i, size, outputs, count_include_pad):
    """The map of an average along one axis, [outputs, size]; None where sizes are unknown or it is too large."""
    if not isinstance(size, int) or not isinstance(outputs, int) or size * outputs > DENSE:
        return None
    reads = np.arange(size) - (np.arange(outputs)[:, None] * win.strides[i] - win.begins[i])
    inside = (reads >= 0) & (reads < win.extents[i]) & (reads % win.dilations[i] == 0)
    return inside / _taps_inside(win, i, np.arange(outputs)[:, None], size, count_include_pad)


def _taps_inside(win, i, outputs, size, count_include_pad):
    """How many elements the windows number `outputs` average along one axis; numpy arrays or int64 values."""
    low, high = (-win.begins[i], size + win.ends[i]) if count_include_pad else (0, size)
    return windows.taps_below(win, i, outputs, high) - windows.taps_below(win, i, outputs, low)


def _counts(op, win, i, x, g, late, ceil_mode, count_include_pad):
    """The same for all windows, as a factor of g's type that broadcasts to it: a number where all are equal."""
    whole = count_include_pad or not (late or win.begins[i] or win.ends[i])
    over = 0 if late else _overhang(win, i, x, g, ceil_mode)
    if whole and not over:
        return float(win.kernel[i])
    axis = 2 + i
    if whole and not ceil_mode:
        if count_include_pad and op.opset < 19:  # by the whole kernel, in an image shorter than it too
            return float(win.kernel[i])
        return op.cast(_first_holds(op, win, i, x), g)
    outputs = op.steps(op.dim(g, axis))
    if late:
        begin = op.Gather(late[0], op.ints([i]))
        counts = windows.taps_below(win, i, outputs, begin + op.dim(x, axis))
        counts = counts - windows.taps_below(win, i, outputs, begin)
    else:
        counts = _taps_inside(win, i, outputs, op.dim(x, axis), count_include_pad)
    return op.cast(op.reshape(counts, [-1, *[1] * (g.rank - axis - 1)]), g)


def _first_holds(op, win, i, x):
    """How many elements, with pads, the first window averages along one axis: fewer than others in a short image."""
    more = win.begins[i] + win.ends[i] + win.dilations[i] - 1
    reach = op.dim(x, 2 + i) + more if more else op.dim(x, 2 + i)
    taps = reach / win.dilations[i] if win.dilations[i] > 1 else reach
    return op.Min(taps, op.ints([win.kernel[i]]))


@rule("GlobalAveragePool")
def global_average_pool(op, g, y, x):
    return op.expand_like(op.per(g, x, range(2, x.rank)), x)


@rule("GlobalMaxPool", kink="the first maximum in row-major order takes all")
def global_max_pool(op, g, y, x):
    flat = windows.flat(op, x)
    places = op.steps(op.dim(flat, 2))
    taken = op.Equal(places, op.ArgMax(flat, axis=2, keepdims=1))
    return op.reshape_like(op.Where(taken, op.Reshape(g, op.ints([0, 0, 1])), op.const(0.0, g)), x)


@rule("LpPool", kink="0 where all elements of the window are 0")
def lp_pool(op, g, y, x, *, auto_pad, ceil_mode, dilations, kernel_shape, p, pads, strides):
    """d (Σ|x|ᵖ)^(1/p) / dx = sign(x) |x|^(p-1) y^(1-p), summed over the windows that hold x."""
    win = windows.window(kernel_shape, strides, dilations, pads)
    win, late = windows.auto_window(op, win, x, auto_pad)
    if why := _unlike(win, x, g, ceil_mode, auto_pad):
        return op.no(*why)
    g = op.Where(y > 0.0, g / (op.Where(y > 0.0, y, op.const(1.0, y)) ** float(p - 1)), op.const(0.0, y))
    ones = np.ones((1, 1, *win.sizes))
    return _spread(op, [g], ones, win, x, late, exact=not ceil_mode) * _signed_power(op, x, p)


@rule("GlobalLpPool", kink="0 where all elements are 0")
def global_lp_pool(op, g, y, x, *, p):
    """As LpPool, with one window over all spatial axes; powers are taken of |x| / y, so that none is too small."""
    return g * _signed_power(op, x / op.Where(y > 0.0, y, op.const(1.0, y)), p)


def _signed_power(op, x, p):
    """sign(x) |x|^(p-1)."""
    return op.Sign(x) * op.Abs(x) ** float(p - 1) if p > 1 else op.Sign(x)
