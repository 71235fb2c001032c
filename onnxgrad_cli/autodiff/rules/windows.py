"""Sliding windows: the geometry that convolutions and pools share, and linear maps along single axes.

A window on one axis reads `x[o * stride + tap * dilation - begin]`. Everything here works with symbolic sizes;
where sizes are static the same functions return constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.shapes import LONGEST
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

LAST = np.iinfo(np.int64).max
"""The end of an axis, for Slice."""


class Window(NamedTuple):
    """A window over the spatial axes (all but the first two): one entry an axis.

    The kernel's sizes are those of the weight's axes, symbols where they are known at run time only.
    """

    kernel: tuple[int | str, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    group: int = 1

    @property
    def known(self) -> bool:
        """Whether the kernel's size is known."""
        return all(isinstance(size, int) for size in self.kernel)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The kernel's size; raises Unknown where it is known at run time only."""
        if not self.known:
            raise Unknown(f"the kernel's size ({', '.join(map(str, self.kernel))}) is unknown")
        return self.kernel  # type: ignore[return-value]

    @property
    def extents(self) -> tuple[int, ...]:
        """How far a window reaches along each axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.sizes, self.dilations, strict=True))

    @property
    def axes(self) -> list[int]:
        """The spatial axes."""
        return list(range(2, 2 + len(self.kernel)))

    @property
    def attributes(self) -> dict[str, Any]:
        """The window as attributes of Conv or ConvTranspose."""
        return {
            "kernel_shape": list(self.kernel) if self.known else None,
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": [*self.begins, *self.ends],
            "group": self.group,
        }


def kernel_of(kernel_shape: Sequence[int] | None, w: Val) -> tuple[int | str, ...]:
    """The kernel's size: the attribute, or else the weight's spatial axes.

    Raises:
        Unknown: the two contradict each other.
    """
    stated, own = tuple(kernel_shape or w.shape[2:]), w.shape[2:]
    fits = len(stated) == len(own) and all(a == b or not isinstance(b, int) for a, b in zip(stated, own, strict=True))
    if not fits:
        raise Unknown(f"kernel_shape {list(stated)} is not that of its weight, {list(own)}")
    return stated


def kernel_sizes(op: Op, win: Window, w: Val) -> Val:
    """The kernel's size as an int64 vector."""
    return op.vector([size if isinstance(size, int) else op.dim(w, 2 + i) for i, size in enumerate(win.kernel)])


def window(
    kernel: Sequence[int | str],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    group: int = 1,
) -> Window:
    """A window from a node's attributes, with explicit pads.

    Raises:
        Unknown: pads are negative, or it is larger than any image.
    """
    n = len(kernel)
    if math.prod(size for size in kernel if isinstance(size, int)) > LONGEST:
        raise Unknown(f"its window of {' x '.join(map(str, kernel))} is too large")
    pads = tuple(pads or (0,) * (2 * n))
    if any(pad < 0 for pad in pads):
        raise Unknown(f"negative pads {list(pads)}")
    return Window(tuple(kernel), tuple(strides or (1,) * n), tuple(dilations or (1,) * n), pads[:n], pads[n:], group)


def split_pads(total: Any, auto_pad: str) -> tuple[Any, Any]:
    """Padding of `total` as SAME_UPPER or SAME_LOWER divides it; works with ints and with int64 values."""
    half = total / 2 if isinstance(total, Val) else total // 2
    return (half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half)


def auto_window(op: Op, win: Window, x: Val, auto_pad: str) -> tuple[Window, tuple[Val, Val] | None]:
    """`win` with the pads that `auto_pad` asks for on `x`.

    Returns:
        the window; and None, or where the pads depend on sizes known at run time only, int64 vectors of the
        pads at the begin and the end of each spatial axis (the window then has none of its own).
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
    sizes, strides = (
        op.Shape(x, start=2) if op.opset >= 15 else op.Slice(op.Shape(x), op.ints([2]), op.ints([LAST])),
        op.ints(win.strides),
    )
    steps = (sizes + (strides - 1)) / strides - 1
    total = op.Max(steps * strides + op.ints(win.extents) - sizes, op.ints([0]))
    return win._replace(begins=none, ends=none), split_pads(total, auto_pad)


def flat(op: Op, x: Val) -> Val:
    """`x` with its spatial axes made one, without a -1 where they are static: that fails on an empty batch."""
    return op.Reshape(x, op.ints([0, 0, cells(x)]))


def matrices(op: Op, x: Val, rows: int | Val, columns: int | Val) -> Val:
    """`x` as a matrix a sample."""
    shape = [x.shape[0], *(size if isinstance(size, int) else None for size in (rows, columns))]
    return op.Reshape(x, op.vector([0, rows, columns]), shape=shape)


def cells(x: Val) -> int:
    """How many elements lie on the spatial axes; -1 where that is known at run time only."""
    sizes = [size for size in x.shape[2:] if isinstance(size, int)]
    return int(np.prod(sizes)) if len(sizes) == x.rank - 2 else -1


def pad(op: Op, x: Val, begins: Val | Sequence[int], ends: Val | Sequence[int], value: float = 0.0) -> Val:
    """`x` with zeros, or another value, around its spatial axes."""
    around = [op.const(value, x)] if value else []
    if isinstance(begins, Val) or isinstance(ends, Val):
        lead = op.ints([0, 0])
        return op.Pad(x, op.Concat(lead, begins, lead, ends, axis=0), *around)
    if not any((*begins, *ends)):
        return x
    return op.Pad(x, op.ints([0, 0, *begins, 0, 0, *ends]), *around)


def crop_like(op: Op, padded: Val, begins: Val | None, x: Val) -> Val:
    """The part of `padded` that starts at `begins` (None: 0) on the spatial axes and has the shape of `x`."""
    axes = list(range(2, x.rank))
    sizes = op.Gather(op.shape(x), op.ints(axes))
    starts = op.ints([0] * len(axes)) if begins is None else begins
    stops = sizes if begins is None else begins + sizes
    return op.Slice(padded, starts, stops, op.ints(axes), shape=x.known_shape)


def remainder(win: Window, x: Val, g: Val) -> list[int | None]:
    """How many cells of the padded input lie beyond the last window, per axis; None where that is unknown.

    Negative where the last window hangs over (ceil_mode).
    """
    result: list[int | None] = []
    if not win.known:
        return [None] * len(win.kernel)
    for size, out, begin, end, extent, stride in zip(
        x.shape[2:], g.shape[2:], win.begins, win.ends, win.extents, win.strides, strict=True
    ):
        if isinstance(size, int) and isinstance(out, int):
            result.append(size + begin + end - (out - 1) * stride - extent)
        else:
            result.append(None)
    return result


def spread(op: Op, g: Val, w: Val, x: Val, win: Window, exact: bool = True) -> Val:
    """The adjoint of sliding `win` with weights `w` over `x`, applied to `g`: one ConvTranspose, cropped.

    Args:
        exact: whether windows end where they must, so that a stride of one leaves no remainder (no ceil_mode).
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
        g,
        w,
        **attributes,
        output_padding=more if any(more) else None,
        shape=None if unknown else x.known_shape,
    )
    return crop_like(op, result, None, x) if unknown else result


def reads(
    op: Op, win: Window, i: int, g: Val, taps: Sequence[int], axes: tuple[int, int], rank: int
) -> np.ndarray | Val:
    """Where windows read along the spatial axis `i`: outputs of `g` and taps along two axes of `rank`.

    A numpy array where the size is static, and no larger than any image.
    """
    outputs, steps = axes
    size = g.shape[2 + i]
    reach = np.asarray(taps) * win.dilations[i]
    reach = reach.reshape([-1 if axis == steps else 1 for axis in range(rank)])
    if not isinstance(size, int) or size > LONGEST:
        return op.steps(op.dim(g, 2 + i), outputs, rank) * win.strides[i] + op.const(reach)
    first = np.arange(size).reshape([-1 if axis == outputs else 1 for axis in range(rank)])
    return first * win.strides[i] + reach


def places(op: Op, win: Window, x: Val, g: Val, taps: Sequence[Sequence[int]]) -> Val:
    """Where in an image the windows read, as flat positions [outputs of each axis..., taps of each axis...].

    The sum of one small vector an axis, which runtimes fold where sizes are static: the model stays small.

    Args:
        x: the image without the pads of `win`, `g`: the outputs.
        taps: those along each axis that are asked for, in their order.
    """
    n = len(win.kernel)
    sums: list[Val] = []
    pitch: Any = 1
    for i in reversed(range(n)):
        own = reads(op, win, i, g, taps[i], (i, n + i), 2 * n) * pitch
        own = own if isinstance(own, Val) else op.const(own)
        sums.append(own + sums[-1] if sums else own)
        pitch = (op.size(x, 2 + i) + (win.begins[i] + win.ends[i])) * pitch
    return sums[-1]


def taps_below(win: Window, i: int, outputs: Any, bound: Any) -> Any:
    """How many taps of each window lie before position `bound` on the spatial axis `i`.

    Args:
        outputs: window numbers, as numpy array or int64 value; `bound` may be either too, or an int.
    """
    dilation, taps = win.dilations[i], win.sizes[i]
    ahead = bound - (outputs * win.strides[i] - win.begins[i]) + (dilation - 1)
    if isinstance(ahead, Val):
        return ahead.op.Clip(ahead / dilation, ahead.op.const(0), ahead.op.const(taps))
    return np.clip(ahead // dilation, 0, taps)


def along(op: Op, x: Val, axis: int, matrix: np.ndarray | Val) -> Val:
    """The linear map `matrix` ([new, old]) along one axis of `x`, as one matrix product."""
    axis %= x.rank
    if axis == x.rank - 1:
        return x @ (op.swap_last(matrix) if isinstance(matrix, Val) else op.const(matrix.T, x))
    matrix = matrix if isinstance(matrix, Val) else op.const(matrix, x)
    if axis == x.rank - 2:
        return matrix @ x
    flat = op.Reshape(x, op.ints([*(0,) * (axis + 1), -1]))
    trailing = [op.size(x, i) for i in range(axis + 1, x.rank)]
    shape = [None if dim == "?" else dim for dim in (*x.shape[:axis], matrix.shape[-2], *x.shape[axis + 1 :])]
    return op.Reshape(matrix @ flat, op.vector([*(0,) * (axis + 1), *trailing]), shape=shape)
