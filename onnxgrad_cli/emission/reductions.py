"""`Reductions`: sums and the like over axes, and `sum_to`, the only place that knows about broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad_cli.emission.shapes import ShapeOps
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.types import HALVES, Dim

EXACT = frozenset({"ReduceMax", "ReduceMin"})
"""Reductions that round nothing."""


class Reductions(ShapeOps):
    """Reductions over axes: an attribute of the operators, and from opset 18 (ReduceSum: 13) an input.

    Attributes:
        constant_axes: write sums that depend on sizes at run time with constant axes, as some runtimes want them; it
            takes longer where nothing is to be summed.
    """

    constant_axes = False

    def sum(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The sum over `axes` (None: all)."""
        return self.reduce("ReduceSum", x, axes, keepdims)

    def mean(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The mean over `axes` (None: all)."""
        return self.reduce("ReduceMean", x, axes, keepdims)

    def max(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The maximum over `axes` (None: all)."""
        return self.reduce("ReduceMax", x, axes, keepdims)

    def prod(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The product over `axes` (None: all)."""
        return self.reduce("ReduceProd", x, axes, keepdims)

    def reduce(self, kind: str, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The reduction `kind`, an operator's name, over `axes` (None: all); half types are added up in float32."""
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
        """`g`, which has a shape that `x` broadcasts to, summed down to the shape of `x`.

        On an axis of equal sizes or symbols nothing is summed; where `x` has size 1, its axis is summed; where the
        symbols differ, or a rank is unknown, that is decided at run time, and a caution says so.
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
            return (
                self._sum_cut_axes(g, x, axes, unsure, clash)
                if self.constant_axes
                else (self._sum_to_at_run_time(g, x, clash))
            )
        if not axes:
            return g
        if len(axes) == lead:
            return self.sum(g, axes, keepdims=False)
        return self.squeeze(self.sum(g, axes), list(range(lead)))

    def _sum_cut_axes(self, g: Val, x: Val, axes: Sequence[int], unsure: Sequence[int], why: str) -> Val:
        """`g` summed over `axes`, and over each of `unsure` where `x` has size 1 there.

        An axis of n that `x` has m of is cut into [m, n / m], and the latter summed: n ones, or one n.
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
        """The shape of `x`, with ones before it for the axes that `g` has more."""
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
    """The shape of `x` reduced over `axes` (None: all), which are not negative; None where the rank is unknown."""
    if x.known_shape is None:
        return None
    gone = range(x.rank) if axes is None else axes
    if keepdims:
        return [1 if axis in gone else size for axis, size in enumerate(x.shape)]
    return [size for axis, size in enumerate(x.shape) if axis not in gone]
