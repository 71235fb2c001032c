"""Definitions of operators on images and windows (domain com.microsoft) by standard operators.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md, and the CPU kernels where the page
is ambiguous.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import MICROSOFT


@definition("CropAndResize", domain=MICROSOFT)
def crop_and_resize(op, x, boxes, batch, size, *, mode="bilinear", extrapolation_value=0.0):
    """Interpolate images at a grid of points in each box. The corners of the grid are the corners of the box.

    A box is [y1, x1, y2, x2], in units of the image. The interpolation is two matrix products, one with the weights of
    the rows of the grid and one with the weights of its columns.
    """
    require(mode in ("bilinear", "nearest"), f"its mode '{mode}' is not supported")
    boxes = op.cast(boxes, x)
    corners = op.split(boxes, [1, 1, 1, 1], axis=1)
    counts: list[int | Val]
    if size.const is not None:
        counts = [int(count) for count in size.const]
    else:
        counts = list(op.split(op.cast(size, TensorProto.INT64), [1, 1], axis=0))
    rows, rows_inside = _weights(op, corners[0], corners[2], counts[0], x, 2, mode)
    columns, columns_inside = _weights(op, corners[1], corners[3], counts[1], x, 3, mode)
    images = op.Gather(x, batch, axis=0)
    read = op.unsqueeze(rows, [1]) @ images @ op.swap_last(op.unsqueeze(columns, [1]))
    inside = op.And(op.unsqueeze(rows_inside, [1, 3]), op.unsqueeze(columns_inside, [1, 2]))
    shape = (boxes.shape[0], x.shape[1], *(n if isinstance(n, int) else None for n in counts))
    return op.state(op.Where(inside, read, op.const(extrapolation_value, x)), shape)


def _weights(
    op: Op, first: Val, last: Val, count: int | Val, x: Val, axis: int, mode: str
) -> tuple[Val, Val]:  # fmt: skip
    """Return weights [boxes, points, elements along `axis`], and a mask [boxes, points] of points inside `x`.

    Args:
        op: the emitter.
        first, last: the two ends of each box along the axis, [boxes, 1].
        count: the number of points, which are evenly spaced between the ends of a box.
        x: the images.
        axis: the axis of `x` along which is interpolated.
        mode: "bilinear" or "nearest".
    """
    end = op.cast(op.dim(x, axis) - 1, x)
    if isinstance(count, int):
        share = op.const(np.linspace(0, 1, count)[None] if count > 1 else np.full((1, 1), 0.5), x)
    else:
        steps = op.cast(op.steps(count, axis=1, rank=2), x)
        gaps = op.cast(count - 1, x)
        share = op.Where(gaps > 0, steps / op.Max(gaps, op.const(1.0, x)), op.const(0.5, x))
    at = (first * (1 - share) + last * share) * end
    inside = op.And(at >= 0, at <= end)
    element = op.cast(op.steps(op.size(x, axis), axis=2, rank=3), x)
    if mode == "nearest":
        nearest = op.unsqueeze(op.Floor(at + 0.5), [2])
        return op.cast(op.Equal(nearest, element), x), inside
    distance = op.Abs(op.unsqueeze(at, [2]) - element)
    return op.Relu(1 - distance), inside


@definition("GridSample", domain=MICROSOFT, needs_opset=20)
def grid_sample(op, x, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    """The standard operator GridSample of opset 16. The node is written for opset 20, which renamed the modes."""
    modes = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}
    require(mode in modes, f"its mode '{mode}' is not supported")
    return op.GridSample(x, grid, align_corners=align_corners, mode=modes[mode], padding_mode=padding_mode)


@definition("ConvTransposeWithDynamicPads", domain=MICROSOFT)
def conv_transpose_with_dynamic_pads(
    op, x, weight, pads=None, bias=None, *,
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, output_padding=None, strides=None,
):  # fmt: skip
    """A transposed convolution whose pads are an input: it is computed without pads, then the pads are cut off."""
    require(auto_pad == "NOTSET" and pads is not None, "it has no pads, but onnxruntime's CPU kernel requires them")
    spatial = x.rank - 2
    given = {"dilations": dilations, "kernel_shape": kernel_shape, "output_padding": output_padding, "strides": strides}
    given = {name: value for name, value in given.items() if value}
    if pads.const is not None:
        return op.ConvTranspose(x, weight, bias, group=group, pads=[int(n) for n in pads.const], **given)
    y = op.ConvTranspose(x, weight, bias, group=group, **given)
    before, after = op.split(pads, [spatial, spatial], axis=0)
    axes = list(range(2, x.rank))
    ends = op.Gather(op.shape(y), op.ints(axes)) - after
    return op.Slice(y, before, ends, op.ints(axes), shape=(*y.shape[:2], *[None] * spatial))


@definition("MaxpoolWithMask", domain=MICROSOFT)
def maxpool_with_mask(
    op, x, mask, *, auto_pad="NOTSET", kernel_shape, pads=None, storage_order=0, strides=None,
):  # fmt: skip
    """The maximum of each window. In each row of a window, elements from the first one with mask 0 on are ignored."""
    axes = len(kernel_shape)
    if auto_pad != "NOTSET" or mask.shape[:2] != (1, 1):
        raise Unknown("onnxruntime's CPU kernel misreads auto_pad, and masks of several channels")
    pads, strides = pads or [0] * 2 * axes, strides or [1] * axes
    lowest = op.const(float(np.finfo(np.float32).min), x)
    shown = op.Cast(mask, to=TensorProto.BOOL)
    if axes > 1:  # onnxruntime's kernel ignores the mask of the first element
        places = op.reshape_like(op.steps(op.Reshape(op.Size(mask), op.ints([1]))), mask)
        shown = op.Or(shown, op.Equal(places, op.const(0)))
    shown = op.cast(shown, x)
    around = op.ints([0, 0, *pads[:axes], 0, 0, *pads[axes:]])
    padded, shown = op.Pad(x, around, lowest), op.Pad(shown, around, op.const(1.0, x))
    spread, alive = op.ints(strides), shown
    results: list[Val] = []
    for place in np.ndindex(*kernel_shape):
        starts = op.ints(list(place))
        span = [op.dim(padded, 2 + i) - (kernel_shape[i] - 1 - place[i]) for i in range(axes)]
        cut = [op.Slice(v, starts, op.vector(span), op.ints(list(range(2, x.rank))), spread) for v in (padded, shown)]
        alive = cut[1] if place[-1] == 0 else alive * cut[1]
        results.append(op.Where(alive > 0, cut[0], lowest))
    return op.Max(*results) if len(results) > 1 else results[0]


@definition("UnfoldTensor", domain=MICROSOFT)
def unfold_tensor(op, x, *, size, dim=-1, step=1):
    """Sliding windows along axis `dim`, as in torch.Tensor.unfold. The elements of a window form a new last axis."""
    axis = dim % x.rank
    length = op.size(x, axis)
    if isinstance(length, int):
        index: Val = op.const(np.arange(0, length - size + 1, step)[:, None] + np.arange(size))
    else:
        starts = op.steps((length - size) / step + 1, axis=0, rank=2) * step
        index = starts + np.arange(size)[None]
    y = op.Gather(x, index, axis=axis)
    return op.transpose(y, [*range(axis + 1), *range(axis + 2, x.rank + 1), axis + 1])
