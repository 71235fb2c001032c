"""Resize is a linear map of each axis by itself: its gradient is the transposed map, one matrix product an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import windows
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

LARGEST = 1 << 24
"""Entries of an interpolation matrix beyond which a Resize is refused."""

TIE = 1e-6
"""How near to the middle between two elements onnxruntime sees a tie; before 1.27 it saw only exact ones."""

CROP = "tf_crop_and_resize"

OF_TENSORFLOW = "tf_half_pixel_for_nn"
"""How TensorFlow's nearest neighbours are exported; the standard has it at opsets 11 and 12, onnxruntime at all."""

COORDINATES = frozenset(
    {"align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", CROP, OF_TENSORFLOW}
)
"""The coordinate transformation modes that `_Axis` has formulas for."""


class Setting(NamedTuple):
    """The attributes of a Resize; those that came with opset 18 have their defaults."""

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
    """Apply the transpose of each axis' interpolation matrix; a matrix of unknown size is made at run time.

    Source: the ONNX Resize operator page; R. Keys, Cubic convolution interpolation, 1981 (cubic).
    """
    how = Setting(**attributes)
    if how.coordinate_transformation_mode not in COORDINATES:
        return op.no(f"coordinate_transformation_mode '{how.coordinate_transformation_mode}' is unknown")
    moves = op.no("where it samples depends on it, which is not covered by the rule", "make it a constant")
    dx = _input_gradient(op, g, y, x, roi, scales, sizes, how) if op.wants(x) else None
    return dx, moves if how.coordinate_transformation_mode == CROP else None, moves, None


def _input_gradient(op, g, y, x, roi, scales, sizes, how):
    if how.exclude_outside and how.mode != "cubic" and not how.antialias:
        return op.no(f"exclude_outside in mode {how.mode}, which onnxruntime does not run", "use it with mode cubic")
    if how.keep_aspect_ratio_policy != "stretch" and min(how.axes or [0]) < 0:
        return op.no("negative axes, for which onnxruntime does not keep the aspect ratio", "count them from the front")
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
        if isinstance(size, int) and isinstance(new, int) and size * new > LARGEST:
            return op.no(f"axis {axis} is too long for a matrix ({new} x {size})", "resize in steps")
        region = _region(op, roi, i, len(which)) if how.coordinate_transformation_mode == CROP else None
        if _is_one(factor) or (factor is None and size == new != "?"):
            _refuse_cut_axis(region, axis)
        else:
            at = _Axis(op, x, y, axis, factor, region)
            result = windows.along(op, result, axis, at.transposed(at.matrix(how, copied.get(axis))))
    return g if result is g else op.state(result, x.known_shape)


def _factors(op, x, y, scales, sizes, which, how):
    """The scale of each axis: a number; a value, or where new sizes are given None, if it is known at run time only."""
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
                raise Unknown(f"{size} times the scale {scales.const[i]} is rounded to {new}, elsewhere otherwise")
        else:
            factors[axis] = new / size if isinstance(size, int) and isinstance(new, int) else None
    return factors


def _common_factor(op, x, sizes, which, how):
    """The one scale that keeps the aspect ratio: the smallest or the largest of those that the sizes ask for."""
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
    """Where the part of the i-th resized axis that is cut out starts and ends, in shares of the axis."""
    if roi is None or roi.known_shape == (0,):
        raise Unknown(f"a Resize in mode {CROP} has no roi")
    if roi.const is not None:
        return float(roi.const[i]), float(roi.const[count + i])
    return op.Gather(roi, op.const(i)), op.Gather(roi, op.const(count + i))


def _refuse_cut_axis(region, axis):
    """onnxruntime reads no region where the scale is 1; onnx.reference does. Nobody cuts out a part of the batch."""
    if region is None or region == (0, 1) or (axis < 2 and isinstance(region[0], Val)):
        return
    raise Unknown(f"the scale of axis {axis} is 1, where runtimes disagree whether roi is read")


def _refuse_broken_sizes(x, factors):
    """Between corners, onnxruntime counts the elements that there are, onnx.reference the unrounded product."""
    for size, factor in zip(x.shape, factors.values(), strict=True):
        if isinstance(factor, Val):
            raise Unknown("a scale known at run time only may give a broken size, which runtimes align otherwise")
        if factor is not None and factor != int(factor):
            if not isinstance(size, int):
                raise Unknown(f"an unknown size times the scale {factor} may be broken, which runtimes align otherwise")
            if abs(size * factor - round(size * factor)) > 1e-6 * size:
                raise Unknown(f"{size} times the scale {factor} is broken, which runtimes align in different ways")


def _copied(op, x, y, factors, by_axis):
    """Whether onnxruntime copies an axis though its scale is not 1: axis -> int64, where a run alone can tell.

    It does where the result is as large, for of a size of 2 the scale 1.3 makes 2 again: of the whole input where all
    of its axes are, and with antialias of each by itself.
    """
    kept = [_keeps(x.shape[axis], y.shape[axis], factor) for axis, factor in factors.items()]
    same = None
    copied = {}
    for axis, factor in factors.items():
        told = kept[axis : axis + 1] if by_axis else kept
        if factor is None or _is_one(factor) or False in told:
            continue
        if None not in told:
            raise Unknown("its result is as large as its input, which onnxruntime copies then, whatever the scales say")
        if same is None:
            same = op.cast(op.Equal(op.shape(x), op.shape(y)), TensorProto.INT64)
        copied[axis] = op.Gather(same, op.const(axis)) if by_axis else op.reduce("ReduceMin", same, keepdims=False)
    return copied


def _keeps(size, new, factor):
    """Whether an axis is as long as before; None where that is known at run time only."""
    if isinstance(size, int) and isinstance(new, int):
        return size == new
    return None if not isinstance(factor, float) or 0.5 < factor < 2 else False


def _repeats(factors, rank, how):
    """Whether every element is repeated a whole number of times: nearest, by integers, on spatial axes."""
    coordinates, nearest = how.coordinate_transformation_mode, how.nearest_mode
    return (
        how.mode == "nearest"
        and 3 <= rank <= 5
        and all(isinstance(f, float) and f == int(f) and f >= 1 for f in factors.values())
        and factors[0] == factors[1] == 1
        and (
            (coordinates == "asymmetric" and nearest == "floor")
            or (coordinates in ("half_pixel", "pytorch_half_pixel") and nearest.startswith("round_prefer"))
        )
    )


def _summed(op, g, x, factors):
    """The sum over each block of repeats: an average times how many they are, which has a fast kernel."""
    block = [int(factors[axis]) for axis in range(2, x.rank)]
    if all(n == 1 for n in block):
        return g
    return op.AveragePool(g, kernel_shape=block, strides=block, shape=x.known_shape) * float(np.prod(block))


class _Numpy:
    """The operators that the formulas below use, evaluated now; `Op` writes them into the graph."""

    Abs, Ceil, Clip, Equal, Floor, Max, Min, Where = (
        np.abs,
        np.ceil,
        np.clip,
        np.equal,
        np.floor,
        np.maximum,
        np.minimum,
        np.where,
    )


class _Axis:
    """The interpolation of one axis. Its formulas are evaluated now where both sizes are known, else at run time,
    in the precision that onnxruntime computes positions in: single, and double for doubles.
    """

    def __init__(self, op, x, y, axis, factor, region):
        self.op, self.x = op, x
        self.dtype = TensorProto.DOUBLE if x.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        size, new = x.shape[axis], y.shape[axis]
        self.static = isinstance(size, int) and isinstance(new, int)
        self.static &= not any(isinstance(v, Val) for v in (factor, *(region or ())))
        self.xp = _Numpy if self.static else op
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
        """What each output, a row, takes of each input, a column.

        Args:
            copied: int64, 1 where onnxruntime copies the axis and else 0, if that is known at run time only.
        """
        positions = self._positions(how.coordinate_transformation_mode)
        matrix = self._nearest(positions, how.nearest_mode) if how.mode == "nearest" else self._weighted(positions, how)
        if self.region is not None:
            matrix = matrix * self._equal(self._inside(positions), positions)  # else it is extrapolation_value
        if copied is None:
            return matrix
        copied, same = self._number(copied), self._equal(self.outputs, self.inputs)
        if self.static:
            same, matrix = (self.op.const(each, self.dtype) for each in (same, matrix))
        return copied * same + (1 - copied) * matrix

    def transposed(self, matrix):
        """[size, new], as `windows.along` takes it."""
        return matrix.T if isinstance(matrix, np.ndarray) else self.op.cast(self.op.swap_last(matrix), self.x)

    def _positions(self, coordinates):
        """Where in the input each output lies."""
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
            same = self._equal(self.size, self.new)  # as in `_refuse_cut_axis`, but known at run time only
            return same * outputs + (1 - same) * positions
        if coordinates == OF_TENSORFLOW:
            same = self._equal(factor, self._number(1))  # then onnxruntime takes the elements as they are
            return (outputs + (1 - same) * 0.5) / factor
        if coordinates == "half_pixel_symmetric":  # onnxruntime rounds this sum once, at its end
            offset = self.size / 2 * (1 - self.new / (self.size * factor))
            offset, outputs, factor = (self._cast(v, TensorProto.DOUBLE) for v in (offset, outputs, factor))
            return self._cast(offset + (outputs + 0.5) / factor - 0.5, self.dtype)
        half = (outputs + 0.5) / factor - 0.5
        return half * several if coordinates == "pytorch_half_pixel" else half

    def _nearest(self, positions, how):
        """One 1 in each row, at the nearest element."""
        below = self.xp.Floor(positions)
        index = {
            "floor": lambda: below,
            "ceil": lambda: self.xp.Ceil(positions),
            "round_prefer_floor": lambda: below + self._ones(positions - below - 0.5 > TIE),
            "round_prefer_ceil": lambda: below + self._ones(positions - below - 0.5 >= -TIE),
        }[how]()
        return self._equal(self._inside(index), self.inputs)

    def _weighted(self, positions, how):
        """The elements around each position, weighted by their distance; outside lie copies of the outermost ones,
        or nothing. To smooth where the output is smaller, distances shrink as it does.
        """
        shrunk = self.xp.Min(self.factor, self._number(1)) if how.antialias else self._number(1)

        def weights(places):
            distance = self.xp.Abs(positions - places) * shrunk
            return self._keys(distance, how.cubic_coeff_a) if how.mode == "cubic" else self._tent(distance)

        matrix = weights(self.inputs)
        if not how.exclude_outside:
            reach = self.xp.Ceil(self._number(2 if how.mode == "cubic" else 1) / shrunk)
            steps = self._count(int(reach) if self.static else self.op.cast(reach, TensorProto.INT64), 0) + 1
            before, after = self._total(weights(-steps)), self._total(weights(self.last + steps))
            first, last = (self._equal(self.inputs, at) for at in (self._number(0), self.last))
            matrix = matrix + before * first + after * last
        return matrix / self._total(matrix) if how.antialias or how.exclude_outside else matrix

    def _tent(self, d):
        return self.xp.Max(1 - d, self._number(0))

    def _keys(self, d, a):
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return self.xp.Where(d < 1, near, self.xp.Where(d < 2, far, self._number(0)))

    def _inside(self, positions):
        return self.xp.Clip(positions, self._number(0), self.last)

    def _equal(self, a, b):
        return self._ones(self.xp.Equal(a, b))

    def _ones(self, where):
        """1 where it is true, else 0."""
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
        """0, 1, ... along a row (0) or a column (1)."""
        if self.static:
            kind = onnx.helper.tensor_dtype_to_np_dtype(self.dtype).type
            return np.expand_dims(np.arange(length, dtype=kind), axis)
        counted = self.op.Range(self.op.const(0), length, self.op.const(1))
        return self.op.unsqueeze(self.op.cast(counted, self.dtype), [axis])
