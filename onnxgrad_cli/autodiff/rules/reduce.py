"""Rules of reductions and running products.

The cotangent is broadcast along the reduced axes and multiplied by the derivative of the result with respect to each
element. The axes are an attribute before opset 18 (13 for ReduceSum) and an input from then on. They may be absent,
which means all axes or none, and they may be known only at run time. `Reduced` handles these cases, so that each rule
consists only of its formula. Products and cumulative products are differentiated without division, so zeros need no
special case.
"""

from __future__ import annotations

from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import no_gradient, rule

no_gradient("ArgMax ArgMin")


class Reduced:
    """A reduction of `x`, for the formulas of the rules.

    Attributes:
        g: the cotangent of the result, with the reduced axes kept at size one.
        y: the result, with the reduced axes kept at size one.
        axes: the reduced axes as a list, or None for all; not used if `late` is not None.
        late: the axes as a value if they are known only at run time; otherwise None.
    """

    def __init__(self, op, kind, g, y, x, axes_input, axes, keepdims, noop_with_empty_axes):
        self.op, self.kind, self.x = op, kind, x
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

    def again(self, x):
        """Return `x` reduced by the same operator along the same axes, which are kept with size one."""
        return self.op.reduce(self.kind, x, self.axes) if self.late is None else self._again(self.kind, x)

    def sum(self, x):
        """Return the sum of `x` along the reduced axes, which are kept with size one."""
        if self.late is None:
            return self.op.sum(x, self.axes)
        return self.op.cast(self._again("ReduceSum", self.op.wide(x)), x)

    def count(self, dtype):
        """Return the number of elements that are reduced to one result."""
        op = self.op
        if self.late is None:
            return op.count(self.x, self.axes, dtype)
        return op.Cast(op.Size(self.x), to=dtype) / op.Cast(op.Size(self.y), to=dtype)


def reduction(kinds, formula, kink=""):
    """Register `formula(op, reduced)` as the rule of the operators `kinds`. Its result broadcasts to x."""

    def derivative(op, g, y, x, axes_input, *, axes, keepdims, noop_with_empty_axes):
        reduced = Reduced(op, op.node.op_type, g, y, x, axes_input, axes, keepdims, noop_with_empty_axes)
        return op.expand_like(formula(op, reduced), x), None

    derivative.__qualname__ = kinds.split()[0].lower()
    rule(kinds, kink=kink)(derivative)


def _mean(op, r):
    """Divide `g` by the element count in a wide dtype: float16 may overflow, and bfloat16 rounds."""
    wide = op.wide(r.g)
    return op.cast(wide / r.count(wide.dtype), r.x)


def _extreme(op, r):
    chosen = op.cast(op.Equal(*op.comparable(r.y, r.again, r.x)), op.wide(r.g))
    return op.cast(chosen * (op.wide(r.g) / r.sum(chosen)), r.x)


def _norm(op, r):
    """dx = g x / norm. A norm of 0 is replaced by 1 to avoid 0 / 0; all x are 0 then, so dx is 0."""
    return r.x * (r.g / op.Where(op.Equal(r.y, 0), op.const(1.0, r.y), r.y))


reduction("ReduceSum", lambda op, r: r.g)
reduction("ReduceMean", _mean)
reduction("ReduceMax ReduceMin", _extreme, kink="ties share evenly, as in torch.amax and torch.amin")
reduction("ReduceSumSquare", lambda op, r: r.x * (2 * r.g))
reduction("ReduceL1", lambda op, r: op.Sign(r.x) * r.g, kink="0 at x = 0")
reduction("ReduceL2", _norm, kink="0 where the norm is 0")
reduction("ReduceLogSum", lambda op, r: r.g / r.sum(r.x))
reduction("ReduceLogSumExp", lambda op, r: op.Exp(r.x - r.y) * r.g)


def _product(op, r):
    """Reduce one axis after the other, without division, so that derivatives of any order are exact at zeros.

    If the axes are known only at run time, nodes are written for every axis, and a Where skips those that are not
    reduced.
    """
    rank = r.x.rank
    late = [None if r.late is None else _is_reduced(op, r, axis) for axis in range(rank)]
    axes = [axis % rank for axis in (range(rank) if r.axes is None or r.late is not None else r.axes)]
    partial = [r.x]
    for axis in axes[:-1]:
        product = op.prod(partial[-1], [axis])
        partial.append(product if late[axis] is None else op.Where(late[axis], product, partial[-1]))
    g = r.g
    for x, axis in zip(reversed(partial), reversed(axes), strict=False):
        if late[axis] is None and isinstance(x.shape[axis], int):
            g = _through_tree(op, g, x, axis)
        else:
            g = _through_others(op, g, x, axis, late[axis])
    return g


def _is_reduced(op, r, axis):
    """Return a value that is true if `axis` is reduced at run time. An empty list of axes may mean all axes."""
    found = op.Equal(op.Mod(r.late, op.const(r.x.rank)), op.const(axis))
    among = op.ReduceSum(op.Cast(found, to=TensorProto.INT64), keepdims=0) > op.const(0)
    return among if r.noop else op.Or(among, op.Equal(op.Size(r.late), op.const(0)))


def _through_tree(op, g, x, axis):
    """Return the cotangent of a product along an axis of known size, by a tree of products.

    The first half of the axis is multiplied by the second half, again and again, until one element is left. Then, in
    the opposite order, the cotangent of each half is the cotangent of their product times the values of the other half.
    """
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


def _through_others(op, g, x, axis, late):
    """Multiply the cotangent by the product of all other elements along the axis.

    The products are computed along the rows of a square matrix: each row holds all elements, and the diagonal is
    replaced by 1. If `late` is not None, it is a boolean value that is true if the axis is reduced. If it is false,
    all elements of the matrix are replaced by 1, so the cotangent stays the same.
    """
    across, down = (op.steps(op.size(x, axis), i, x.rank + 1) for i in (axis, axis + 1))
    left_out = op.Equal(across, down)
    if late is not None:
        left_out = op.Or(left_out, op.Not(late))
    others = op.Where(left_out, op.const(1.0, x), op.unsqueeze(x, [axis]))
    return g * op.squeeze(op.prod(others, [axis + 1]), [axis + 1])


reduction("ReduceProd", _product)

# -- running products --------------------------------------------------------------------------------------------


@rule("CumProd")
def cumprod(op, g, y, x, axis, *, exclusive, reverse):
    """dX_j = Π_{k before j} x_k · r_j, where r_j = g_j + x_{j+1} r_{j+1} is the contribution of later elements."""
    if axis.const is None:
        flat, seed = (op.reshape(v, around(op, x, axis, x.rank)) for v in (x, g))
        return op.reshape_like(_through_products(op, seed, flat, 1, exclusive, reverse), x), None
    axis = int(axis.const.reshape(-1)[0]) % x.rank
    through = _through_doubling if isinstance(x.shape[axis], int) else _through_products
    return through(op, g, x, axis, exclusive, reverse), None


def _through_doubling(op, g, x, axis, exclusive, reverse):
    """Compute the recurrence of `cumprod` in log2(size) rounds. Each round doubles the number of elements covered.

    Source: W. D. Hillis and G. L. Steele, Data parallel algorithms, CACM 29 (1986).
    """

    def ahead(v, count):
        """Return the elements `count` positions ahead, with zeros beyond the end."""
        begins, ends = ([sign * count if i == axis else 0 for i in range(x.rank)] for sign in (-1, 1))
        return op.Pad(v, op.ints([*ends, *begins] if reverse else [*begins, *ends]), shape=x.shape)

    factor = ahead(x, 1)
    collected = ahead(g, 1) if exclusive else g
    reach = 1
    while reach < x.shape[axis]:
        collected = collected + factor * ahead(collected, reach)
        factor = factor * ahead(factor, reach)
        reach *= 2
    return op.CumProd(x, op.const(axis), exclusive=1, reverse=reverse) * collected


def _through_products(op, g, x, axis, exclusive, reverse):
    """Compute the cotangent of a CumProd by a square matrix: the products of the elements between any two positions."""
    size = op.size(x, axis)
    start, end = (op.steps(size, i, x.rank + 1) for i in (axis, axis + 1))
    later, follows = (end < start, end <= start) if reverse else (end > start, end >= start)
    factors = op.Where(later, op.unsqueeze(x, [axis]), op.const(1.0, x))
    between = op.CumProd(factors, op.const(axis + 1), exclusive=exclusive, reverse=reverse)
    weighted = op.Where(later if exclusive else follows, between * op.unsqueeze(g, [axis]), op.const(0.0, g))
    collected = op.sum(weighted, [axis + 1], keepdims=False)
    return op.CumProd(x, op.const(axis), exclusive=1, reverse=reverse) * collected


def around(op, x, axis, rank):
    """Return the three sizes of `x` with its first `rank` axes merged to axes before, at and after `axis`.

    Args:
        op: the emitter.
        x: the value.
        axis: the axis as a scalar value, which is known only at run time.
        rank: the number of axes to merge.
    """
    shape = op.Slice(op.Shape(x), op.ints([0]), op.ints([rank]))
    axis = op.Mod(op.reshape(op.cast(axis, TensorProto.INT64), [1]), op.const(x.rank))
    every = op.steps(rank)
    sides = (op.Where(chosen, shape, op.const(1)) for chosen in (every < axis, op.Equal(every, axis), every > axis))
    return [op.ReduceProd(side, keepdims=1) for side in sides]
