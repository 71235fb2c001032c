"""Rules of pooling over windows and over all positions.

In max pooling, the maximum of a window gets the cotangent of the window. Average pooling is a linear map, given by one
matrix per axis, and its gradient is the transposed map. A tap is one position of a window.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.autodiff.rules.index import last_of
from onnxgrad_cli.autodiff.rules.scatter_add import added
from onnxgrad_cli.emission.shapes import MAX_COUNTING_LENGTH
from onnxgrad_cli.emission.values import require
from onnxgrad_cli.errors import Unknown

DENSE = 1 << 18
"""Largest number of elements of the matrix that averages along one axis. For larger ones, other nodes are written."""

MOST_TAPS = 1 << 12
"""Largest window, in elements, of a MaxPool for a runtime without indices. Each element needs several nodes."""

BEYOND = (
    "it has ceil_mode and windows that start outside the image, and its shape was inferred wrongly before opset 22",
    "export the model at opset 22, or without ceil_mode",
)


PADDED = (
    "it has auto_pad SAME with dilations or with strides larger than the kernel, which onnxruntime pads "
    "unlike other runtimes",
    "replace auto_pad by explicit pads",
)

SHORT = (
    "its window is longer than the padded image; runtimes disagree whether the output has one window or none",
    "set larger input shapes, or export the model with a window that fits",
)


@rule("MaxPool", kink="the first maximum of the window in row-major order gets the whole gradient", needs_opset=16)
def max_pool(op, g, ys, x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides):
    """Give the cotangent of each window to its maximum.

    If windows don't overlap, MaxUnpool is used, which takes 0.9 to 1.7 times as long as PyTorch. It has no float64
    kernel. Otherwise, ScatterElements adds the cotangents at the indices of the maxima (3.2 times as long as PyTorch).
    For runtimes without indices and MaxUnpool, x is compared with the maxima instead (1 to 1.5 times as long as with
    indices).

    The result of a window that contains only padding is the lowest number of the type, and its cotangent is dropped.
    """
    win, late = _windows(op, x, g, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if any(_may_miss(win, i, x, g) for i in range(len(win.kernel))):
        g = op.Where(ys[0] > _lowest(x), g, op.const(0.0, g))
    attributes = {
        "auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "kernel_shape": kernel_shape,
        "pads": pads, "strides": strides,
    }  # fmt: skip
    if op.variant("gradient", ("indices", "compared"), "indices") == "compared":
        y, wide = op.comparable(ys[0], lambda x: op.MaxPool(x, **attributes), x)
        if np.prod(win.sizes) > MOST_TAPS:
            why = f"its windows of {' x '.join(map(str, win.sizes))} are too large to be compared element by element"
            raise Unknown(why, "choose a target with the indices of MaxPool")
        return op.cast(_compared(op, op.wide(g), y, wide, win, late, ceil_mode), x)
    indices = ys[1] if len(ys) > 1 and not storage_order else None
    if indices is None:
        _, indices = op.MaxPool(x, outputs=2, **attributes)
    apart = all(s >= k and d == 1 for s, k, d in zip(win.strides, win.sizes, win.dilations, strict=True))
    if apart and not late and x.dtype != TensorProto.DOUBLE and windows.remainder(win, x, g) == [0] * len(win.kernel):
        pads = [*win.begins, *win.ends]
        layout = {"kernel_shape": kernel_shape, "strides": list(win.strides), "pads": pads}
        return op.MaxUnpool(g, indices, **layout, shape=x.known_shape)
    zeros = op.fill(0.0, op.reshape(x, [-1]))
    return op.reshape_like(added(op, zeros, op.reshape(indices, [-1]), op.reshape(g, [-1])), x)


def _may_miss(win, i, x, g):
    """Return True if, along one axis, there may be a window that reads only padding.

    This happens if the dilation is larger than the image.
    """
    size, outputs = x.shape[2 + i], g.shape[2 + i]
    if win.dilations[i] == 1 or not (win.begins[i] or win.ends[i]):
        return False
    if not isinstance(size, int) or not isinstance(outputs, int) or outputs > MAX_COUNTING_LENGTH:
        return True
    return bool(np.any(_taps_inside(win, i, np.arange(outputs), size, False) == 0))


def _compared(op, g, y, x, win, late, ceil_mode):
    """Pass `g` to the first element of each window that equals the window's maximum, by comparing tap after tap.

    The first tap that equals the maximum takes the cotangent of the window. The last tap takes all remaining
    cotangents, because some tap must be the maximum.
    """
    begins, ends = late or (win.begins, [end + _overhang(win, i, x, g, ceil_mode) for i, end in enumerate(win.ends)])
    padded = windows.pad(op, x, begins, ends, _lowest(x))
    axes, strides = op.ints(win.axes), op.ints(win.strides)
    sizes = op.vector(op.sizes(g, win.axes))
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


def _lowest(x):
    """Return the lowest finite number in the type of `x`."""
    return float(np.finfo(onnx.helper.tensor_dtype_to_np_dtype(x.dtype)).min)


def _overhang(win, i, x, g, ceil_mode):
    """Return the largest number of elements by which the last window may exceed the padded image, along one axis.

    Without ceil_mode, a window exceeds the image only if the padded image is shorter than the window. In this case
    there is one window: onnxruntime and onnx's shape inference compute the number of windows as (size - extent) /
    stride + 1 and round the quotient towards 0, while the text of the standard says floor.
    """
    rest = windows.remainder(win, x, g)[i]
    if rest is not None:
        return max(-rest, 0)
    most = win.strides[i] - 1
    return most if ceil_mode else max(min(most, win.extents[i] - win.begins[i] - win.ends[i] - 1), 0)


@rule("MaxUnpool")
def max_unpool(op, g, y, x, indices, output_shape, *, kernel_shape, pads, strides):
    """Each element of x gets the cotangent at the position to which MaxUnpool writes it.

    If several elements are written to one position, the last one overwrites the others and gets the cotangent. This
    can't happen if the indices come from a MaxPool whose windows don't overlap.
    """
    win = windows.window(kernel_shape, strides, None, pads)
    if output_shape is not None and (output_shape.const is None or tuple(output_shape.const) != _unpooled(win, x)):
        hint = "remove output_shape, or make the input shapes static, so that output_shape is known to be the default"
        return op.no("runtimes disagree whether its indices refer to output_shape or to the default shape", hint)
    maker, flat = op.maker(indices), op.reshape(indices, [-1])
    taken = op.Gather(op.reshape(g, [-1]), flat)
    apart = all(s >= k for s, k in zip(win.strides, win.sizes, strict=True))
    if not (apart and maker is not None and maker.op_type == "MaxPool"):
        taken = op.Where(last_of(op, flat, op.reshape(op.Size(y), [1])), taken, op.const(0.0, g))
    return op.reshape_like(taken, x)


def _unpooled(win, x):
    """Return the default shape of the result of MaxUnpool, or None if it is unknown."""
    sizes = x.shape[2:]
    if not all(isinstance(size, int) for size in sizes):
        return None
    spatial = zip(sizes, win.strides, win.begins, win.ends, win.kernel, strict=True)
    return (*x.shape[:2], *((size - 1) * stride - begin - end + k for size, stride, begin, end, k in spatial))


@rule("AveragePool")
def average_pool(op, g, y, x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    """Each element of a window gets the cotangent of the window divided by the number of its elements.

    If sizes are static, the gradient is one product with a constant band matrix per axis (0.17 to 0.5 times as long as
    PyTorch). Otherwise, it is one transposed convolution with a kernel of ones (0.6 to 1.4 times as long as PyTorch).
    """
    win, late = _windows(op, x, g, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    bands = [_band(win, i, x.shape[2 + i], g.shape[2 + i], count_include_pad) for i in range(len(win.kernel))]
    if all(band is not None for band in bands):
        for axis, band in enumerate(bands, 2):
            g = windows.along(op, g, axis, band.T)
        return op.state(g, x.known_shape)
    for i in range(len(win.kernel)):
        g = g / _counts(op, win, i, x, g, late, ceil_mode, count_include_pad)
    return _spread(op, [g], np.ones((1, 1, *win.sizes)), win, x, late, exact=not ceil_mode)


def _spread(op, gs, shares, win, x, late, exact=True):
    """Return for each element of `x` the weighted sum of the cotangents of all windows that contain it.

    Args:
        op: the emitter.
        gs: one or more tensors with a cotangent for each window. Their contributions are added up.
        shares: for each tensor in `gs`, the weight of each tap of a window, [len(gs), 1, taps of each axis...].
        win: the windows.
        x: the operand of the pooling.
        late: the pads if they are known only at run time, or None.
        exact: True if no window reaches beyond the padded image (no ceil_mode).
    """
    image = windows.pad(op, x, *late) if late else x
    *planes, flat = (op.reshape(v, [-1, 1, *op.sizes(v, win.axes)]) for v in (*gs, image))
    planes = planes[0] if len(planes) == 1 else op.Concat(*planes, axis=1)
    result = op.reshape_like(windows.spread(op, planes, op.const(shares, x), flat, win, exact), image)
    return windows.crop_like(op, result, late[0], x) if late else result


def _windows(op, x, g, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode):
    """Return the windows of a pool as `windows.auto_window` does, if shape inference and runtimes agree on them."""
    win = windows.window(kernel_shape, strides, dilations, pads)
    win, late = windows.auto_window(op, win, x, auto_pad)
    require(not ceil_mode or _outputs_known(win, x, g), *BEYOND)
    short = any(rest is not None and rest < 0 for rest in windows.remainder(win, x, g))
    require(0 not in g.shape[2:] and (not short or ceil_mode or auto_pad.startswith("SAME")), *SHORT)
    each = zip(win.sizes, win.extents, win.strides, strict=True)
    require(not auto_pad.startswith("SAME") or all(k == extent and s <= k + 1 for k, extent, s in each), *PADDED)
    return win, late


def _outputs_known(win, x, g):
    """Return True if each window in the inferred shape begins before the end of the image with its begin pads."""
    return all(
        not isinstance(out, int) or not isinstance(size, int) or (out - 1) * stride < size + begin
        for out, size, stride, begin in zip(g.shape[2:], x.shape[2:], win.strides, win.begins, strict=True)
    )


def _band(win, i, size, outputs, count_include_pad):
    """Return the matrix that averages along one axis, [outputs, size]. None if it is too large or a size is unknown."""
    if not isinstance(size, int) or not isinstance(outputs, int) or size * outputs > DENSE:
        return None
    reads = np.arange(size) - (np.arange(outputs)[:, None] * win.strides[i] - win.begins[i])
    inside = (reads >= 0) & (reads < win.extents[i]) & (reads % win.dilations[i] == 0)
    return inside / _taps_inside(win, i, np.arange(outputs)[:, None], size, count_include_pad)


def _taps_inside(win, i, outputs, size, count_include_pad):
    """Return the number of elements that each window averages along one axis.

    `outputs` holds the indices of the windows, 0, 1, ..., as a numpy array or an int64 value.
    """
    low, high = (-win.begins[i], size + win.ends[i]) if count_include_pad else (0, size)
    return windows.taps_below(win, i, outputs, high) - windows.taps_below(win, i, outputs, low)


def _counts(op, win, i, x, g, late, ceil_mode, count_include_pad):
    """Return the number of elements that each window averages along one axis. Sizes may be known only at run time.

    The result is a float if it is the same constant for all windows, otherwise a value in the type of `g` that
    broadcasts to `g`.
    """
    whole = count_include_pad or not (late or win.begins[i] or win.ends[i])
    over = 0 if late else _overhang(win, i, x, g, ceil_mode)
    if whole and not over:
        return float(win.kernel[i])
    axis = 2 + i
    if whole and not ceil_mode:
        if count_include_pad and op.opset < 19:  # older AveragePools divide by the size of the whole kernel
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
    """Return the number of elements, including padding, that the first window averages along one axis.

    It is smaller than the kernel's size if the padded image is shorter than the window.
    """
    more = win.begins[i] + win.ends[i] + win.dilations[i] - 1
    reach = op.dim(x, 2 + i) + more if more else op.dim(x, 2 + i)
    taps = reach / win.dilations[i] if win.dilations[i] > 1 else reach
    return op.Min(taps, op.ints([win.kernel[i]]))


@rule("GlobalAveragePool")
def global_average_pool(op, g, y, x):
    return op.expand_like(op.per(g, x, range(2, x.rank)), x)


@rule("GlobalMaxPool", kink="the first maximum in row-major order gets the whole gradient")
def global_max_pool(op, g, y, x):
    flat = windows.flat(op, x)
    places = op.steps(op.dim(flat, 2))
    taken = op.Equal(places, op.ArgMax(flat, axis=2, keepdims=1))
    return op.reshape_like(op.Where(taken, op.Reshape(g, op.ints([0, 0, 1])), op.const(0.0, g)), x)


@rule("LpPool", kink="0 where all elements of the window are 0")
def lp_pool(op, g, y, x, *, auto_pad, ceil_mode, dilations, kernel_shape, p, pads, strides):
    """d (Σ|x|ᵖ)^(1/p) / dx = sign(x) |x|^(p-1) y^(1-p), summed over the windows that contain x."""
    win, late = _windows(op, x, g, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    g = op.Where(y > 0.0, g / (op.Where(y > 0.0, y, op.const(1.0, y)) ** float(p - 1)), op.const(0.0, y))
    ones = np.ones((1, 1, *win.sizes))
    return _spread(op, [g], ones, win, x, late, exact=not ceil_mode) * _signed_power(op, x, p)


@rule("GlobalLpPool", kink="0 where all elements are 0")
def global_lp_pool(op, g, y, x, *, p):
    """The rule of LpPool for one window over all spatial axes. It uses powers of |x| / y, which don't underflow."""
    return g * _signed_power(op, x / op.Where(y > 0.0, y, op.const(1.0, y)), p)


def _signed_power(op, x, p):
    """Return sign(x) |x|^(p-1)."""
    return op.Sign(x) * op.Abs(x) ** float(p - 1) if p > 1 else op.Sign(x)
