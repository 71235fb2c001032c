"""Measure the slope of a loss along a direction, and the uncertainty of the measurement.

A finite difference of the loss has two errors: over a long step the loss is not linear, and over a short step rounding
dominates. Both errors make the one-sided slopes to the right and to the left differ. If these two agree, one step is
enough. Otherwise more steps are measured. If the slopes of two neighbouring steps agree, neither error matters, and
their difference is the remaining uncertainty. Which of the measured slopes is taken depends only on how well they
agree, never on the gradient that is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SINGLE_STEPS = ((1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4),)
"""Steps in float32, in one group, relative to the size of the moved tensors."""


MIN_STEP, MAX_STEP = 1e-8, 1e-5
"""Bounds of the first step in float64."""

VISIBLE = 1e-10
"""A relative change of the function's value that is still accurate to some digits in float64."""


def double_steps(here: float, slope: float) -> tuple[tuple[float, ...], ...]:
    """Return groups of steps in float64, relative to the size of the moved tensors.

    The first step is the shortest one at which rounding leaves some digits of the difference, because in a large
    network every longer step crosses kinks. The last group also has shorter steps, for functions with jumps: over long
    steps, many jumps look like a slope.

    Args:
        here: the value of the function.
        slope: an estimate of its slope.
    """
    step = min(max(VISIBLE * abs(here) / max(slope, 1e-300), MIN_STEP), MAX_STEP)
    shorter = (each for each in (step / 100, step / 1000) if each > MIN_STEP / 2)
    return (step,), (10 * step,), (100 * step, step / 10), (1000 * step, *shorter)


@dataclass(frozen=True)
class Slope:
    """A measured slope.

    Attributes:
        value: the central difference.
        gap: the difference between `value` and the central difference of the neighbouring step. If there is only one
            step, the difference between the two one-sided slopes.
        kink: the difference between the one-sided slopes that remains however short the step is. If it is not 0, any
            slope between them is a derivative.
        rounding: the smallest slope that can be measured. With a smaller one, rounding gives the function the same
            value at both ends of the step.
    """

    value: float
    gap: float
    kink: float
    rounding: float

    @property
    def doubt(self) -> float:
        """The largest possible difference of `value` from the true slope, or at a kink from another valid slope."""
        return 2 * self.gap + self.kink / 2 + self.rounding


@dataclass(frozen=True)
class _Difference:
    step: float
    central: float
    jump: float
    """The one-sided slope to the right minus the one to the left."""


Each = Callable[[Callable[[float], float], Sequence[float]], Iterable[float]]
"""Type of a function that computes another function at several steps, as `map` does, possibly in parallel."""


def slope(
    function: Callable[[float], float],
    here: float,
    steps: Sequence[Sequence[float]],
    agreed: float,
    digits: float,
    each: Each = map,
) -> Slope:
    """Return the slope at 0 of a function of one number.

    Args:
        function: the function.
        here: the value of the function at 0.
        steps: groups of steps; the next group is measured only if the steps before it disagree.
        agreed: slopes agree if they differ by at most this much.
        digits: the machine epsilon of the function's values.
        each: computes the function on the two sides of a step.
    """

    rounding = digits * abs(here)
    found: list[_Difference] = []
    best: Slope | None = None
    for group in steps:
        for step in group:
            right, left = each(function, (step, -step))
            found.append(_Difference(step, (right - left) / (2 * step), (right - 2 * here + left) / step))
        found.sort(key=lambda difference: -difference.step)
        if len(found) == 1:  # the slopes on its two sides are equally good
            best = Slope(found[0].central, abs(found[0].jump), 0.0, rounding / found[0].step)
        else:
            best = _of_neighbours(found, rounding)
        if best.gap + best.rounding <= agreed:
            break
    assert best is not None
    return best


def _of_neighbours(found: Sequence[_Difference], rounding: float) -> Slope:
    """Return the slope from the two finite differences of neighbouring steps that agree best.

    `found` is sorted by falling step.
    """

    def gap(pair: tuple[_Difference, _Difference]) -> float:
        return abs(pair[0].central - pair[1].central)

    long, short = best = min(pairwise(found), key=lambda pair: gap(pair) + rounding / pair[1].step)
    share = short.step / long.step
    kink = abs(short.jump - share * long.jump) / (1 - share)  # a bend's jump scales with the step, a kink's doesn't
    return Slope(short.central, gap(best), kink, rounding / short.step)
