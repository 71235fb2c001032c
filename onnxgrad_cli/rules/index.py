"""Selections: what was taken from a place puts its cotangent back there, and a place taken twice gets the sum.

ScatterND(reduction="add") is never emitted: with repeated indices and two threads onnxruntime loses updates.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emit import Unknown
from onnxgrad_cli.registry import rule

ONE_HOT = 128
"""Up to this many rows a sum over repeated indices is a product with their one-hot matrix: 1.2 to 150 times faster
than ScatterElements at 64 and 768 columns, 256 to 8,192 indices, two threads; slower from 256 rows on."""

ENDLESS = 2**31 - 1
"""An end from here on is how exporters write 'to the end'."""

LEAST, GREATEST = -(2**63), 2**63 - 1


# -- where the result is one window or grid of the operand: Pad puts it back -------------------------------------


def _placed(op, g, x, before):
    """`g` amid zeros in the shape of `x`; `before`: axis -> how many zeros come first."""
    starts = [before.get(axis, 0) for axis in range(x.rank)]
    ends = [op.size(x, axis) - starts[axis] - op.size(g, axis) if axis in before else 0 for axis in range(x.rank)]
    if all(isinstance(size, int) and size == 0 for size in (*starts, *ends)):
        return op.state(g, x.shape)
    return op.Pad(g, op.vector([*starts, *ends]), shape=x.shape)


@rule("Slice")
def slice_(op, g, y, x, starts, ends, axes, steps):
    """A negative step is turned round, a longer one filled up with zeros; then the window is put back."""
    axes, steps = _slice_axes(x, starts, axes, steps)
    before, strides = {}, {}
    for i, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        if step == 1 and _is_whole(starts, ends, i):
            continue
        taken, first = op.size(g, axis), _first(op, starts, i, op.size(x, axis), step)
        if taken == 0 and isinstance(taken, int):
            return None, None, None, None, None
        if step < 0:
            g = _flipped(op, g, axis)
            first = first + (taken - 1) * step
        if abs(step) > 1:
            strides[axis] = abs(step)
        before[axis] = first
    return _placed(op, _dilated(op, g, strides), x, before), None, None, None, None


def _is_whole(starts, ends, i):
    known = starts.const is not None and ends.const is not None
    return known and starts.const[i] == 0 and ends.const[i] >= ENDLESS


def _slice_axes(x, starts, axes, steps):
    if axes is not None and axes.const is None:
        raise Unknown("the axes of the slice are known only at run time")
    if steps is not None and steps.const is None:
        raise Unknown("the steps of the slice are known only at run time")
    if axes is None and not isinstance(starts.shape[0], int):
        raise Unknown("how many axes are sliced is known only at run time")
    axes = [axis % x.rank for axis in (range(starts.shape[0]) if axes is None else axes.const.tolist())]
    return axes, [1] * len(axes) if steps is None else steps.const.tolist()


def _first(op, starts, i, size, step):
    """The first index taken, as the operator clamps it: to [0, size], or [0, size - 1] where it steps back."""
    last = size if step > 0 else size - 1
    if starts.const is None:
        start = op.cast(op.Slice(starts, op.ints([i]), op.ints([i + 1])), TensorProto.INT64)
        start = op.Where(start < 0, start + size, start)
        return op.Max(op.Min(start, last), op.ints([0]))
    start = int(starts.const[i])
    if isinstance(size, int):
        return min(max(start + size if start < 0 else start, 0), last)
    if start < 0:
        return op.Max(op.Min(size + start, last), op.ints([0]))
    return op.Min(op.ints([start]), last) if start else 0


def _flipped(op, g, axis):
    return op.Slice(g, op.ints([-1]), op.ints([LEAST]), op.ints([axis]), op.ints([-1]))


def _dilated(op, g, strides):
    """`g` with zeros after each element along some axes; `strides`: axis -> its new share of the axis."""
    if not strides:
        return g
    dims, inner, pads = [], [], []
    for axis in range(g.rank):
        size, stride = op.size(g, axis), strides.get(axis, 1)
        dims.append(size * stride if stride > 1 else size)
        pads.append(0)
        if stride > 1:
            inner.append(len(pads))
            pads.append(stride - 1)
    apart = op.Pad(op.unsqueeze(g, inner), op.ints([*([0] * len(pads)), *pads]))
    return op.reshape(apart, dims)


@rule("Pad")
def pad(op, g, y, x, pads, value, axes, *, mode):
    """A constant border is cut off (a Slice is five times faster than negative pads); another one is folded back."""
    if mode != "constant":
        return _bordered(op, g, x, pads, axes, mode), None, None
    gvalue = None
    if op.wants(value):
        border = op.Pad(op.fill(0.0, x), pads, op.const(1.0, g), axes)
        gvalue = op.reshape_like(op.sum(g * border, keepdims=False), value)
    if pads.const is None or (pads.const < 0).any():
        return (
            op.Pad(g, -pads if pads.const is None else op.ints(-pads.const), None, axes, shape=x.shape),
            None,
            gvalue,
        )
    before, after = np.split(pads.const, 2)
    ends = op.ints([-count or GREATEST for count in after.tolist()])
    return op.Slice(g, op.ints(before), ends, axes, shape=x.shape), None, gvalue


def _bordered(op, g, x, pads, axes, mode):
    if axes is not None and axes.const is None:
        raise Unknown("the axes of the padding are known only at run time")
    axes = [axis % x.rank for axis in (range(x.rank) if axes is None else axes.const.tolist())]
    for i, axis in enumerate(axes):
        here, size = [i, i + len(axes)], x.shape[axis]
        known = None if pads.const is None else pads.const[here].tolist()
        if known == [0, 0]:
            continue
        reach = {"reflect": -1, "wrap": 0}
        if known and isinstance(size, int) and min(known) >= 0 and max(known) <= size + reach.get(mode, max(known)):
            g = _folded(op, g, axis, mode, known[0], size, known[1])
            continue
        rows = op.Pad(_up_to(op, op.size(x, axis)), op.Gather(pads, op.ints(here)), mode=mode)
        dims = [op.size(x if a == axis else g, a) for a in range(x.rank)]
        g = _add_rows(op, op.zeros(dims, g), g, rows, axis)
    return op.state(g, x.shape)


def _folded(op, g, axis, mode, before, size, after):
    """The two borders added to the places they were copied from."""
    pieces = list(op.split(g, [count for count in (before, size, after) if count], axis))
    left, right = pieces.pop(0) if before else None, pieces.pop() if after else None
    (total,) = pieces
    places = {"reflect": (1, size - 1 - after), "edge": (0, size - 1), "wrap": (size - before, 0)}[mode]
    for border, first in zip((left, right), places, strict=True):
        if border is not None:
            if mode == "reflect":
                border = _flipped(op, border, axis)
            if mode == "edge":
                border = op.sum(border, [axis])
            total = total + _placed(op, border, total, {axis: first})
    return total


# -- where the places are given by indices ------------------------------------------------------------------------


def _add_rows(op, zeros, g, rows, axis):
    """`zeros` with the i-th slice of `g` along `axis` added at rows[i]; negative rows count from the end.

    A one-hot product where that axis is short, else ScatterElements, which sums repeated indices correctly at any
    number of threads (before opset 16 it does not sum).
    """
    size = op.size(zeros, axis)
    if op.opset < 16 or (isinstance(size, int) and size <= ONE_HOT):
        return _one_hot_product(op, zeros, g, rows, size, axis)
    places = op.unsqueeze(rows, range(1, g.rank - axis))
    return op.ScatterElements(zeros, op.Expand(places, op.shape(g)), g, axis=axis, reduction="add")


def _one_hot_product(op, zeros, g, rows, size, axis):
    rows, every = op.Mod(rows, size), _up_to(op, size)
    if axis == g.rank - 1 > 0:
        hot = op.cast(op.Equal(op.unsqueeze(rows, [1]), every), g)
        return op.state(op.MatMul(g, hot), zeros.shape)
    hot = op.cast(op.Equal(op.unsqueeze(every, [1]), rows), g)
    if g.rank - axis > 2:
        g = op.reshape(g, [*(op.size(g, a) for a in range(axis + 1)), -1])
        return op.reshape_like(op.MatMul(hot, g), zeros)
    return op.state(op.MatMul(hot, g), zeros.shape)


def _up_to(op, size):
    """0, 1, ... size - 1."""
    if isinstance(size, int):
        return op.const(np.arange(size))
    return op.Range(op.const(0), op.squeeze(size, [0]), op.const(1))


@rule("Gather", needs_opset=16)
def gather(op, g, y, x, indices, *, axis):
    axis %= x.rank
    if all(size == 1 for size in indices.shape):
        one = op.reshape(g, [1 if a == axis else op.size(x, a) for a in range(x.rank)])
        return _placed(op, one, x, {axis: _one_index(op, indices, op.size(x, axis))}), None
    rows = op.cast(indices if indices.rank == 1 else op.reshape(indices, [-1]), TensorProto.INT64)
    if indices.rank != 1:
        g = op.reshape(g, [-1 if a == axis else op.size(x, a) for a in range(x.rank)])
    return op.state(_add_rows(op, op.fill(0.0, x), g, rows, axis), x.shape), None


def _one_index(op, index, size):
    if index.const is None:
        return op.Mod(op.cast(op.reshape(index, [1]), TensorProto.INT64), size)
    value = int(index.const.reshape(-1)[0])
    return value + size if value < 0 else value


@rule("GatherElements", needs_opset=16)
def gather_elements(op, g, y, x, indices, *, axis):
    """One index along the axis can't repeat: then nothing is to be added, and opset 13 will do."""
    reduction = None if indices.shape[axis] == 1 else "add"
    return op.ScatterElements(op.fill(0.0, x), indices, g, axis=axis, reduction=reduction), None


@rule("GatherND", needs_opset=16)
def gather_nd(op, g, y, x, indices, *, batch_dims):
    """The indexed axes are one axis of rows, and so are the batch axes before them."""
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        raise Unknown("how many axes are indexed is known only at run time")
    head = batch_dims + depth
    sizes = [op.size(x, axis) for axis in range(x.rank)]
    strides = [1]
    for size in reversed(sizes[1:head]):
        strides.insert(0, size * strides[0])
    wrapped = op.Mod(indices, op.vector(sizes[batch_dims:head]))
    rows = op.sum(wrapped * op.vector(strides[batch_dims:]), [-1], keepdims=False)
    for axis in range(batch_dims):
        steps = _up_to(op, sizes[axis]) * strides[axis]
        rows = rows + op.unsqueeze(steps, range(1, rows.rank - axis))
    tail = sizes[head:]
    zeros = op.zeros([strides[0] * sizes[0], *tail], x)
    added = _add_rows(op, zeros, op.reshape(g, [-1, *tail]), op.reshape(rows, [-1]), 0)
    return op.reshape_like(added, x), None


@rule(
    "ScatterElements",
    needs_opset=16,
    kink="ties of max and min share evenly; without reduction no index repeats",
)
def scatter_elements(op, g, y, x, indices, updates, *, axis, reduction):
    def taken(values):
        return op.GatherElements(values, indices, axis=axis)

    if reduction == "add":
        return g, None, taken(g)
    if reduction in (None, "none"):
        return op.ScatterElements(g, indices, op.fill(0.0, updates), axis=axis), None, taken(g)
    if reduction in ("max", "min"):
        kept, chosen = op.cast(op.Equal(x, y), g), op.cast(op.Equal(updates, taken(y)), g)
        share = g / op.ScatterElements(kept, indices, chosen, axis=axis, reduction="add")
        return kept * share, None, chosen * taken(share)
    return _refused(op, reduction)


@rule("ScatterND", kink="without reduction no index repeats")
def scatter_nd(op, g, y, x, indices, updates, *, reduction):
    if reduction == "add":
        return g, None, op.GatherND(g, indices)
    if reduction in (None, "none"):
        return op.ScatterND(g, indices, op.fill(0.0, updates)), None, op.GatherND(g, indices)
    return _refused(op, reduction)


def _refused(op, reduction):
    no = op.no(f"no proven derivative for reduction='{reduction}'", "write it with reduction='add' or without")
    return no, None, no


@rule("TopK", kink="of equal elements, those that the operator returns")
def top_k(op, gs, ys, x, k, *, axis, largest, sorted):
    """The indices never repeat."""
    return op.ScatterElements(op.fill(0.0, x), ys[1], gs[0], axis=axis), None


@rule("Compress", needs_opset=16)
def compress(op, g, y, x, condition, *, axis):
    rows = op.reshape(op.NonZero(condition), [-1])
    if axis is None:
        flat = op.reshape(x, [-1])
        return op.reshape_like(_add_rows(op, op.fill(0.0, flat), g, rows, 0), x), None
    return _add_rows(op, op.fill(0.0, x), g, rows, axis % x.rank), None


@rule("OneHot")
def one_hot(op, g, y, indices, depth, values, *, axis):
    """The values are (off, on)."""
    hot = op.OneHot(indices, depth, op.const([0.0, 1.0], g), axis=axis)
    on, off = op.sum(g * hot, keepdims=False), op.sum(g * (1 - hot), keepdims=False)
    return None, None, op.Concat(op.unsqueeze(off, [0]), op.unsqueeze(on, [0]), axis=0)


# -- where nothing is lost ---------------------------------------------------------------------------------------


@rule("Where")
def where(op, g, y, condition, a, b):
    zero = op.const(0.0, g)
    return None, op.Where(condition, g, zero), op.Where(condition, zero, g)


@rule("CumSum")
def cumsum(op, g, y, x, axis, *, exclusive, reverse):
    return op.CumSum(g, axis, exclusive=exclusive, reverse=1 - reverse), None


@rule("ReverseSequence")
def reverse_sequence(op, g, y, x, lengths, *, batch_axis, time_axis):
    return op.ReverseSequence(g, lengths, batch_axis=batch_axis, time_axis=time_axis), None
