"""Rules of operators that select elements. A selected element gets the sum of the cotangents of its copies.

ScatterND with a reduction is never emitted, because onnxruntime loses updates for repeated indices with two threads.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import mul

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules.scatter_add import add_flat, add_rows, added, suits_flat, suits_gathered, sum_gathered
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.types import MAX_INT64

ENDLESS = 2**31 - 1
"""Smallest `ends` value of a Slice that exporters write to reach the end of an axis."""

MIN_INT64 = -(2**63)

LONG_STEP = 1 << 10
"""Largest step of a Slice for which zeros are inserted into the cotangent.

A longer step may be far longer than its axis, so that too many zeros would be inserted.
"""


# -- the result is a window or grid of the operand, and Pad reverses the selection --------------------------------


def _placed(op, g, x, before):
    """Pad `g` with zeros to the shape of `x`. `before` maps an axis to the number of zeros in front of `g`."""
    starts = [before.get(axis, 0) for axis in range(x.rank)]
    ends = [op.size(x, axis) - starts[axis] - op.size(g, axis) if axis in before else 0 for axis in range(x.rank)]
    if all(isinstance(size, int) and size == 0 for size in (*starts, *ends)):
        return op.state(g, x.shape)
    return op.Pad(g, op.vector([*starts, *ends]), shape=x.shape)


@rule("Slice")
def slice_(op, g, y, x, starts, ends, axes, steps):
    """Reverse `g` along negative steps, insert zeros for longer steps, and pad with zeros to the shape of x."""
    known = _slice_axes(x, starts, axes, steps)
    if axes is None and steps is None and _cuts_nothing(op, x, starts, ends):
        return g, None, None, None, None
    if known is None:
        return _put_back(op, g, x, lambda count: op.Slice(count, starts, ends, axes, steps)), None, None, None, None
    axes, steps = known
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


def _cuts_nothing(op, x, starts, ends):
    """Return True if a Slice certainly returns all of `x`, because it begins at 0 and its ends are the shape of `x`.

    The inferred shape of the result is not used, because it may be wrong.
    """
    maker = op.maker(ends)
    if starts.const is None or starts.const.any() or maker is None or maker.op_type != "Shape" or maker.attribute:
        return False
    return op.same_shape(op.val(maker.input[0]), x)


def _is_whole(starts, ends, i):
    known = starts.const is not None and ends.const is not None
    return known and starts.const[i] == 0 and ends.const[i] >= ENDLESS


def _slice_axes(x, starts, axes, steps):
    """Return the axes and steps of a Slice. None if they are known only at run time, or a step exceeds `LONG_STEP`."""
    if x.known_shape is None or (axes is None and not isinstance(starts.shape[0], int)):
        return None
    if any(values is not None and values.const is None for values in (axes, steps)):
        return None
    axes = [axis % x.rank for axis in (range(starts.shape[0]) if axes is None else axes.const.tolist())]
    steps = [1] * len(axes) if steps is None else steps.const.tolist()
    return None if any(abs(step) > LONG_STEP for step in steps) else (axes, steps)


def _first(op, starts, i, size, step):
    """Return the first selected index along an axis, clamped to [0, size], or to [0, size - 1] for a negative step."""
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
    return op.Slice(g, op.ints([-1]), op.ints([MIN_INT64]), op.ints([axis]), op.ints([-1]))


def _dilated(op, g, strides):
    """Insert zeros between the elements of `g`, and after the last one.

    Args:
        op: the emitter.
        g: the value.
        strides: axis -> the distance of its elements in the result.
    """
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
    """Cut off the border of `g`. Unless the border is constant, add it to the elements that it was copied from.

    A Slice cuts off the border five times faster than a Pad with negative pads.
    """
    if mode != "constant":
        return _bordered(op, g, x, pads, axes, mode), None, None
    gvalue = None
    if op.wants(value):
        border = op.Pad(op.fill(0.0, x), pads, op.const(1.0, g), axes)
        gvalue = op.cast(op.reshape_like(op.sum(op.wide(op.reshape(g * border, [-1])), [0]), value), value)
    if pads.const is None or (pads.const < 0).any():
        opposite = -pads if pads.const is None else op.ints(-pads.const)
        return op.Pad(g, opposite, None, axes, shape=x.shape), None, gvalue
    before, after = np.split(pads.const, 2)
    ends = op.ints([-count or MAX_INT64 for count in after.tolist()])
    return op.Slice(g, op.ints(before), ends, axes, shape=x.shape), None, gvalue


def _bordered(op, g, x, pads, axes, mode):
    if x.known_shape is None or (axes is not None and axes.const is None):
        return _put_back(op, g, x, lambda count: op.Pad(count, pads, None, axes, mode=mode), repeats=True)
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
        rows = op.Pad(op.steps(op.size(x, axis)), op.Gather(pads, op.ints(here)), mode=mode)
        dims = [op.size(x if a == axis else g, a) for a in range(x.rank)]
        g = add_rows(op, op.zeros(dims, g), g, rows, axis)
    return op.state(g, x.shape)


def _folded(op, g, axis, mode, before, size, after):
    """Cut both borders off `g` along an axis, and add them to the elements from which the borders were copied."""
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


# -- the places are given by indices ------------------------------------------------------------------------------


def _count(op, x):
    """Return the flat index 0, 1, ... of each element of `x`, in the shape of `x`."""
    return op.reshape_like(op.Range(op.const(0), op.Size(x), op.const(1)), x)


def _put_back(op, g, x, take, repeats=False):
    """Return the cotangent of `x` for an operator that selects elements of `x` in any way.

    The operator is applied to the flat indices of `x`. The result is the index of the source of each selected element.

    Args:
        op: the emitter.
        g: the cotangent of the selected elements.
        x: the operand.
        take: a function that applies the operator to a tensor in the shape of `x`.
        repeats: True if an element may be selected twice.
    """
    places, zeros = op.reshape(take(_count(op, x)), [-1]), op.reshape(op.fill(0.0, x), [-1])
    g = op.reshape(g, [-1])
    return op.reshape_like(added(op, zeros, places, g) if repeats else op.ScatterElements(zeros, places, g), x)


def strides_of(sizes):
    """Return the row-major strides of axes that are merged into one. A size, and so a stride, is an int or a value.

    The stride of an axis is the distance in the merged axis between elements that are neighbours along the axis.
    """
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, size * strides[0])
    return strides


@rule("Gather", needs_opset=16)
def gather(op, g, y, x, indices, *, axis):
    axis %= x.rank
    if all(size == 1 for size in indices.shape):
        one = op.reshape(g, [1 if a == axis else op.size(x, a) for a in range(x.rank)])
        return _placed(op, one, x, {axis: _one_index(op, indices, op.size(x, axis))}), None
    if indices.rank == 1 and (first := _in_order(indices.const)) is not None:
        return _placed(op, g, x, {axis: first}), None
    rows = op.cast(indices if indices.rank == 1 else op.reshape(indices, [-1]), TensorProto.INT64)
    if indices.rank != 1:
        sizes = op.sizes(x)
        certain = all(isinstance(size, int) and size for size in sizes[:axis] + sizes[axis + 1 :])
        sizes[axis] = -1 if certain else op.size(rows, 0)  # next to a size of 0, -1 is ambiguous
        g = op.reshape(g, sizes)
    shared = len(op.readers(x.name)) > 1
    return op.state(add_rows(op, op.fill(0.0, x), g, rows, axis, shared), x.shape), None


def _in_order(rows):
    """Return the first of the indices `rows` if they are known, consecutive and ascending; otherwise None."""
    if rows is None or not len(rows) or rows[0] < 0 or (np.diff(rows) != 1).any():
        return None
    return int(rows[0])


def _one_index(op, index, size):
    if index.const is None:
        return op.Mod(op.cast(op.reshape(index, [1]), TensorProto.INT64), size)
    value = int(index.const.reshape(-1)[0])
    return value + size if value < 0 else value


@rule("GatherElements", needs_opset=16)
def gather_elements(op, g, y, x, indices, *, axis):
    """Add each cotangent at its index.

    If the indices have size 1 along the axis, none repeats, and each cotangent is written, which needs only opset 13.
    """
    if indices.shape[axis] == 1:
        return op.scatter(op.fill(0.0, x), indices, g, axis, repeats=False), None
    column = _column(op, indices, x, axis)
    if column is not None:
        rows = op.cast(_vector(op, column, axis), TensorProto.INT64)
        return add_rows(op, op.fill(0.0, x), g, rows, axis % x.rank), None
    return added(op, op.fill(0.0, x), indices, g, axis), None


@rule("GatherND", needs_opset=16)
def gather_nd(op, g, y, x, indices, *, batch_dims):
    """Merge the batch axes and the indexed axes into one axis of rows, to which the cotangents are added."""
    depth = "?" if indices.known_shape is None else indices.shape[-1]
    if isinstance(depth, str) or x.known_shape is None:
        taken = _put_back(op, g, x, lambda count: op.GatherND(count, indices, batch_dims=batch_dims), repeats=True)
        return taken, None
    head = batch_dims + depth
    sizes = op.sizes(x)
    strides = strides_of(sizes[:head])
    wrapped = op.Mod(indices, op.vector(sizes[batch_dims:head]))
    rows = op.sum(wrapped * op.vector(strides[batch_dims:]), [-1], keepdims=False)
    for axis in range(batch_dims):
        steps = op.steps(sizes[axis]) * strides[axis]
        rows = rows + op.unsqueeze(steps, range(1, rows.rank - axis))
    tail = sizes[head:]
    zeros = op.zeros([strides[0] * sizes[0], *tail], x)
    added = add_rows(op, zeros, op.reshape(g, [-1, *tail]), op.reshape(rows, [-1]), 0)
    return op.reshape_like(added, x), None


SCATTER = (
    "without reduction, only the last update of an element gets the gradient; ties of max and min share it "
    "evenly; the second derivative is 0 if several factors of one product are 0"
)


@rule("ScatterElements", needs_opset=16, kink=SCATTER)
def scatter_elements(op, g, y, x, indices, updates, *, axis, reduction):
    column = _column(op, indices, x, axis)
    if column is not None and reduction == "add" and axis % x.rank == 0:
        _write_sum(op, x, column, updates)
    rows = None if column is None else _vector(op, column, axis)
    return _scattered(op, g, y, x, indices, updates, axis, reduction, rows)


def _column(op, indices, x, axis):
    """Return the indices of whole slices along `axis` if an Expand computes `indices` from them; otherwise None."""
    maker = op.maker(indices)
    if maker is None or maker.op_type != "Expand" or None in (indices.known_shape, x.known_shape):
        return None
    column, count, axis = op.val(maker.input[0]), indices.shape[axis], axis % x.rank
    one_each = tuple(count if a == axis else 1 for a in range(x.rank))
    whole = tuple(count if a == axis else size for a, size in enumerate(x.shape))
    return column if column.known_shape == one_each and indices.shape == whole and "?" not in whole else None


def _vector(op, column, axis):
    return op.squeeze(column, [a for a in range(column.rank) if a != axis % column.rank])


def _write_sum(op, x, column, updates):
    """Replace the forward ScatterElements by a faster sum of rows: on flat tensors, or by gathering the rows again."""
    if op.training is None or op.training.forward_stays or not suits_flat(x, column.shape[0]):
        return
    forward = op.in_place_of_node()
    maker = op.maker(updates)
    if maker is not None and maker.op_type == "Slice" and op.same_shape(op.val(maker.input[0]), updates):
        # exporters slice the updates to the shape of the indices, but this Slice removes nothing
        updates = op.val(maker.input[0])
    gathered = op.gathered(updates)
    forms = ("gathered", "flat") if gathered and suits_gathered(x, gathered[0], column.shape[0]) else ("flat",)
    form = op.variant("sum", forms, forms[0])
    x, column, updates = (forward.val(v.name) for v in (x, column, updates))
    rows = _vector(forward, column, 0)
    if gathered and form == "gathered":
        source, picks = (forward.val(v.name) for v in gathered)
        result = x + forward.cast(sum_gathered(forward, x, source, picks, rows), x)
    else:
        result = add_flat(forward, x, updates, rows)
    op.replace_node(forward, {op.node.output[0]: result})


def _scattered(op, g, y, x, indices, updates, axis, reduction, rows=None):
    """Return the cotangents of x, of the indices (always None) and of the updates of a ScatterElements.

    Args:
        op: the emitter.
        g: the cotangent of the result.
        y: the result.
        x, indices, updates: the operands.
        axis, reduction: the attributes.
        rows: if the indices select whole slices, the vector of the indices of these slices; otherwise None.
    """

    def taken(values):
        if rows is not None:
            return op.Gather(values, rows, axis=axis) if axis % x.rank else op.take(values, rows)
        return op.state(op.GatherElements(values, indices, axis=axis), updates.known_shape)

    if reduction == "add":
        return g, None, taken(g)
    if reduction in (None, "none"):
        gx = op.ScatterElements(g, indices, op.fill(0.0, updates), axis=axis)
        if not op.wants(updates):
            return gx, None, None
        return gx, None, _of_last(op, taken(g), _last_elements(op, x, indices, axis, rows))
    if reduction == "mul":
        return _product(op, g, y, x, indices, updates, axis, taken)
    scattered = partial(op.ScatterElements, axis=axis, reduction=reduction)
    y, x, updates = op.comparable(y, lambda x, updates: scattered(x, indices, updates), x, updates)
    kept, chosen = op.cast(op.Equal(x, y), g), op.cast(op.Equal(updates, taken(y)), g)
    share = g / added(op, kept, indices, chosen, axis)
    return kept * share, None, chosen * taken(share)


# Without reduction, the last of several updates of an element stays. It gets the cotangent of the element, and the
# others get 0. onnxruntime's ScatterElements applies updates in order. Its ScatterND does so only with one thread.


def _of_last(op, taken, last):
    """Return the cotangents of updates: `taken`, with 0 for overwritten updates.

    `last` is a mask that is false for overwritten updates, or None if there are none.
    """
    return taken if last is None else op.Where(last, taken, op.const(0.0, taken))


def _last_elements(op, x, indices, axis, rows):
    """Return a mask that is true for the updates that no later update overwrites, or None if none is overwritten."""
    if indices.known_shape is not None and indices.shape[axis] == 1:
        return None
    known = indices.const
    if known is not None and x.known_shape is not None and isinstance(size := x.shape[axis], int):
        places = np.indices(known.shape)
        places[axis] = known % max(size, 1)
        return _known_last(op, np.moveaxis(places, 0, -1))
    if rows is not None:
        last = last_of(op, rows, op.size(x, axis))
        return op.unsqueeze(last, [a - (axis % x.rank) for a in range(axis % x.rank + 1, x.rank)])
    numbers = _count(op, indices)
    zeros = op.cast(op.fill(0.0, x), numbers)
    marked = op.ScatterElements(zeros, indices, numbers, axis=axis)
    return op.Equal(op.GatherElements(marked, indices, axis=axis), numbers)


def _last_slices(op, x, indices, updates):
    """Return a mask that is true for the updates of a ScatterND that no later one overwrites, or None if all are."""
    depth = "?" if indices.known_shape is None else indices.shape[-1]
    if isinstance(depth, str) or x.known_shape is None:
        last = last_of(op, op.reshape(op.GatherND(_count(op, x), indices), [-1]), op.reshape(op.Size(x), [1]))
        return op.reshape_like(last, updates)
    tail = x.rank - depth
    sizes = op.sizes(x, range(depth))
    if indices.const is not None and all(isinstance(size, int) for size in sizes):
        return _known_last(op, indices.const % np.maximum(sizes, 1), tail)
    rows = op.sum(op.Mod(indices, op.vector(sizes)) * op.vector(strides_of(sizes)), [-1], keepdims=False)
    last = last_of(op, op.reshape(rows, [-1]), reduce(mul, sizes, 1))
    return op.reshape(last, [*op.sizes(indices, range(indices.rank - 1)), *[1] * tail])


def _known_last(op, places, tail=0):
    """Return a mask that is true for the last occurrence of each place, or None if no place occurs twice.

    Args:
        op: the emitter.
        places: the places, known at build time; each is a vector of indices along the last axis.
        tail: the number of axes of size one to append to the mask.
    """
    rows = places.reshape(-1, places.shape[-1])
    numbers = np.ravel_multi_index(tuple(rows.T), tuple(rows.max(axis=0, initial=0) + 1)) if rows.size else rows[:, 0]
    _, positions = np.unique(numbers[::-1], return_index=True)
    if len(positions) == len(numbers):
        return None
    last = np.zeros(len(numbers), bool)
    last[len(numbers) - 1 - positions] = True
    return op.const(last.reshape(*places.shape[:-1], *[1] * tail))


def last_of(op, rows, count):
    """Return a mask that is true for the last occurrence of each entry in a vector of indices.

    The indices are below `count`, and negative ones count back from it.
    """
    numbers = _count(op, rows)
    marked = op.ScatterElements(op.zeros([count], numbers), rows, numbers)
    return op.Equal(op.Gather(marked, rows), numbers)


def _product(op, g, y, x, indices, updates, axis, taken):
    """Return the cotangents of x, indices and updates of a ScatterElements with reduction "mul".

    The derivative by a factor is the product of all other factors. If the factor is not 0, this product is y / factor.

    Source: PyTorch's scatter_reduce with reduce='prod'.
    """
    zero, one = op.const(0.0, x), op.const(1.0, x)
    none_x, none_u = op.Equal(x, zero), op.Equal(updates, zero)
    some_x, some_u = op.Where(none_x, one, x), op.Where(none_u, one, updates)
    rest = op.ScatterElements(some_x, indices, some_u, axis=axis, reduction="mul")
    zeros = added(op, op.cast(none_x, x), indices, op.cast(none_u, x), axis)
    alone = op.Where(op.Equal(zeros, one), rest, zero)
    gx = g * op.Where(none_x, alone, y / some_x)
    return gx, None, taken(g) * op.Where(none_u, taken(alone), taken(y) / some_u)


@rule("ScatterND", kink=SCATTER)
def scatter_nd(op, g, y, x, indices, updates, *, reduction):
    """For reductions max, min and mul, flatten the tensors and use the rule of ScatterElements."""
    if reduction in (None, "none"):
        gx = op.ScatterND(g, indices, op.fill(0.0, updates))
        if not op.wants(updates):
            return gx, None, None
        last = _last_slices(op, x, indices, updates)
        if last is not None and last.const is not None:
            text = (
                f"{op.forward}: its indices repeat. With two or more threads, onnxruntime's ScatterND may keep "
                "any of the repeated updates, but the gradient is that of the last one. ScatterElements "
                "always keeps the last one"
            )
            op.cautions.append(Caution("note", op.forward, text))
        return gx, None, _of_last(op, op.state(op.GatherND(g, indices), updates.known_shape), last)
    if not _distinct(indices.const):
        text = (
            f"{op.forward}: with two or more threads, onnxruntime's ScatterND(reduction='{reduction}') loses "
            "updates if an index repeats, so the model itself computes wrong numbers. ScatterElements does not"
        )
        op.cautions.append(Caution("note", op.forward, text))
    if reduction == "add":
        return g, None, op.state(op.GatherND(g, indices), updates.known_shape)
    places = op.reshape(op.GatherND(_count(op, x), indices), [-1])
    flat_g, flat_y, flat_x, flat_updates = (op.reshape(value, [-1]) for value in (g, y, x, updates))
    gx, _, gupdates = _scattered(op, flat_g, flat_y, flat_x, places, flat_updates, 0, reduction)
    return op.reshape_like(gx, x), None, op.reshape_like(gupdates, updates)


def _distinct(indices):
    """Return True if the indices are known, none is negative and no row repeats.

    A negative index may repeat another index.
    """
    if indices is None or (indices < 0).any():
        return False
    rows = indices.reshape(-1, indices.shape[-1])
    return len(np.unique(rows, axis=0)) == len(rows)


@rule("TensorScatter", needs_opset=24)
def tensor_scatter(op, g, y, past, update, starts, *, axis, mode):
    """In each sample, the update replaces a window along the axis, which may wrap around at the end."""
    axis %= past.rank
    gpast = op.TensorScatter(g, op.fill(0.0, update), starts, axis=axis, mode=mode)
    if starts is None:
        return gpast, op.Slice(g, op.ints([0]), op.dim(update, axis), op.ints([axis]), shape=update.shape), None
    rows = op.unsqueeze(starts, [1]) + op.steps(op.size(update, axis))
    if mode == "circular":
        rows = op.Mod(rows, op.size(g, axis))
    rows = op.unsqueeze(rows, [*range(1, axis), *range(axis + 1, past.rank)])
    return gpast, op.GatherElements(g, op.Expand(rows, op.shape(update), shape=update.shape), axis=axis), None


@rule("Unique", needs_opset=16, kink="the first of equal elements gets the gradient")
def unique(op, gs, ys, x, *, axis, sorted):
    first = ys[1] if len(ys) > 1 and ys[1] is not None else op.Unique(x, axis=axis, sorted=sorted, outputs=2)[1]
    if axis is not None:
        return add_rows(op, op.fill(0.0, x), gs[0], first, axis % x.rank)
    flat = op.ScatterElements(op.reshape(op.fill(0.0, x), [-1]), first, gs[0])
    return op.reshape_like(flat, x)


@rule("TopK", kink="of equal elements, those that the operator returns get the gradient")
def top_k(op, gs, ys, x, k, *, axis, largest, sorted):
    """Write each cotangent at its index. The indices never repeat, so no sum is needed."""
    return op.ScatterElements(op.fill(0.0, x), ys[1], gs[0], axis=axis), None


@rule("Compress", needs_opset=16)
def compress(op, g, y, x, condition, *, axis):
    rows = op.reshape(op.NonZero(condition), [-1])
    if axis is None:
        flat = op.reshape(x, [-1])
        return op.reshape_like(add_rows(op, op.fill(0.0, flat), g, rows, 0), x), None
    return add_rows(op, op.fill(0.0, x), g, rows, axis % x.rank), None


@rule("OneHot")
def one_hot(op, g, y, indices, depth, values, *, axis):
    """The operand `values` is (off, on): the value of other elements, and the value at the index."""
    hot = op.OneHot(indices, depth, op.const([0.0, 1.0], g), axis=axis)
    on, off = op.sum(g * hot, keepdims=False), op.sum(g * (1 - hot), keepdims=False)
    return None, None, op.Concat(op.unsqueeze(off, [0]), op.unsqueeze(on, [0]), axis=0)


# -- every element of the operand is in the result ---------------------------------------------------------------


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
