"""Reductions: the cotangent goes back along the reduced axes, weighted by each element's share in the result.

The axes are an attribute before opset 18 (13 for ReduceSum) and an input after it, may be absent (all, or none),
and may be known only at run time; `Reduced` hides the difference, so that each rule is its formula.
"""

from __future__ import annotations

from onnx import TensorProto

from onnxgrad_cli.emit import Unknown
from onnxgrad_cli.registry import no_gradient, rule

no_gradient("ArgMax ArgMin")


class Reduced:
    """One reduction of `x`: `g` and `y`, its cotangent and value, with the reduced axes kept at size one.

    `axes` is a list, or None for all of them; where they are known only at run time, `late` is their value.
    """

    def __init__(self, op, kind, g, y, x, axes_input, axes, keepdims, noop_with_empty_axes):
        self.op, self.x = op, x
        self.late = axes_input if axes_input is not None and axes_input.const is None else None
        self.noop = noop_with_empty_axes or 0
        if axes_input is not None and self.late is None:
            axes = axes_input.const.reshape(-1).tolist()
        self.axes = axes or ([] if self.noop else None)
        if not keepdims and self.late is not None:
            y = self._again(kind, x)
            g = op.reshape_like(g, y)
        elif not keepdims:
            dropped = [axis % x.rank for axis in (range(x.rank) if self.axes is None else self.axes)]
            g, y = op.unsqueeze(g, dropped), op.unsqueeze(y, dropped)
        self.g, self.y = g, y

    def _again(self, kind, x):
        return self.op.emit(kind, x, self.late, keepdims=1, noop_with_empty_axes=self.noop)

    def sum(self, x):
        """The sum of `x` along the same axes, which are kept."""
        return self.op.sum(x, self.axes) if self.late is None else self._again("ReduceSum", x)

    def count(self, dtype):
        """How many elements go into one result."""
        op = self.op
        if self.late is None:
            return op.count(self.x, self.axes, dtype)
        return op.Cast(op.Size(self.x), to=dtype) / op.Cast(op.Size(self.y), to=dtype)


def reduction(kinds, kink=""):
    """Register a formula (op, reduced) -> cotangent, of a shape that broadcasts to x, as the rule of `kinds`."""

    def register(formula):
        for kind in kinds.split():
            rule(kind, kink=kink)(_derivative(kind, formula))
        return formula

    return register


def _derivative(kind, formula):
    def derivative(op, g, y, x, axes_input, *, axes, keepdims, noop_with_empty_axes):
        reduced = Reduced(op, kind, g, y, x, axes_input, axes, keepdims, noop_with_empty_axes)
        return op.expand_like(formula(op, reduced), x), None

    derivative.__qualname__ = formula.__qualname__
    return derivative


@reduction("ReduceSum")
def reduce_sum(op, r):
    return r.g


@reduction("ReduceMean")
def reduce_mean(op, r):
    """The count overflows in float16 and is inexact in bfloat16, so both divide in float32."""
    if r.x.dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return op.cast(op.cast(r.g, TensorProto.FLOAT) / r.count(TensorProto.FLOAT), r.x)
    return r.g / r.count(r.x.dtype)


@reduction("ReduceMax ReduceMin", kink="ties share evenly, as in torch.amax and torch.amin")
def reduce_extreme(op, r):
    chosen = op.cast(op.Equal(r.x, r.y), r.x)
    return chosen * (r.g / r.sum(chosen))


@reduction("ReduceSumSquare")
def reduce_sum_square(op, r):
    return r.x * (2 * r.g)


@reduction("ReduceL1", kink="0 at x = 0")
def reduce_l1(op, r):
    return op.Sign(r.x) * r.g


@reduction("ReduceL2", kink="0 where the norm is 0")
def reduce_l2(op, r):
    """Where the norm is 0, so is every x."""
    return r.x * (r.g / op.Where(op.Equal(r.y, 0), op.const(1.0, r.y), r.y))


@reduction("ReduceLogSum")
def reduce_log_sum(op, r):
    return r.g / r.sum(r.x)


@reduction("ReduceLogSumExp")
def reduce_log_sum_exp(op, r):
    return op.Exp(r.x - r.y) * r.g


@reduction("ReduceProd")
def reduce_prod(op, r):
    """Without division, so that it is exact at zeros, to any order; one axis after the other."""
    if r.late is not None:
        raise Unknown("the axes of a product are known only at run time")
    axes = [axis % r.x.rank for axis in (range(r.x.rank) if r.axes is None else r.axes)]
    partial = [r.x]
    for axis in axes[:-1]:
        partial.append(op.prod(partial[-1], [axis]))
    g = r.g
    for x, axis in zip(reversed(partial), reversed(axes), strict=False):
        through = _through_tree if isinstance(x.shape[axis], int) else _through_others
        g = through(op, g, x, axis)
    return g


def _through_tree(op, g, x, axis):
    """Halves are multiplied pair by pair up to one; on the way down each takes the other's product."""
    pairs = []
    while (size := x.shape[axis]) > 1:
        half = size // 2
        a, b, *odd = op.split(x, [half, half, size % 2][: 2 + size % 2], axis)
        pairs.append((a, b))
        x = op.Concat(a * b, *odd, axis=axis) if odd else a * b
    for a, b in reversed(pairs):
        half = a.shape[axis]
        odd = []
        if g.shape[axis] > half:
            g, *odd = op.split(g, [half, 1], axis)
        g = op.Concat(g * b, g * a, *odd, axis=axis)
    return g


def _through_others(op, g, x, axis):
    """Each element's factor is the product of the others, laid out as a square whose diagonal is one."""
    size = op.squeeze(op.dim(x, axis), [0])
    row = op.Range(op.const(0), size, op.const(1))
    after = range(2, x.rank - axis + 1)
    diagonal = op.Equal(op.unsqueeze(row, [1, *after]), op.unsqueeze(row, [0, *after]))
    others = op.Where(diagonal, op.const(1.0, x), op.unsqueeze(x, [axis]))
    return g * op.squeeze(op.prod(others, [axis + 1]), [axis + 1])
