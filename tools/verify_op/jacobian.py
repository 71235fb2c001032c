"""Measure the Jacobian of a function by central differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.ir.types import Arrays


@dataclass(frozen=True)
class Jacobian:
    """A transposed Jacobian: row i has the derivatives of all outputs with respect to input element i.

    Attributes:
        entries: the derivatives, float64 [inputs, outputs]; 0 in the rows of kinks.
        kinks: bool [inputs], True if the function has no derivative with respect to this element: it has a kink or a
            step there, or the shape of its output changes.
    """

    entries: np.ndarray
    kinks: np.ndarray


def jacobian(
    function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 2.0**-20, bent: float = 1e-2
) -> Jacobian:
    """Return the Jacobian of a function of one array by central differences, one element at a time.

    Args:
        function: returns the outputs for x, in any shape.
        x: the point.
        step: the step h. It is increased for elements above 1,024. It is a power of two, so that adding it to numbers
            with few digits is exact.
        bent: the largest relative difference between the slopes on both sides of a point with a derivative.
    """
    here = np.ravel(np.asarray(function(x), np.float64))
    entries, kinks = np.zeros((x.size, here.size)), np.zeros(x.size, bool)

    def slopes(i: int, h: float) -> np.ndarray:
        ends = []
        for sign in (1.0, -1.0):
            moved = np.array(x)
            moved.flat[i] += sign * h
            end = np.ravel(np.asarray(function(moved), np.float64))
            ends.append(sign * (end - here) / h if end.size == here.size else np.full(here.size, np.nan))
        return np.stack(ends)

    for i in range(x.size):
        h = step * 2.0 ** np.ceil(np.log2(max(1.0, abs(float(x.flat[i])) / 1024)))
        sides = slopes(i, h)
        slope = np.mean(sides, 0)
        allowed = bent * max(1.0, float(np.max(np.abs(slope), initial=0.0)))
        smooth = np.max(np.abs(sides[0] - sides[1]), initial=0.0) <= allowed
        # A large change may be a step of the function. Its slope would grow with a smaller h.
        if smooth and np.max(h * np.abs(slope) / np.maximum(1.0, np.abs(here)), initial=0.0) > 1e-3:
            smooth = np.max(np.abs(np.mean(slopes(i, h / 16), 0) - slope)) <= allowed
        kinks[i] = not smooth
        entries[i] = slope if smooth else 0.0
    return Jacobian(entries, kinks)


def rounded(
    function: Callable[[Arrays], Arrays], point: Mapping[str, np.ndarray], moving: Iterable[str], step: float
) -> bool:
    """Return True if a function rounds more coarsely than float64, as its second differences show.

    Args:
        function: returns the outputs for a point. Outputs whose shape changes between the steps are ignored.
        point: the first point.
        moving: the names of the arrays in `point` that are changed.
        step: the scale of a step. Six points are computed along each of three random directions.
    """
    rng = np.random.default_rng(0)
    for _ in range(3):
        ways = {name: step * rng.standard_normal(np.shape(point[name])) for name in moving}
        values = [function({**point, **{name: point[name] + i * way for name, way in ways.items()}}) for i in range(6)]
        for name in values[0]:
            if len({np.shape(each[name]) for each in values}) == 1:
                bends = np.abs(np.diff([each[name] for each in values], 2, axis=0))
                if np.nanmax(bends, initial=0.0) > 4e-9 * np.nanmax(np.abs(values[0][name]), initial=1e-3):
                    return True
    return False
