"""`Reductions`: sums, means and other reductions over axes, and `sum_to`, the only place that undoes broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad_cli.emission.shapes import ShapeOps
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.types import HALVES, Dim

EXACT = frozenset({"ReduceMax", "ReduceMin"})
"""Reductions whose result is never rounded, in any type."""


class Reductions(ShapeOps):
    """Reductions over axes. The axes are an input from opset 18 on (ReduceSum: 13), and an attribute before.

    Attributes:
        constant_axes: True if the axes of every sum must be constants, as some runtimes require. If `sum_to` knows only
            at run time which axes to sum, it then uses a Reshape, which takes longer if nothing has to be summed.
    """

    constant_axes = False

    def sum(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """Return the sum over `axes` (None: all)."""
        return self.reduce("ReduceSum", x, axes, keepdims)

    def mean(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """Return the mean over `axes` (None: all)."""
        return self.reduce("ReduceMean", x, axes, keepdims)

    def max(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """Return the maximum over `axes` (None: all)."""
        return self.reduce("ReduceMax", x, axes, keepdims)

    def prod(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """Return the product over `axes` (None: all)."""
        return self.reduce("ReduceProd", x, axes, keepdims)

    def reduce(self, kind: str, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """Reduce `x` over `axes` (None: all) by the operator `kind`. Sums of 16-bit floats are computed in float32."""
        if axes is not None and not list(axes):
            return x
        if x.dtype in HALVES and kind not in EXACT:
            return self.cast(self.reduce(kind, self.wide(x), axes, keepdims), x)
        axes = None if axes is None else [axis % x.rank for axis in axes]
        shape = _reduced_shape(x, axes, keepdims)
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.emit(kind, x, None if axes is None else self.ints(axes), keepdims=int(keepdims), shape=shape)
        return self.emit(kind, x, axes=axes, keepdims=int(keepdims), shape=shape)

    def sum_to(self, g: Val, x: Val) -> Val:
        """Sum `g`, the cotangent of a result to which `x` was broadcast, to the shape of `x`.

        An axis with equal sizes or symbols stays. An axis on which `x` has size 1 is summed. If symbols differ or a
        rank is unknown, the decision is made at run time, and a caution says so.
        """
        if self.same_shape(g, x):
            return g
        if g.known_shape is None or x.known_shape is None:
            return self._sum_to_at_run_time(g, x, "an unknown rank")
        lead = g.rank - x.rank
        axes, unsure = list(range(lead)), []
        for axis, (have, want) in enumerate(zip(g.shape[lead:], x.shape, strict=True), lead):
            if have == want and have != "?":
                continue
            if want == 1:
                axes.append(axis)
            elif isinstance(want, str) and have != 1:
                unsure.append(axis)
        if unsure:
            clash = f"'{g.shape[unsure[0]]}' against '{x.shape[unsure[0] - lead]}' on axis {unsure[0] - lead}"
            if self.constant_axes:
                return self._sum_cut_axes(g, x, axes, unsure, clash)
            return self._sum_to_at_run_time(g, x, clash)
        if not axes:
            return g
        if len(axes) == lead:
            return self.sum(g, axes, keepdims=False)
        return self.squeeze(self.sum(g, axes), list(range(lead)))

    def _sum_cut_axes(self, g: Val, x: Val, axes: Sequence[int], unsure: Sequence[int], why: str) -> Val:
        """Return `g` summed over `axes`, and over each axis of `unsure` on which `x` has size 1 at run time.

        The axes of the sum are constant. If an axis of `unsure` has size n in `g` and size m in `x`, it is reshaped to
        two axes of sizes m and n / m, and the second one is summed. If m is 1, this sums all n elements. If m is n, it
        sums nothing.
        """
        self._warn_of_run_time(x, why)
        lead = g.rank - x.rank
        sizes: list[int | Val] = []
        gone = []
        for axis in range(g.rank):
            if axis in unsure:
                wanted = self.dim(x, axis - lead)
                sizes += [wanted, self.dim(g, axis) / self.Max(wanted, self.ints([1]))]
            else:
                sizes.append(self.size(g, axis))
            if axis in unsure or axis in axes:
                gone.append(len(sizes) - 1)
        summed = self.sum(self.reshape(g, sizes), gone, keepdims=False)
        return self.Reshape(summed, self.shape(x), allowzero=self._literal_zeros(), shape=x.known_shape)

    def _sum_to_at_run_time(self, g: Val, x: Val, why: str) -> Val:
        self._warn_of_run_time(x, why)
        wanted = self.shape(x)
        single = self.Equal(self._led_by_ones(g, x, wanted), self.ints([1]))
        axes = self.Reshape(self.NonZero(single), self.ints([-1]))
        shape = None if g.known_shape is None else [None] * g.rank
        summed = self.ReduceSum(self.wide(g), axes, keepdims=1, noop_with_empty_axes=1, shape=shape)
        return self.Reshape(self.cast(summed, g), wanted, allowzero=self._literal_zeros(), shape=x.known_shape)

    def _led_by_ones(self, g: Val, x: Val, wanted: Val) -> Val:
        """Return the shape of `x`, which is the value `wanted`, with ones in front, so that it has the rank of `g`."""
        if None not in (g.known_shape, x.known_shape):
            lead = g.rank - x.rank
            return self.Concat(self.ints([1] * lead), wanted, axis=0) if lead else wanted
        missing = self.Sub(self.Size(self.Shape(g)), self.Size(wanted))
        ones = self.Expand(self.ints([1]), self.Reshape(missing, self.ints([1])))
        return self.Concat(ones, wanted, axis=0)

    def _warn_of_run_time(self, x: Val, why: str) -> None:
        node = self.forward or self.scope
        text = f"{node}: un-broadcast of '{x.name}' decided at run time ({why})"
        self.cautions.append(Caution("run-time sum", node, text))


def _reduced_shape(x: Val, axes: Sequence[int] | None, keepdims: bool) -> list[Dim] | None:
    """Return the shape of `x` reduced over non-negative `axes` (None: all), or None if the rank is unknown."""
    if x.known_shape is None:
        return None
    gone = range(x.rank) if axes is None else axes
    if keepdims:
        return [1 if axis in gone else size for axis, size in enumerate(x.shape)]
    return [size for axis, size in enumerate(x.shape) if axis not in gone]
