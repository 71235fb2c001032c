"""Sliding windows: the geometry that convolutions and pools share, and linear maps along single axes.

A tap is one position of the kernel. Along one axis, output o is computed from `x[o * stride + tap * dilation - begin]`
for each tap, where begin is the number of pads at the begin. The functions accept sizes that are known only at run
time, and return constants if sizes are static.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.shapes import MAX_COUNTING_LENGTH
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.types import MAX_INT64


class Window(NamedTuple):
    """A window over the spatial axes (all axes except the first two). Each field has one entry per spatial axis.

    `kernel` has the sizes of the weight's spatial axes; a size that is known only at run time is a symbol. `begins` and
    `ends` are the pads.
    """

    kernel: tuple[int | str, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    group: int = 1

    @property
    def known(self) -> bool:
        """True if the kernel's size is known."""
        return all(isinstance(size, int) for size in self.kernel)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The kernel's size.

        Raises:
            Unknown: the size is known only at run time.
        """
        require(self.known, f"the kernel's size ({', '.join(map(str, self.kernel))}) is unknown")
        return self.kernel  # type: ignore[return-value]

    @property
    def extents(self) -> tuple[int, ...]:
        """The extent of a window along each axis, including the gaps of dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.sizes, self.dilations, strict=True))

    @property
    def axes(self) -> list[int]:
        """The spatial axes."""
        return list(range(2, 2 + len(self.kernel)))

    @property
    def attributes(self) -> dict[str, Any]:
        """The window as the attributes of a Conv or ConvTranspose."""
        return {
            "kernel_shape": list(self.kernel) if self.known else None,
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": [*self.begins, *self.ends],
            "group": self.group,
        }


def kernel_of(kernel_shape: Sequence[int] | None, w: Val) -> tuple[int | str, ...]:
    """Return the kernel's size: `kernel_shape`, or if that is None the sizes of the weight's spatial axes."""
    return tuple(kernel_shape or w.shape[2:])


def kernel_sizes(op: Op, win: Window, w: Val) -> Val:
    """Return the kernel's size as an int64 vector."""
    return op.vector([size if isinstance(size, int) else op.dim(w, 2 + i) for i, size in enumerate(win.kernel)])


def window(
    kernel: Sequence[int | str], strides: Sequence[int] | None, dilations: Sequence[int] | None,
    pads: Sequence[int] | None, group: int = 1,
) -> Window:  # fmt: skip
    """Return a window from a node's attributes, with explicit pads.

    Raises:
        Unknown: pads are negative, or the window is larger than any image.
    """
    n = len(kernel)
    if math.prod(size for size in kernel if isinstance(size, int)) > MAX_COUNTING_LENGTH:
        raise Unknown(f"its window of {' x '.join(map(str, kernel))} is too large")
    pads = tuple(pads or (0,) * (2 * n))
    require(all(pad >= 0 for pad in pads), f"it has negative pads {list(pads)}")
    return Window(tuple(kernel), tuple(strides or (1,) * n), tuple(dilations or (1,) * n), pads[:n], pads[n:], group)


def split_pads(total: Any, auto_pad: str) -> tuple[Any, Any]:
    """Split a number of pads into begin and end pads, as SAME_UPPER or SAME_LOWER does.

    Args:
        total: the number of pads along one axis, or a vector of these numbers for all axes; an int or an int64 value.
        auto_pad: 'SAME_UPPER' puts an odd pad at the end. Any other value puts it at the begin.
    """
    half = total / 2 if isinstance(total, Val) else total // 2
    return (half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half)


def auto_window(op: Op, win: Window, x: Val, auto_pad: str) -> tuple[Window, tuple[Val, Val] | None]:
    """Return `win` with the pads that `auto_pad` requires for `x`.

    Returns:
        (window with the pads, None). If the pads depend on sizes that are known only at run time: (window without pads,
        (begins, ends)), where begins and ends are int64 vectors with the pads of each spatial axis.
    """
    if auto_pad == "NOTSET":
        return win, None
    none = (0,) * len(win.kernel)
    if auto_pad == "VALID":
        return win._replace(begins=none, ends=none), None
    totals = []
    for size, extent, stride in zip(x.shape[2:], win.extents, win.strides, strict=True):
        if stride == 1:
            totals.append(extent - 1)
        elif isinstance(size, int):
            totals.append(max((-(-size // stride) - 1) * stride + extent - size, 0))
    if len(totals) == len(win.kernel):
        begins, ends = zip(*(split_pads(total, auto_pad) for total in totals), strict=True)
        return win._replace(begins=begins, ends=ends), None
    sizes = op.Shape(x, start=2) if op.opset >= 15 else op.Slice(op.Shape(x), op.ints([2]), op.ints([MAX_INT64]))
    strides = op.ints(win.strides)
    steps = (sizes + (strides - 1)) / strides - 1
    total = op.Max(steps * strides + op.ints(win.extents) - sizes, op.ints([0]))
    return win._replace(begins=none, ends=none), split_pads(total, auto_pad)


def divided(op: Op, x: Val, axis: int, parts: int) -> int | Val:
    """Return the size of an axis of `x` divided by `parts`, as an int or as an int64 vector of one element."""
    size = op.size(x, axis)
    return size // parts if isinstance(size, int) else size / parts


def flat(op: Op, x: Val) -> Val:
    """Flatten the spatial axes of `x`. If sizes are static, no -1 is used, because it fails on an empty batch."""
    return op.Reshape(x, op.ints([0, 0, cells(x)]))


def matrices(op: Op, x: Val, rows: int | Val, columns: int | Val) -> Val:
    """Reshape each sample of `x` to a matrix of `rows` rows and `columns` columns."""
    shape = [x.shape[0], *(size if isinstance(size, int) else None for size in (rows, columns))]
    return op.Reshape(x, op.vector([0, rows, columns]), shape=shape)


def cells(x: Val) -> int:
    """Return the number of elements of the spatial axes together, or -1 if it is known only at run time."""
    sizes = [size for size in x.shape[2:] if isinstance(size, int)]
    return int(np.prod(sizes)) if len(sizes) == x.rank - 2 else -1


def pad(op: Op, x: Val, begins: Val | Sequence[int], ends: Val | Sequence[int], value: float = 0.0) -> Val:
    """Pad the spatial axes of `x` with zeros or another value."""
    around = [op.const(value, x)] if value else []
    if isinstance(begins, Val) or isinstance(ends, Val):
        lead = op.ints([0, 0])
        return op.Pad(x, op.Concat(lead, begins, lead, ends, axis=0), *around)
    if not any((*begins, *ends)):
        return x
    return op.Pad(x, op.ints([0, 0, *begins, 0, 0, *ends]), *around)


def crop_like(op: Op, padded: Val, begins: Val | None, x: Val) -> Val:
    """Return the part of `padded` in the shape of `x` that begins at `begins` (None: 0) on the spatial axes."""
    axes = list(range(2, x.rank))
    sizes = op.Gather(op.shape(x), op.ints(axes))
    starts = op.ints([0] * len(axes)) if begins is None else begins
    stops = sizes if begins is None else begins + sizes
    return op.Slice(padded, starts, stops, op.ints(axes), shape=x.known_shape)


def remainder(win: Window, x: Val, g: Val) -> list[int | None]:
    """Return for each spatial axis the number of elements of the padded input after the last window; None if unknown.

    The number is negative if the last window exceeds the padded input, as it may with ceil_mode.
    """
    if not win.known:
        return [None] * len(win.kernel)
    pads = [begin + end for begin, end in zip(win.begins, win.ends, strict=True)]
    each = zip(x.shape[2:], g.shape[2:], pads, win.extents, win.strides, strict=True)
    return [
        size + pad - (out - 1) * stride - extent if isinstance(size, int) and isinstance(out, int) else None
        for size, out, pad, extent, stride in each
    ]


def spread(op: Op, g: Val, w: Val, x: Val, win: Window, exact: bool = True) -> Val:
    """Return the cotangent of `x` for a convolution of `x` with the weights `w`, by a ConvTranspose that is cropped.

    Args:
        op: the emitter.
        g: the cotangent of the result of the convolution.
        w: the weights.
        x: the input.
        win: the window.
        exact: True if no window exceeds the padded input (no ceil_mode). With a stride of 1, the last window then ends
            where the padded input ends.
    """
    ends, more, unknown = [], [], False
    for rest, end, stride in zip(remainder(win, x, g), win.ends, win.strides, strict=True):
        if rest is None and stride == 1 and exact:
            rest = 0
        unknown |= rest is None
        short = end - (stride - 1 if rest is None else rest)
        ends.append(max(short, 0))
        more.append(max(-short, 0))
    attributes = win._replace(ends=tuple(ends)).attributes
    result = op.ConvTranspose(
        g, w, **attributes, output_padding=more if any(more) else None, shape=None if unknown else x.known_shape
    )
    return crop_like(op, result, None, x) if unknown else result


def reads(
    op: Op, win: Window, i: int, g: Val, taps: Sequence[int], axes: tuple[int, int], rank: int
) -> np.ndarray | Val:
    """Return the positions in the padded input that windows read along spatial axis `i`, as a tensor of `rank` axes.

    The result is a numpy array if the size of `g` is static and at most `MAX_COUNTING_LENGTH`.

    Args:
        op: the emitter.
        win: the window.
        i: the spatial axis, counted from 0.
        g: the outputs, one per window.
        taps: the taps to read.
        axes: two axes of the result: the axis of the windows and the axis of the taps.
        rank: the number of axes of the result; the other axes have size one.
    """
    outputs, steps = axes
    size = g.shape[2 + i]
    reach = np.asarray(taps) * win.dilations[i]
    reach = reach.reshape([-1 if axis == steps else 1 for axis in range(rank)])
    if not isinstance(size, int) or size > MAX_COUNTING_LENGTH:
        return op.steps(op.dim(g, 2 + i), outputs, rank) * win.strides[i] + op.const(reach)
    first = np.arange(size).reshape([-1 if axis == outputs else 1 for axis in range(rank)])
    return first * win.strides[i] + reach


def places(op: Op, win: Window, x: Val, g: Val, taps: Sequence[Sequence[int]]) -> Val:
    """Return flat positions in the padded image that windows read: [windows of each axis..., taps of each axis...].

    The positions are a sum of one small vector per axis, so the model stays small. Runtimes fold the sum if the sizes
    are static.

    Args:
        x: the image without the pads of `win`.
        g: the outputs, one per window.
        taps: the taps to read along each axis, in this order.
    """
    n = len(win.kernel)
    total: Any = None
    pitch: Any = 1
    for i in reversed(range(n)):
        own = reads(op, win, i, g, taps[i], (i, n + i), 2 * n) * pitch
        own = own if isinstance(own, Val) else op.const(own)
        total = own if total is None else own + total
        pitch = (op.size(x, 2 + i) + (win.begins[i] + win.ends[i])) * pitch
    return total


def taps_below(win: Window, i: int, outputs: Any, bound: Any) -> Any:
    """Return the number of taps of each window that read before position `bound` of the spatial axis `i`.

    Args:
        win: the window.
        i: the spatial axis, counted from 0.
        outputs: the indices of the windows, 0, 1, ..., as a numpy array or an int64 value.
        bound: the position in the input without pads, as a numpy array, int64 value or int.
    """
    dilation, taps = win.dilations[i], win.sizes[i]
    ahead = bound - (outputs * win.strides[i] - win.begins[i]) + (dilation - 1)
    if isinstance(ahead, Val):
        return ahead.op.Clip(ahead / dilation, ahead.op.const(0), ahead.op.const(taps))
    return np.clip(ahead // dilation, 0, taps)


def along(op: Op, x: Val, axis: int, matrix: np.ndarray | Val) -> Val:
    """Multiply `matrix`, [new, old], with `x` along one axis, by one matrix product."""
    axis %= x.rank
    if axis == x.rank - 1:
        return x @ (op.swap_last(matrix) if isinstance(matrix, Val) else op.const(matrix.T, x))
    matrix = matrix if isinstance(matrix, Val) else op.const(matrix, x)
    if axis == x.rank - 2:
        return matrix @ x
    flat = op.Reshape(x, op.ints([*(0,) * (axis + 1), -1]))
    trailing = op.sizes(x, range(axis + 1, x.rank))
    shape = [None if dim == "?" else dim for dim in (*x.shape[:axis], matrix.shape[-2], *x.shape[axis + 1 :])]
    return op.Reshape(matrix @ flat, op.vector([*(0,) * (axis + 1), *trailing]), shape=shape)
