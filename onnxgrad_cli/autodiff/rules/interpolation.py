"""Rules of operators that interpolate images. Each sample is a weighted sum of the elements around its position.

The weights are polynomials in the position along each axis and do not depend on the image. Therefore, the cotangent of
a sample, times a weight, is added to the cotangent of the element with that weight. The cotangent of a position is
computed from the derivatives of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add, mul
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.autodiff.rules.conv import bias_gradient
from onnxgrad_cli.autodiff.rules.index import strides_of
from onnxgrad_cli.autodiff.rules.scatter_add import added
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val

A = -0.75
"""The parameter `a` of the cubic kernel, as the GridSample operator and PyTorch define it."""

STEPS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}
"""Map from a mode to the elements that are used for a position, as offsets.

They count from the element at or before the position or, in mode nearest, from the nearest element.
"""

WEIGHTS = {
    "linear": [[1.0, 0.0], [-1.0, 1.0]],
    "cubic": [[0.0, 1.0, 0.0, 0.0], [A, 0.0, -A, 0.0], [-2 * A, -A - 3, 2 * A + 3, A], [A, A + 2, -A - 2, -A]],
}
"""Map from a mode to the weights as polynomials: row k has the coefficients of t^k, one column per element in `STEPS`.

t is the distance of the position from the element at offset 0.

Source: R. Keys, Cubic convolution interpolation for digital image processing, 1981.
"""

BOXES = ("the rule does not cover the derivative with respect to the boxes", "make the boxes a constant")


# -- the elements around positions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taps:
    """The elements of an image that are interpolated at some positions, along one or several axes.

    The first axis of each tensor runs over the few elements of a position. So the last axis is long, which is fast.

    Attributes:
        count: the number of elements that are used for a position, along each axis.
        places: the indices of the elements along each axis, int64 and inside the image.
        weights: the weights of the elements.
        slopes: the derivatives of the weights with respect to the position, or None if all are zero.
    """

    count: int
    places: Val
    weights: Val
    slopes: Val | None


def _taps(op: Op, at: Val, sizes: Val, mode: str, padding: str, align_corners: bool = False) -> Taps:
    """Return the elements that are interpolated at the positions `at`.

    Args:
        op: the emitter.
        at: the positions, in units of elements.
        sizes: the sizes of the axes, int64.
        mode: "nearest", "linear" or "cubic".
        padding: "zeros", "border" or "reflection".
        align_corners: for padding "reflection": True to mirror positions at the centers of the first and last elements,
            False to mirror them at the outer edges of these elements.
    """
    last, turn = sizes - 1, None
    if mode == "linear" and padding != "zeros":
        if padding == "reflection":
            at, turn = _reflected(op, at, sizes, align_corners)
        end = op.cast(last, at)
        at = op.Min(op.Max(at, 0.0), end)
        inside = op.cast(op.Abs(at + at - end) < end, at)
        turn = inside if turn is None else turn * inside
    first = op.Round(at) if mode == "nearest" else op.Floor(at)
    column = (-1, *(1,) * at.rank)
    places, t = op.unsqueeze(first, [0]) + np.reshape(STEPS[mode], column), op.unsqueeze(at - first, [0])
    if padding == "reflection" and mode != "linear":
        places, _ = _reflected(op, places, sizes, align_corners)
    weights, slopes = op.fill(1.0, t), None
    if mode != "nearest":
        coefficients = np.array(WEIGHTS[mode])
        weights = _polynomial(op, coefficients, t)
        slopes = _polynomial(op, coefficients[1:] * np.arange(1, len(coefficients))[:, None], t)
        slopes = slopes if turn is None else slopes * turn
    places = op.cast(places, TensorProto.INT64)
    within = op.Min(op.Max(places, 0), last)
    if padding == "zeros":
        inside = op.cast(op.Equal(places, within), at)
        weights, slopes = inside * weights, None if slopes is None else inside * slopes
    return Taps(len(STEPS[mode]), within, weights, slopes)


def _polynomial(op: Op, coefficients: np.ndarray, t: Val) -> Val:
    """Evaluate at `t`, [1, ...], the polynomials whose coefficients are the columns of `coefficients`."""
    column = (-1, *(1,) * (t.rank - 1))
    result = op.const(coefficients[-1].reshape(column), t)
    for row in coefficients[-2::-1]:
        result = result * t + row.reshape(column)
    return result


def _reflected(op: Op, at: Val, sizes: Val, align_corners: bool) -> tuple[Val, Val]:
    """Mirror positions at the ends until they are inside. Return them, and their derivatives by the input, 1 or -1."""
    low, ends = (0.0, sizes - 1) if align_corners else (-0.5, sizes)
    period = op.cast(ends + ends, at)
    at = at - period * op.Floor((at - low) / op.Max(period, 1.0))
    mirrored = period + 2 * low - at
    back = mirrored < at
    return op.Where(back, mirrored, at), op.Where(back, op.const(-1.0, at), op.const(1.0, at))


class Samples(NamedTuple):
    """Interpolated samples, P in each of the images `x`, which are [B, C, *sizes].

    Attributes:
        axes: the spatial axes of `x`, in the order of the coordinates of a position.
        taps: the elements around the positions, [elements per axis, axes, B, P].
    """

    op: Op
    x: Val
    axes: Sequence[int]
    taps: Taps

    def values(self) -> Val:
        """Return the interpolated samples, [B, C, P]."""
        op, taken = self.op, self._taken()
        weights = op.reshape(op.cast(self._weights(), self.x), [self._elements(), -1, 1])
        flat = op.sum(taken * weights, [0], keepdims=False)
        flat = op.reshape(flat, [op.size(self.x, 0), -1, op.size(self.x, 1)])
        return op.transpose(flat, [0, 2, 1])

    def image_gradient(self, g: Val) -> Val:
        """Return the cotangent of the images, given the cotangent `g` of the samples, [B, C, P].

        ScatterElements adds single elements, one plane after the other. This takes half as long as adding rows.
        """
        op, area = self.op, _area(self.op, self.x)
        planes = [op.size(self.x, 0), op.size(self.x, 1)]
        first = op.reshape(op.steps(planes[0] * planes[1]) * area, [*planes, 1])
        places = op.unsqueeze(self._places(), [2]) + first
        values = op.unsqueeze(op.cast(self._weights(), self.x), [2]) * g
        zeros = op.zeros([planes[0] * planes[1] * area], self.x)
        return op.reshape_like(added(op, zeros, op.reshape(places, [-1]), op.reshape(values, [-1])), self.x)

    def position_gradient(self, g: Val) -> Val | None:
        """Return the cotangent of the positions, [axes, B, P], given that of the samples, [B, C, P]."""
        op, slopes = self.op, self.taps.slopes
        if slopes is None:
            return None
        each = op.sum(op.wide(self._taken() * rows_of(op, g)), [2], keepdims=False)
        each = op.cast(op.reshape(each, [-1, op.size(g, 0), op.size(g, 2)]), slopes)
        weights, changes = self._along(self.taps.weights), self._along(slopes)
        parts = []
        for i, change in enumerate(changes):
            factor = self._combined([*weights[:i], change, *weights[i + 1 :]], mul)
            parts.append(op.sum(each * factor, [0]))
        return op.Concat(*parts, axis=0)

    def _taken(self) -> Val:
        """Return the values of the elements at all positions, [elements, B * P, C]."""
        op = self.op
        first = op.unsqueeze(op.steps(op.size(self.x, 0)) * _area(op, self.x), [1])
        rows = self._places() + first
        return op.Gather(rows_of(op, self.x), op.reshape(rows, [self._elements(), -1]))

    def _weights(self) -> Val:
        """Return the weights of the elements, [elements, B, P]."""
        return self._combined(self._along(self.taps.weights), mul)

    def _places(self) -> Val:
        """Return the flat indices of the elements in an image, [elements, B, P]."""
        op, n = self.op, len(self.axes)
        strides = strides_of(op.sizes(self.x, range(2, self.x.rank)))
        steps = op.reshape(op.vector([strides[axis - 2] for axis in self.axes]), [n, 1, 1])
        return self._combined(self._along(self.taps.places * steps), add)

    def _along(self, x: Val) -> list[Val]:
        """Split `x`, which is like a tensor of `Taps`, by axis. The elements of each part get a separate axis.

        So the parts broadcast to all combinations of elements.
        """
        op, n = self.op, len(self.axes)
        parts = [op.squeeze(part, [1]) for part in op.split(x, [1] * n, 1)]
        return [op.unsqueeze(part, [j for j in range(n) if j != i]) for i, part in enumerate(parts)]

    def _combined(self, parts: Sequence[Val], how: Callable[[Val, Val], Val]) -> Val:
        """Combine the parts from `_along`, one per axis, by the function `how`. Return [elements, B, P].

        There is one element for each combination of elements along the axes.
        """
        whole = reduce(how, parts)
        return self.op.reshape(whole, [self._elements(), *(self.op.size(whole, axis) for axis in (-2, -1))])

    def _elements(self) -> int:
        return self.taps.count ** len(self.axes)


def rows_of(op: Op, x: Val) -> Val:
    """Reshape [B, C, *sizes] to [B * sizes, C]."""
    batch, channels, area = op.size(x, 0), op.size(x, 1), _area(op, x)
    flat = x if x.rank == 3 else op.reshape(x, [batch, channels, area])
    return op.reshape(op.transpose(flat, [0, 2, 1]), [batch * area, channels])


def _area(op: Op, x: Val) -> Any:
    """Return the number of elements of a plane: an int if static, otherwise an int64 vector of one element."""
    return reduce(mul, op.sizes(x, range(2, x.rank)))


def _sizes(op: Op, x: Val, axes: Sequence[int]) -> Val:
    """Return the sizes of some axes, [axes, 1, 1]."""
    return op.reshape(op.vector(op.sizes(x, axes)), [len(axes), 1, 1])


SIDE = "at an element, the slope on the side of increasing coordinates"


@rule("GridSample", versions=(16, None), needs_opset=16, kink=f"{SIDE}; 0 at the ends with border and reflection")
def grid_sample(op, g, y, x, grid, *, align_corners, mode, padding_mode):
    """Positions, borders and kinks are treated as in PyTorch's grid_sample. Source: the GridSample operator page."""
    n = x.rank - 2
    axes = list(range(x.rank - 1, 1, -1))
    sizes = _sizes(op, x, axes)
    grid01 = op.transpose(op.reshape(op.wide(grid), [op.size(grid, 0), -1, n]), [2, 0, 1]) + 1
    if align_corners:
        reach = op.cast(sizes - 1, grid01)
        at = grid01 / 2 * reach
    else:
        reach = op.cast(sizes, grid01)
        at = (grid01 * reach - 1) / 2
    taps = _taps(op, at, sizes, mode.removeprefix("bi"), padding_mode, bool(align_corners))
    samples, dgrid = Samples(op, x, axes, taps), None
    g = op.reshape(g, [op.size(g, 0), op.size(g, 1), -1])
    dx = samples.image_gradient(g) if op.wants(x) else None
    if op.wants(grid) and taps.slopes is not None:
        moved = op.transpose(samples.position_gradient(g) * (reach / 2), [1, 2, 0])
        dgrid = op.cast(op.reshape_like(moved, grid), grid)
    return dx, dgrid


@rule("AffineGrid", versions=(20, None), needs_opset=20)
def affine_grid(op, g, y, theta, size, *, align_corners):
    """Each position is theta times the homogeneous coordinates of a point in the grid for the identity map."""
    n = theta.shape[1] if isinstance(theta.shape[1], int) else g.rank - 2
    spatial = op.Slice(size, op.ints([1]), op.ints([n + 2]))
    identity = op.wide(op.const(np.eye(n, n + 1)[None], theta))  # onnxruntime can't run two AffineGrids in float16
    base = op.AffineGrid(identity, op.Concat(op.ints([1]), spatial, axis=0), align_corners=align_corners)
    base = op.cast(base, theta)
    flat = op.reshape(g, [op.size(theta, 0), -1, n])
    linear = op.swap_last(flat) @ op.reshape(base, [-1, n])
    return op.Concat(linear, op.swap_last(op.sum(flat, [1])), axis=2), None


@rule("DeformConv", versions=(19, None), needs_opset=19, kink=SIDE)
def deform_conv(
    op, g, y, x, w, offset, b, mask, *, dilations, group, kernel_shape, offset_group, pads, strides
):  # fmt: skip
    """Y = W V, where V are the samples times the mask, [N, C, taps, outputs], so dV = Wᵀ G and dW = G Vᵀ.

    Source: J. Dai et al., Deformable Convolutional Networks, 2017; X. Zhu et al., Deformable ConvNets v2, 2018.
    """
    win = windows.window(windows.kernel_of(kernel_shape, w), strides, dilations, pads, group)
    n, taps = len(win.kernel), int(np.prod(win.sizes))
    batch, channels = op.size(x, 0), op.size(x, 1)
    parts = batch * offset_group
    each = channels // offset_group if isinstance(channels, int) else channels / offset_group
    images = x if offset_group == 1 else op.reshape(x, [parts, each, *op.sizes(x, win.axes)])
    moves = op.transpose(op.reshape(op.wide(offset), [parts, taps, n, -1]), [2, 0, 1, 3])
    at = op.reshape(moves + _windows(op, win, offset, moves), [n, parts, -1])
    samples = Samples(op, images, win.axes, _taps(op, at, _sizes(op, x, win.axes), "linear", "zeros"))

    per = windows.divided(op, w, 0, group)
    columns = [batch, group, op.size(w, 1) * taps, -1]
    w_rows, g_rows = op.reshape(w, [group, per, columns[2]]), op.reshape(g, [batch, group, per, -1])
    factor = None if mask is None else op.reshape(mask, [parts, 1, -1])
    dx = dw = doffset = dmask = None
    if any(op.wants(v) for v in (x, offset, mask)):
        masked = op.reshape(op.swap_last(w_rows) @ g_rows, [parts, each, -1])
        dv = masked if factor is None else masked * factor
        if op.wants(mask):
            dmask = op.reshape_like(op.sum(masked * samples.values(), [1]), mask)
        if op.wants(x):
            dx = op.reshape_like(samples.image_gradient(dv), x)
        if op.wants(offset):
            moved = op.reshape(samples.position_gradient(dv), [n, parts, taps, -1])
            doffset = op.cast(op.reshape_like(op.transpose(moved, [1, 2, 0, 3]), offset), offset)
    if op.wants(w):
        v = samples.values()
        v = op.reshape(v if factor is None else v * factor, columns)
        dw = op.reshape_like(op.sum(g_rows @ op.swap_last(v), [0], keepdims=False), w)
    return dx, dw, doffset, bias_gradient(op, g, b), dmask


def _windows(op, win, offset, like):
    """Return the position that each tap of each window reads if its offset is 0, [axes, 1, taps, outputs]."""
    n = len(win.kernel)
    column = (n, 1, 1, 1)
    taps = np.indices(win.sizes).reshape(n, 1, -1, 1)
    taps = taps * np.reshape(win.dilations, column) - np.reshape(win.begins, column)
    sizes = op.sizes(offset, win.axes)
    every = op.vector(sizes)
    outputs = []
    for i, (size, stride) in enumerate(zip(sizes, win.strides, strict=True)):
        starts = op.unsqueeze(op.steps(size) * stride, [axis - i for axis in range(i + 1, len(sizes))])
        outputs.append(op.reshape(op.Expand(starts, every), [1, 1, 1, -1]))
    return op.cast(op.const(taps) + op.Concat(*outputs, axis=0), like)


# -- boxes --------------------------------------------------------------------------------------------------------


@rule("RoiAlign", kink="in mode max, the first of equal elements times weights", needs_opset=16)
def roi_align(
    op, g, y, x, rois, batch_indices, *, coordinate_transformation_mode, mode, output_height,
    output_width, sampling_ratio, spatial_scale,
):  # fmt: skip
    """In mode avg, each axis is averaged by a matrix product, so the gradient is two matrix products.

    In mode max, the maximum is taken over elements times their weights, as runtimes and the published tests do.
    Source: K. He et al., Mask R-CNN, 2017; the RoiAlign operator page (before opset 16, boxes are not shifted).
    """
    refused = op.no(*BOXES)
    if not op.wants(x):
        return None, refused, None
    shift, least = (0.5, 0.0) if coordinate_transformation_mode == "half_pixel" else (0.0, 1.0)
    bounds = [bound * spatial_scale - shift for bound in op.split(op.wide(rois), [1, 1, 1, 1], 1)]
    axes = []
    for axis, bins, start, end in ((2, output_height, *bounds[1::2]), (3, output_width, *bounds[::2])):
        length = op.Max(end - start, least) if least else end - start
        axes.append(_bin_samples(op, start, length / float(bins), bins, sampling_ratio, _sizes(op, x, [axis])))
    if mode == "max":
        return _largest(op, g, x, batch_indices, *axes), refused, None
    matrices = [_averages(op, op.size(x, 2 + i), *axis) for i, axis in enumerate(axes)]
    return _spread_boxes(op, g, x, batch_indices, *(op.cast(matrix, x) for matrix in matrices)), refused, None


def _bin_samples(op, start, length, bins, sampling_ratio, size):
    """Return the elements that are interpolated at the samples in each bin, along one axis.

    Args:
        op: the emitter.
        start: the start of the first bin of each box, [boxes, 1].
        length: the length of each bin of a box, [boxes, 1].
        bins: the number of bins.
        sampling_ratio: the number of samples per bin; 0 for the length of the bin, rounded up.
        size: the size of the axis of the image.

    Returns:
        The places of the elements, their weights, and booleans that are true for existing samples. All three broadcast
        to [boxes, bins, samples, 2].
    """
    start, length = op.unsqueeze(start, [2]), op.unsqueeze(length, [2])
    counts = op.const(np.full((1, 1, 1), sampling_ratio), start) if sampling_ratio > 0 else op.Ceil(length)
    number = op.cast(op.steps(sampling_ratio if sampling_ratio > 0 else _most(op, counts)), start)
    bin_number = op.cast(op.steps(bins, 0, 2), start)
    at = start + bin_number * length + (number + 0.5) * length / counts
    present = number < counts
    inside = op.And(op.And(at >= -1.0, at <= op.cast(size, at)), present)
    taps = _taps(op, at, size, "linear", "border")
    weights = op.Where(inside, taps.weights, op.const(0.0, at))
    places, weights = (op.transpose(v, [1, 2, 3, 0]) for v in (taps.places, weights))
    return places, weights, op.unsqueeze(present, [present.rank])


def _most(op, counts):
    """Return the largest of `counts`, at least 1, as an int64 vector of one element."""
    every = op.Concat(op.const(np.ones(1), counts), op.reshape(counts, [-1]), axis=0)
    return op.cast(op.max(every), TensorProto.INT64)


def _averages(op, size, places, weights, present):
    """Return the matrix that averages the samples of each bin along one axis, [boxes, bins, size]."""
    samples = op.Max(op.sum(op.cast(present, weights), [2]), 1.0)
    boxes, bins = op.size(weights, 0), op.size(weights, 1)
    flat = [boxes, bins, op.size(weights, 2) * 2]
    places, shares = (op.reshape(v, flat) for v in (places, weights / samples))
    return added(op, op.zeros([boxes, bins, size], weights), places, shares, 2)


def _spread_boxes(op, g, x, batch_indices, rows, columns):
    """Return dX[n] = Σ rowsᵀ G columns, summed over the boxes of image n.

    `rows` and `columns` are the averaging matrices of the two axes, from `_averages`. A scatter would instead need four
    additions for each sample of each box.
    """
    n, c, h, w = op.sizes(x, range(4))
    boxes, _, bins, across = op.sizes(g, range(4))
    wide = op.reshape(op.reshape(g, [boxes, c * bins, across]) @ columns, [boxes, c, bins, w])
    wide = op.reshape(op.transpose(wide, [0, 2, 1, 3]), [boxes * bins, c * w])
    images = op.unsqueeze(op.steps(n), [1])
    own = op.cast(op.Equal(images, op.cast(batch_indices, TensorProto.INT64)), x)
    tall = op.unsqueeze(own, [1, 3]) * op.transpose(rows, [2, 0, 1])
    spread = op.reshape(op.reshape(tall, [n * h, boxes * bins]) @ wide, [n, h, c, w])
    return op.state(op.transpose(spread, [0, 2, 1, 3]), x.shape)


@rule("MaxRoiPool", kink="the first maximum of the bin in row-major order gets the whole gradient", needs_opset=16)
def max_roi_pool(op, g, y, x, rois, *, pooled_shape, spatial_scale):
    """The bounds of boxes are rounded to integers, halves away from zero. Source: R. Girshick, Fast R-CNN, 2015."""
    refused = op.no(*BOXES)
    if not op.wants(x):
        return None, refused
    image, *bounds = op.split(rois, [1] * 5, 1)
    bounds = [_rounded(op, bound * spatial_scale) for bound in bounds]
    axes = []
    for axis, bins, start, end in ((2, pooled_shape[0], *bounds[1::2]), (3, pooled_shape[1], *bounds[::2])):
        length = op.Max(end - start + 1, 1.0) / float(bins)
        number, size = op.cast(op.steps(bins), length), op.cast(op.dim(x, axis), length)
        first, stop = (op.Min(op.Max(edge + start, 0.0), size) for edge in
                       (op.Floor(number * length), op.Ceil((number + 1) * length)))  # fmt: skip
        first, counts = op.unsqueeze(first, [2]), op.unsqueeze(stop - first, [2])
        inner = op.cast(op.steps(_most(op, counts)), first)
        present = inner < counts
        places = op.cast(op.Min(first + inner, size - 1), TensorProto.INT64)
        axes.append((places, op.cast(present, x), present))
    return _largest(op, g, x, op.squeeze(image, [1]), *axes), refused


def _rounded(op, x):
    """Round to integers, with halves away from zero as in C's round."""
    size = op.Abs(x)
    whole = op.Floor(size)
    return op.Sign(x) * (whole + op.cast(size - whole >= 0.5, x))


def _largest(op, g, x, images, rows, columns):
    """Return the cotangent of images if the result of each bin is the maximum of candidates: elements times weights.

    The element of the largest candidate (the first one if several are equal) gets the cotangent of the bin times its
    weight.

    Args:
        op: the emitter.
        g: the cotangent of the bins.
        x: the images.
        images: the index of the image of each box.
        rows, columns: places, weights and presence of the candidates along each axis, [boxes, bins, candidates...].
    """
    rank = max(v.rank for v in rows)
    places, weights, present = (
        (op.unsqueeze(row, [2, 4, 6][: rank - 1]), op.unsqueeze(column, [1, 3, 5][: rank - 1]))
        for row, column in zip(rows, columns, strict=True)
    )
    images = op.reshape(op.cast(images, TensorProto.INT64), [-1, *[1] * (2 * rank - 2)])
    n, h, w = op.sizes(x, (0, 2, 3))
    image, row, _ = strides_of([n, h, w])
    every = images * image + places[0] * row + places[1]
    shape, sizes = op.shape(every), op.sizes(every, range(3, every.rank))
    every, weights, present = (
        op.reshape(op.Expand(v, shape), [-1, reduce(mul, sizes)])
        for v in (every, op.cast(mul(*weights), x), op.And(*present))
    )
    values = op.Gather(rows_of(op, x), every) * op.unsqueeze(weights, [2])
    first = op.ArgMax(op.Where(op.unsqueeze(present, [2]), values, op.const(-np.inf, x)), axis=1, keepdims=0)
    taken = rows_of(op, g) * op.GatherElements(weights, first, axis=1)
    zeros = op.zeros([n * h * w, op.size(x, 1)], x)
    dx = op.reshape(added(op, zeros, op.GatherElements(every, first, axis=1), taken), [n, -1, op.size(x, 1)])
    return op.reshape_like(op.transpose(dx, [0, 2, 1]), x)
