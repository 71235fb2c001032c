"""Resize is a linear map of each axis by itself: its gradient is the transposed map, one matrix product an axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onnxgrad_cli.emit import Unknown
from onnxgrad_cli.registry import rule
from onnxgrad_cli.rules import windows

_COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")

LARGEST = 1 << 24
"""Entries of an interpolation matrix beyond which a Resize is refused."""


@rule("Resize", versions=(13, None))
def resize(
    op, g, y, x, roi, scales, sizes, *, antialias, axes, coordinate_transformation_mode, cubic_coeff_a,
    exclude_outside, extrapolation_value, keep_aspect_ratio_policy, mode, nearest_mode,
):  # fmt: skip
    """Apply the transpose of each axis' interpolation matrix; a matrix of unknown size is made at run time.

    Source: the ONNX Resize operator page; R. Keys, Cubic convolution interpolation, 1981 (cubic).
    """
    moves = op.no("where it samples depends on it, which is not covered by the rule", "make it a constant")
    dx = None
    if op.wants(x):
        dx = _input_gradient(
            op, g, y, x, scales, antialias, axes, coordinate_transformation_mode, cubic_coeff_a, exclude_outside,
            keep_aspect_ratio_policy, mode, nearest_mode,
        )  # fmt: skip
    return dx, moves if coordinate_transformation_mode == "tf_crop_and_resize" else None, moves, None


def _input_gradient(
    op, g, y, x, scales, antialias, axes, coordinate_transformation_mode, cubic_coeff_a, exclude_outside,
    keep_aspect_ratio_policy, mode, nearest_mode,
):  # fmt: skip
    for refused, what in (
        (coordinate_transformation_mode not in _COORDINATES, coordinate_transformation_mode),
        (antialias, "antialias"),
        (
            keep_aspect_ratio_policy not in (None, "stretch"),
            f"keep_aspect_ratio_policy={keep_aspect_ratio_policy}",
        ),
        (exclude_outside and mode != "cubic", f"exclude_outside in mode {mode}"),
    ):
        if refused:
            return op.no(f"{what} is not covered by the rule", "resize with another setting")
    which = [axis % x.rank for axis in axes] if axes else list(range(x.rank))
    factors = _factors(x, y, scales, which)
    if coordinate_transformation_mode == "align_corners":
        _refuse_broken_sizes(x, factors)
    if _repeats(factors, x.rank, mode, coordinate_transformation_mode, nearest_mode):
        return _summed(op, g, x, factors)
    result = g
    for axis in which:
        size, new = x.shape[axis], y.shape[axis]
        if isinstance(size, int) and isinstance(new, int) and size * new > LARGEST:
            return op.no(f"axis {axis} is too long for a matrix ({new} x {size})", "resize in steps")
        if factors[axis] != 1 and not (factors[axis] is None and size == new != "?"):
            at = _Axis(op, x, y, axis, factors[axis])
            positions = at.positions(coordinate_transformation_mode)
            if mode == "nearest":
                matrix = at.nearest(positions, nearest_mode)
            elif mode == "linear":
                matrix = at.linear(positions)
            else:
                matrix = at.cubic(positions, cubic_coeff_a, exclude_outside)
            result = windows.along(op, result, axis, at.transposed(matrix))
    return g if result is g else op.state(result, x.known_shape)


def _factors(x, y, scales, which):
    """The scale of each axis; None where it follows from sizes that are known at run time only."""
    factors: dict[int, float | None] = dict.fromkeys(range(x.rank), 1.0)
    given = None if scales is None or scales.known_shape == (0,) else scales.const
    if given is None and not (scales is None or scales.known_shape == (0,)):
        raise Unknown(f"the scales '{scales.name}' of Resize are not constant")
    for i, axis in enumerate(which):
        size, new = x.shape[axis], y.shape[axis]
        if given is not None:
            factors[axis] = float(given[i])
            if isinstance(size, int) and new != np.floor(np.float32(size) * given[i]):
                raise Unknown(f"{size} times the scale {given[i]} is rounded to {new}, elsewhere otherwise")
        elif isinstance(size, int) and isinstance(new, int):
            factors[axis] = new / size
        else:
            factors[axis] = None
    return factors


def _refuse_broken_sizes(x, factors):
    """Between corners, onnxruntime counts the elements that there are, onnx.reference the unrounded product."""
    for size, factor in zip(x.shape, factors.values(), strict=True):
        if factor is not None and factor != int(factor):
            if not isinstance(size, int):
                raise Unknown(f"an unknown size times the scale {factor} may be broken, which runtimes align otherwise")
            if abs(size * factor - round(size * factor)) > 1e-6 * size:
                raise Unknown(f"{size} times the scale {factor} is broken, which runtimes align in different ways")


def _repeats(factors, rank, mode, coordinates, nearest_mode):
    """Whether every element is repeated a whole number of times: nearest, by integers, on spatial axes."""
    return (
        mode == "nearest"
        and 3 <= rank <= 5
        and all(f is not None and f == int(f) and f >= 1 for f in factors.values())
        and factors[0] == factors[1] == 1
        and (
            (coordinates == "asymmetric" and nearest_mode == "floor")
            or (coordinates in ("half_pixel", "pytorch_half_pixel") and nearest_mode.startswith("round_prefer"))
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

    Abs, Ceil, Floor, Clip, Max, Relu = (
        np.abs,
        np.ceil,
        np.floor,
        np.clip,
        np.maximum,
        lambda v: np.maximum(v, 0),
    )


class _Axis:
    """The interpolation of one axis. Its formulas are evaluated now where both sizes are known, else at run time,
    in the precision that onnxruntime computes positions in: single, and double for doubles.
    """

    def __init__(self, op, x, y, axis, factor):
        self.op, self.x = op, x
        self.dtype = TensorProto.DOUBLE if x.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        size, new = x.shape[axis], y.shape[axis]
        self.static = isinstance(size, int) and isinstance(new, int)
        if self.static:
            kind = onnx.helper.tensor_dtype_to_np_dtype(self.dtype).type
            self.xp = _Numpy
            self.size, self.new, self.factor = kind(size), kind(new), kind(factor)
            self.outputs, self.inputs = (
                np.arange(new, dtype=kind)[:, None],
                np.arange(size, dtype=kind)[None, :],
            )
        else:
            self.xp = op
            lengths = [op.squeeze(op.dim(v, axis), [0]) for v in (x, y)]
            self.size, self.new = (op.cast(length, self.dtype) for length in lengths)
            self.factor = self.new / self.size if factor is None else factor
            inputs, outputs = (op.cast(op.Range(op.const(0), n, op.const(1)), self.dtype) for n in lengths)
            self.outputs, self.inputs = op.unsqueeze(outputs, [1]), op.unsqueeze(inputs, [0])

    def positions(self, coordinates):
        """Where in the input each output lies."""
        outputs, factor = self.outputs, self.factor
        if coordinates == "asymmetric":
            return outputs / factor
        if coordinates == "align_corners":
            return outputs * (self.size - 1) / self.xp.Max(self.new - 1, self._one())
        half = (outputs + 0.5) / factor - 0.5
        if coordinates == "half_pixel_symmetric":
            return self.size / 2 * (1 - self.new / (self.size * factor)) + half
        if coordinates == "pytorch_half_pixel":
            return half * self._equal(self.xp.Max(self.new, self._one() * 2), self.new)
        return half

    def nearest(self, positions, how):
        """One 1 in each row, at the nearest element."""
        xp = self.xp
        index = {
            "floor": lambda: xp.Floor(positions),
            "ceil": lambda: xp.Ceil(positions),
            "round_prefer_floor": lambda: xp.Ceil(positions - 0.5),
            "round_prefer_ceil": lambda: xp.Floor(positions + 0.5),
        }[how]()
        return self._equal(self._inside(index), self.inputs)

    def linear(self, positions):
        """A tent around each position."""
        return self.xp.Relu(1 - self.xp.Abs(self._inside(positions) - self.inputs))

    def cubic(self, positions, a, exclude_outside):
        """Keys' kernel on the four elements around each position, those outside at the border or left out."""
        first = self.xp.Floor(positions)
        t = positions - first
        total: Any = 0.0
        for step in (-1, 0, 1, 2):
            d = t - step if step < 1 else step - t
            if step in (0, 1):
                weight = ((a + 2) * d - (a + 3)) * d * d + 1
            else:
                weight = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            at = first + step
            part = weight * self._equal(at if exclude_outside else self._inside(at), self.inputs)
            total = part + total
        if exclude_outside:
            total = total / (total.sum(1, keepdims=True) if self.static else self.op.sum(total, [1]))
        return total

    def transposed(self, matrix):
        """[size, new], as `windows.along` takes it."""
        return matrix.T if self.static else self.op.cast(self.op.swap_last(matrix), self.x)

    def _inside(self, positions):
        return self.xp.Clip(positions, self._one() * 0, self.size - 1)

    def _equal(self, a, b):
        return (a == b).astype(self.size.dtype) if self.static else self.op.cast(self.op.Equal(a, b), self.dtype)

    def _one(self):
        return type(self.size)(1) if self.static else self.op.const(1.0, self.dtype)
