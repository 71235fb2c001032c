"""The slope of a loss along a direction, measured, and what the measure itself is worth.

A difference of two losses has two faults: over a long step the loss bends, over a short one it is rounded. Both show in
how far the slopes to the right and to the left are apart, so that one step is enough where these agree. Where they do
not, several steps are taken; where two neighbours agree neither fault counts, and what they disagree by is what remains
of both. The choice looks at measures alone, never at the gradient that is to be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SINGLE_STEPS = ((1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4),)
"""Steps in float32."""


SHORTEST, LONGEST = 1e-8, 1e-5
"""Of the steps that are taken first in float64."""

VISIBLE = 1e-10
"""The change of a function, relative to it, that rounding in float64 leaves some digits of."""


def double_steps(here: float, slope: float) -> tuple[tuple[float, ...], ...]:
    """Steps in float64 for a function of a value and of about a slope, relative to the size of what moves.

    The shortest that rounding leaves some digits of come first: on every longer one a large network has kinks. The last
    are shorter, for functions with jumps: over long steps many jumps look like a slope.
    """
    step = min(max(VISIBLE * abs(here) / max(slope, 1e-300), SHORTEST), LONGEST)
    shorter = (each for each in (step / 100, step / 1000) if each > SHORTEST / 2)
    return (step,), (10 * step,), (100 * step, step / 10), (1000 * step, *shorter)


@dataclass(frozen=True)
class Slope:
    """A slope as it was measured.

    Attributes:
        value: the central difference.
        gap: how far the difference over the next step is from it; of a single one, how far its two sides are apart.
        kink: by how much the slopes on the two sides differ, however near: where it is not 0, any slope in between is
            a derivative.
        rounding: the smallest slope that shows: of one below it, the function has the same value at both ends.
    """

    value: float
    gap: float
    kink: float
    rounding: float

    @property
    def doubt(self) -> float:
        """How far the true slope, or another that is as good, may be from the value."""
        return 2 * self.gap + self.kink / 2 + self.rounding


@dataclass(frozen=True)
class _Difference:
    step: float
    central: float
    jump: float
    """The slope to the right less that to the left."""


Each = Callable[[Callable[[float], float], Sequence[float]], Iterable[float]]
"""Computes a function at several steps, as `map` does; it may be at the same time."""


def slope(
    function: Callable[[float], float],
    here: float,
    steps: Sequence[Sequence[float]],
    agreed: float,
    digits: float,
    each: Each = map,
) -> Slope:
    """The slope of a function of one number at 0.

    Args:
        function: the function.
        here: its value at 0.
        steps: groups of steps; the next group is taken where those before it disagree.
        agreed: how far slopes may be apart to agree.
        digits: the relative distance of two neighbouring values of the function.
        each: computes the function on the two sides of a step.
    """

    rounding = digits * abs(here)
    found: list[_Difference] = []
    best: Slope | None = None
    for group in steps:
        found += [_difference(each(function, (step, -step)), here, step) for step in group]
        found.sort(key=lambda difference: -difference.step)
        best = _alone(found[0], rounding) if len(found) == 1 else _of_neighbours(found, rounding)
        if best.gap + best.rounding <= agreed:
            break
    assert best is not None
    return best


def _alone(only: _Difference, rounding: float) -> Slope:
    """The slope by one difference, of which the one to either side is no nearer to the true one than the other."""
    return Slope(only.central, abs(only.jump), 0.0, rounding / only.step)


def _of_neighbours(found: Sequence[_Difference], rounding: float) -> Slope:
    """The slope by the neighbours among differences, of falling steps, that agree best."""

    def gap(pair: tuple[_Difference, _Difference]) -> float:
        return abs(pair[0].central - pair[1].central)

    long, short = best = min(pairwise(found), key=lambda pair: gap(pair) + rounding / pair[1].step)
    share = short.step / long.step
    kink = abs(short.jump - share * long.jump) / (1 - share)  # what bends jumps in proportion to the step, a kink not
    return Slope(short.central, gap(best), kink, rounding / short.step)


def _difference(ends: Iterable[float], here: float, step: float) -> _Difference:
    right, left = ends
    return _Difference(step, (right - left) / (2 * step), (right - 2 * here + left) / step)
