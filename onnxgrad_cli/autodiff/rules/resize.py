"""The gradient of Resize.

Resize is a linear map along each axis, so its gradient is the transposed map: one matrix product per axis. If runtimes
disagree about the result of a Resize, its gradient is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown

MAX_MATRIX_ELEMENTS = 1 << 24
"""Largest number of elements of an interpolation matrix; a Resize that needs a larger one is refused."""

TIE = 1e-6
"""Positions at most this far from the middle between two elements are ties for onnxruntime's rounding modes.

Before version 1.27, only the exact middle was a tie.
"""

CROP = "tf_crop_and_resize"

OF_TENSORFLOW = "tf_half_pixel_for_nn"
"""The coordinate transformation mode for nearest neighbours in models exported from TensorFlow.

The standard has this mode only at opsets 11 and 12; onnxruntime supports it at all opsets.
"""

COORDINATES = frozenset(
    {"align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", CROP, OF_TENSORFLOW}
)
"""The coordinate transformation modes that `_Axis` has formulas for."""


class ResizeAttributes(NamedTuple):
    """The attributes of a Resize. Those added in opset 18 have defaults."""

    coordinate_transformation_mode: str
    cubic_coeff_a: float
    exclude_outside: int
    extrapolation_value: float
    mode: str
    nearest_mode: str
    antialias: int = 0
    axes: Sequence[int] | None = None
    keep_aspect_ratio_policy: str = "stretch"


@rule("Resize", versions=(13, None))
def resize(op, g, y, x, roi, scales, sizes, **attributes):
    """Apply the transpose of each axis' interpolation matrix. A matrix of unknown size is computed at run time.

    Source: the ONNX Resize operator page; R. Keys, Cubic convolution interpolation, 1981 (cubic).
    """
    how = ResizeAttributes(**attributes)
    if how.coordinate_transformation_mode not in COORDINATES:
        return op.no(f"coordinate_transformation_mode '{how.coordinate_transformation_mode}' is unknown")
    moves = op.no("the sampled positions depend on it, which the rule does not cover", "make it a constant")
    dx = _input_gradient(op, g, y, x, roi, scales, sizes, how) if op.wants(x) else None
    return dx, moves if how.coordinate_transformation_mode == CROP else None, moves, None


def _input_gradient(op, g, y, x, roi, scales, sizes, how):
    if how.exclude_outside and how.mode != "cubic" and not how.antialias:
        return op.no(f"onnxruntime does not run exclude_outside in mode {how.mode}", "use it only in mode cubic")
    if how.keep_aspect_ratio_policy != "stretch" and min(how.axes or [0]) < 0:
        return op.no(
            "onnxruntime does not keep the aspect ratio for negative axes", "write the axes as positive numbers"
        )
    which = [axis % x.rank for axis in how.axes] if how.axes else list(range(x.rank))
    if 0 in y.shape:
        return None
    factors = _factors(op, x, y, scales, sizes, which, how)
    if how.coordinate_transformation_mode in ("align_corners", CROP):
        _refuse_broken_sizes(x, factors)
    if _repeats(factors, x.rank, how):
        return _summed(op, g, x, factors)
    copied = _copied(op, x, y, factors, bool(how.antialias))
    result = g
    for i, axis in enumerate(which):
        size, new, factor = x.shape[axis], y.shape[axis], factors[axis]
        region = _region(op, roi, i, len(which)) if how.coordinate_transformation_mode == CROP else None
        if _is_one(factor) or (factor is None and size == new != "?"):
            _refuse_cut_axis(region, axis)
        elif isinstance(size, int) and isinstance(new, int) and size * new > MAX_MATRIX_ELEMENTS:
            what = f"the interpolation matrix of axis {axis} has {new} x {size} elements"
            return op.no(f"{what}, more than {MAX_MATRIX_ELEMENTS}", "choose smaller sizes")
        else:
            at = _Axis(op, x, y, axis, factor, region)
            result = windows.along(op, result, axis, at.transposed(at.matrix(how, copied.get(axis))))
    return g if result is g else op.state(result, x.known_shape)


def _factors(op, x, y, scales, sizes, which, how):
    """Return axis -> its scale: a float if the scale is known at build time, otherwise a `Val` or None.

    It is None if the node reads the sizes of the result instead of scales, and the axis has an unknown size.
    """
    factors: dict[int, float | Val | None] = dict.fromkeys(range(x.rank), 1.0)
    by_sizes = scales is None or scales.known_shape == (0,)
    if by_sizes and how.keep_aspect_ratio_policy in ("not_larger", "not_smaller"):
        return {**factors, **dict.fromkeys(which, _common_factor(op, x, sizes, which, how))}
    for i, axis in enumerate(which):
        size, new = x.shape[axis], y.shape[axis]
        if not by_sizes and scales.const is None:
            factors[axis] = op.Gather(scales, op.const(i))
        elif not by_sizes:
            factors[axis] = float(scales.const[i])
            if isinstance(size, int) and new != np.floor(np.float32(size) * scales.const[i]):
                raise Unknown(f"runtimes round {size} times the scale {scales.const[i]} differently, here to {new}")
        else:
            factors[axis] = new / size if isinstance(size, int) and isinstance(new, int) else None
    return factors


def _common_factor(op, x, sizes, which, how):
    """Return one scale for all axes, which keeps the aspect ratio: the smallest or largest that `sizes` requires."""
    smallest = how.keep_aspect_ratio_policy == "not_larger"
    now = [x.shape[axis] for axis in which]
    if sizes.const is not None and all(isinstance(size, int) for size in now):
        return float(np.min(sizes.const / now) if smallest else np.max(sizes.const / now))
    kind = TensorProto.DOUBLE if x.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
    asked = op.cast(sizes, kind) / op.cast(op.vector([op.size(x, axis) for axis in which]), kind)
    return op.reduce("ReduceMin" if smallest else "ReduceMax", asked, keepdims=False)


def _is_one(factor):
    return isinstance(factor, float) and factor == 1


def _region(op, roi, i, count):
    """Return start and end of the region cropped from the i-th resized axis, as fractions of the axis."""
    require(roi is not None and roi.known_shape != (0,), f"a Resize in mode {CROP} has no roi")
    if roi.const is not None:
        return float(roi.const[i]), float(roi.const[count + i])
    return op.Gather(roi, op.const(i)), op.Gather(roi, op.const(count + i))


def _refuse_cut_axis(region, axis):
    """Raise Unknown if a region crops an axis of scale 1: onnx.reference crops it, but onnxruntime does not.

    A region that is known only at run time is accepted on the first two axes, because models don't crop batch or
    channels.
    """
    if region is None or region == (0, 1) or (axis < 2 and isinstance(region[0], Val)):
        return
    raise Unknown(f"the scale of axis {axis} is 1, and runtimes disagree whether roi is used then")


def _refuse_broken_sizes(x, factors):
    """Raise Unknown if size * scale is not a whole number for some axis, or may not be one at run time.

    The output size is this product rounded. In the modes that align corners, onnxruntime computes positions from the
    rounded size, but onnx.reference from the product.
    """
    for size, factor in zip(x.shape, factors.values(), strict=True):
        if isinstance(factor, Val):
            what = "a scale that is known only at run time may give a fractional size"
        elif factor is None or factor == int(factor):
            continue
        elif not isinstance(size, int):
            what = f"an unknown size times the scale {factor} may be fractional"
        elif abs(size * factor - round(size * factor)) > 1e-6 * size:
            what = f"{size} times the scale {factor} is fractional"
        else:
            continue
        raise Unknown(f"{what}, and runtimes align such sizes differently")


def _copied(op, x, y, factors, by_axis):
    """Find axes that onnxruntime may copy without interpolation although their scale is not 1.

    onnxruntime copies if the output is as large as the input. For example, scale 1.3 turns a size of 2 into 2. Without
    antialias, it copies only if all axes keep their size. With antialias, it copies each axis that keeps its size.

    Args:
        op: the emitter.
        x, y: the input and the output of the Resize.
        factors: axis -> its scale, from `_factors`.
        by_axis: True with antialias.

    Returns:
        A map from each axis for which the decision falls at run time to an int64 value: 1 if the axis is copied, 0 if
        it is interpolated.

    Raises:
        Unknown: it is known at build time that an axis is copied.
    """
    kept = [_keeps(x.shape[axis], y.shape[axis], factor) for axis, factor in factors.items()]
    same = None
    copied = {}
    for axis, factor in factors.items():
        told = kept[axis : axis + 1] if by_axis else kept
        if factor is None or _is_one(factor) or False in told:
            continue
        require(None in told, "its sizes do not change, so onnxruntime copies its input and ignores the scales")
        if same is None:
            same = op.cast(op.Equal(op.shape(x), op.shape(y)), TensorProto.INT64)
        copied[axis] = op.Gather(same, op.const(axis)) if by_axis else op.reduce("ReduceMin", same, keepdims=False)
    return copied


def _keeps(size, new, factor):
    """Return True if an axis keeps its size, False if the size changes, and None if that is known only at run time."""
    if isinstance(size, int) and isinstance(new, int):
        return size == new
    return None if not isinstance(factor, float) or 0.5 < factor < 2 else False


def _repeats(factors, rank, how):
    """Return True if the resize only repeats elements along spatial axes: mode "nearest" with integer scales."""
    if how.mode != "nearest" or not 3 <= rank <= 5 or not factors[0] == factors[1] == 1:
        return False
    whole = all(isinstance(f, float) and f == int(f) and f >= 1 for f in factors.values())
    if how.coordinate_transformation_mode == "asymmetric":
        return whole and how.nearest_mode == "floor"
    half = how.coordinate_transformation_mode in ("half_pixel", "pytorch_half_pixel")
    return whole and half and how.nearest_mode.startswith("round_prefer")


def _summed(op, g, x, factors):
    """Sum `g` over each block of repeated elements, by an AveragePool times the size of the block, which is fast."""
    block = [int(factors[axis]) for axis in range(2, x.rank)]
    if all(n == 1 for n in block):
        return g
    return op.AveragePool(g, kernel_shape=block, strides=block, shape=x.known_shape) * float(np.prod(block))


_NUMPY = SimpleNamespace(
    Abs=np.abs, Ceil=np.ceil, Clip=np.clip, Equal=np.equal, Floor=np.floor, Max=np.maximum, Min=np.minimum,
    Where=np.where,
)  # fmt: skip
"""numpy functions with the names of ONNX operators. They evaluate the formulas of `_Axis` at build time."""


class _Axis:
    """The interpolation of one axis.

    Its formulas are evaluated at build time if both sizes are known, and at run time otherwise. They use the precision
    in which onnxruntime computes positions: float32, or float64 for float64 inputs.
    """

    def __init__(self, op, x, y, axis, factor, region):
        self.op, self.x = op, x
        self.dtype = TensorProto.DOUBLE if x.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        size, new = x.shape[axis], y.shape[axis]
        self.static = isinstance(size, int) and isinstance(new, int)
        self.static &= not any(isinstance(v, Val) for v in (factor, *(region or ())))
        self.xp = _NUMPY if self.static else op
        self.is_given = factor is not None
        if self.static:
            self.size, self.new, self.factor = self._number(size), self._number(new), self._number(factor)
            self.outputs, self.inputs = self._count(new, 1), self._count(size, 0)
        else:
            lengths = [op.squeeze(op.dim(v, axis), [0]) for v in (x, y)]
            self.size, self.new = (op.cast(length, self.dtype) for length in lengths)
            self.factor = self._number(factor) if self.is_given else self.new / self.size
            self.outputs, self.inputs = self._count(lengths[1], 1), self._count(lengths[0], 0)
        self.region = region and [self._number(share) for share in region]
        self.last = self.size - 1

    def matrix(self, how, copied=None):
        """Return the interpolation matrix: the weight of each input element (column) in each output element (row).

        Args:
            how: the attributes of the Resize.
            copied: an int64 value that is 1 if onnxruntime copies the axis and 0 otherwise, or None if onnxruntime
                certainly does not copy the axis.
        """
        positions = self._positions(how.coordinate_transformation_mode)
        matrix = self._nearest(positions, how.nearest_mode) if how.mode == "nearest" else self._weighted(positions, how)
        if self.region is not None:
            # Outside the input, the output is extrapolation_value.
            matrix = matrix * self._equal(self._inside(positions), positions)
        if copied is None:
            return matrix
        copied, same = self._number(copied), self._equal(self.outputs, self.inputs)
        if self.static:
            same, matrix = (self.op.const(each, self.dtype) for each in (same, matrix))
        return copied * same + (1 - copied) * matrix

    def transposed(self, matrix):
        """Return the transposed matrix, [size, new], as `windows.along` expects it."""
        return matrix.T if isinstance(matrix, np.ndarray) else self.op.cast(self.op.swap_last(matrix), self.x)

    def _positions(self, coordinates):
        """Return the position in the input of each output element."""
        outputs, factor = self.outputs, self.factor
        if coordinates == "asymmetric":
            return outputs / factor
        steps = self.xp.Max(self.new - 1, self._number(1))
        several = self._equal(self.new, steps + 1)
        if coordinates == "align_corners":
            return outputs * self.last / steps
        if coordinates == CROP:
            start, end = self.region
            spread = start * self.last + outputs * (end - start) * self.last / steps
            positions = several * spread + (1 - several) * ((start + end) * 0.5 * self.last)
            if self.is_given:
                return positions
            same = self._equal(self.size, self.new)  # onnxruntime does not crop an axis of scale 1
            return same * outputs + (1 - same) * positions
        if coordinates == OF_TENSORFLOW:
            same = self._equal(factor, self._number(1))  # then onnxruntime copies the elements
            return (outputs + (1 - same) * 0.5) / factor
        if coordinates == "half_pixel_symmetric":  # onnxruntime rounds this sum once, at its end
            offset = self.size / 2 * (1 - self.new / (self.size * factor))
            offset, outputs, factor = (self._cast(v, TensorProto.DOUBLE) for v in (offset, outputs, factor))
            return self._cast(offset + (outputs + 0.5) / factor - 0.5, self.dtype)
        half = (outputs + 0.5) / factor - 0.5
        return half * several if coordinates == "pytorch_half_pixel" else half

    def _nearest(self, positions, how):
        """Return the matrix with a 1 in each row at the nearest input element, and 0 elsewhere."""
        below = self.xp.Floor(positions)
        index = {
            "floor": lambda: below,
            "ceil": lambda: self.xp.Ceil(positions),
            "round_prefer_floor": lambda: below + self._ones(positions - below - 0.5 > TIE),
            "round_prefer_ceil": lambda: below + self._ones(positions - below - 0.5 >= -TIE),
        }[how]()
        return self._equal(self._inside(index), self.inputs)

    def _weighted(self, positions, how):
        """Return the matrix of the weights, which depend on the distance between input element and position.

        Beyond the ends, the outermost elements are repeated; with exclude_outside, these copies have weight 0. With
        antialias, distances are multiplied by scales below 1, which smooths the output.
        """
        shrunk = self.xp.Min(self.factor, self._number(1)) if how.antialias else self._number(1)

        def weights(places):
            distance = self.xp.Abs(positions - places) * shrunk
            cubic = how.mode == "cubic"
            return self._keys(distance, how.cubic_coeff_a) if cubic else self.xp.Max(1 - distance, self._number(0))

        matrix = weights(self.inputs)
        if not how.exclude_outside:
            reach = self.xp.Ceil(self._number(2 if how.mode == "cubic" else 1) / shrunk)
            steps = self._count(int(reach) if self.static else self.op.cast(reach, TensorProto.INT64), 0) + 1
            before, after = self._total(weights(-steps)), self._total(weights(self.last + steps))
            first, last = (self._equal(self.inputs, at) for at in (self._number(0), self.last))
            matrix = matrix + before * first + after * last
        return matrix / self._total(matrix) if how.antialias or how.exclude_outside else matrix

    def _keys(self, d, a):
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return self.xp.Where(d < 1, near, self.xp.Where(d < 2, far, self._number(0)))

    def _inside(self, positions):
        return self.xp.Clip(positions, self._number(0), self.last)

    def _equal(self, a, b):
        return self._ones(self.xp.Equal(a, b))

    def _ones(self, where):
        """Return 1 where the condition is true, and 0 elsewhere."""
        return self._cast(where, self.dtype)

    def _cast(self, value, dtype):
        kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
        return value.astype(kind) if self.static else self.op.cast(value, dtype)

    def _total(self, rows):
        return rows.sum(1, keepdims=True) if self.static else self.op.sum(rows, [1])

    def _number(self, value):
        if isinstance(value, Val):
            return self.op.cast(value, self.dtype)
        kind = onnx.helper.tensor_dtype_to_np_dtype(self.dtype).type
        return kind(value) if self.static else self.op.const(float(value), self.dtype)

    def _count(self, length, axis):
        """Return 0, 1, ..., length - 1, as a row (axis 0) or a column (axis 1)."""
        if self.static:
            kind = onnx.helper.tensor_dtype_to_np_dtype(self.dtype).type
            return np.expand_dims(np.arange(length, dtype=kind), axis)
        counted = self.op.Range(self.op.const(0), length, self.op.const(1))
        return self.op.unsqueeze(self.op.cast(counted, self.dtype), [axis])
