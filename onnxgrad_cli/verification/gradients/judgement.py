"""Compare gradients with slopes of the loss along random directions, until every gradient has been checked.

A direction moves several tensors at once. The claimed slope along it is the sum of the shares of these tensors: the
inner product of each gradient with the move of its tensor. An error in one gradient is detected if the tensor's share
of the slope is large compared with the uncertainty of the measured slope. So each direction settles some of the
tensors, and the next direction moves only the others. The sizes of the moves are chosen so that all shares are similar.
This combines group testing with the classical gradient check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from onnxgrad_cli.verification.gradients.directions import Claims, Direction, slices
from onnxgrad_cli.verification.gradients.loss_function import MUST_SHOW, ScalarFunction
from onnxgrad_cli.verification.gradients.slopes import slope

ROUNDS = 4
"""Largest number of rounds of two directions. Each round moves only tensors that the earlier rounds did not settle."""

MAX_MOVE, MIN_MOVE = 1e3, 1e-3
"""Bounds for the move of a tensor, relative to its size. The moves are chosen so that the shares are similar."""

NOTHING_MORE = 1e-5
"""If two measurements of a slope differ by less than this fraction of its shares, the slope is not measured again.

The noise of the claimed gradients is added to this limit.
"""

NOISE = (3e-4, 0.1)
"""Bounds that divide gradients into groups by their noise, relative to the gradient. Each group is checked separately.

Gradients above the last bound are mere noise. For these it is only checked that the loss does not change with their
tensors either.
"""

NOISES, FAULT = 8, 0.2
"""`NOISES` is the accepted difference of a slope in multiples of the noise.

`FAULT` is the size of an error, relative to a gradient, that must be detected despite the noise.
"""

NAMED = 10
"""Largest number of wrong gradients that a report names."""


@dataclass(frozen=True)
class SlopeComparison:
    """The claimed and the measured slope along one direction, and the accepted difference between them.

    Attributes:
        claimed, measured: the slopes.
        allowed: the accepted difference: the uncertainty of the measurement plus the noise of the claim.
        shares: tensor -> its contribution to the claimed slope.
        kink: the part of `allowed` that is due to a kink. At a kink, any slope between those of its two sides is a
            derivative.
    """

    claimed: float
    measured: float
    allowed: float
    shares: Mapping[str, float]
    kink: float

    @property
    def agrees(self) -> bool:
        """True if the claimed and the measured slope differ by no more than `allowed`."""
        return bool(abs(self.claimed - self.measured) <= self.allowed)

    @property
    def error(self) -> float:
        """The difference between the claimed and the measured slope, relative to the larger of the two."""
        return abs(self.claimed - self.measured) / max(abs(self.claimed), abs(self.measured), 1e-300)

    @property
    def kinked(self) -> bool:
        """True if the kink widens the accepted difference so much that an error could go undetected."""
        return self.kink > MUST_SHOW[True] * sum(map(abs, self.shares.values()))

    @property
    def still(self) -> bool:
        """True if all gradients are zero and the loss does not change: the two agree, but no rule was tested."""
        return self.measured == 0 and not any(self.shares.values())


@dataclass
class Judgement:
    """The result of comparing gradients with slopes.

    Attributes:
        error: the relative error of the first round, which moves all tensors of a group.
        refuted: the group of tensors along which the measured slope contradicts the claims; empty if all slopes agree.
        visible: tensor -> the smallest error in its gradient that would have been detected, relative to the gradient.
        still: tensors whose gradients are zero and along which the loss does not change.
        directions: the number of measured directions.
        kinked: True if, in one of the directions, an error could go undetected because of a kink.
    """

    error: float = 0.0
    refuted: list[str] = field(default_factory=list)
    visible: dict[str, float] = field(default_factory=dict)
    still: list[str] = field(default_factory=list)
    directions: int = 0
    kinked: bool = False


class Judge:
    """Compares claimed gradients of a loss with measured slopes of the loss.

    Args:
        loss: the loss, in float64 or in the model's own precision.
        claims: the claimed gradients and their noise.
        rng: draws the signs of the directions.
    """

    def __init__(self, loss: ScalarFunction, claims: Claims, rng: np.random.Generator) -> None:
        self.loss, self._claims, self._rng = loss, claims, rng
        names = list(claims.arrays)
        self._entries = {name: claims.entry(name) for name in names}
        counts = {name: claims.arrays[name].size for name in names}
        influences = {name: self._entries[name] * math.sqrt(counts[name]) * claims.size(name) for name in names}
        present = [influence for influence in influences.values() if influence > 0]
        typical = float(np.median(present)) if present else 0.0
        self._amplitudes = {
            name: float(np.clip(typical / influence, MIN_MOVE, MAX_MOVE)) if influence > 0 else 1.0
            for name, influence in influences.items()
        }
        shares = {name: claims.noise(name) for name in names}
        self._groups = [[n for n in names if low <= shares[n] < high] for low, high in pairwise((0.0, *NOISE, np.inf))]
        self._amplitudes.update(dict.fromkeys(self._groups[-1], 1.0))
        self._trials = 0

    def judge(self) -> Judgement:
        """Compare in rounds. Each round moves the tensors in whose gradients an error could still be undetected."""
        found = Judgement()
        for group in filter(None, self._groups):
            if not found.refuted:
                self._judge_together(group, found)
        found.directions = self._trials
        return found

    def drowned(self) -> bool:
        """Return True if, for most gradients, the noise of the claimed gradient alone would hide an error of 20 %."""
        hidden = 0
        for group in self._groups:
            ways = self._ways(group, np.ones(len(group)))
            least = NOISES * _noise_along(ways) / FAULT
            hidden += sum(abs(way.share) <= least for way in ways.values())
        return 2 * hidden > len(self._claims.arrays)

    def could_hide(self, found: Judgement, name: str) -> float:
        """Return the largest undetected error that a tensor's gradient can have, relative to the largest gradient."""
        return found.visible[name] * self._entries[name] / max(*self._entries.values(), 1e-300)

    def _judge_together(self, names: list[str], found: Judgement) -> None:
        """Check a group of tensors whose gradients have similar noise. A noisier gradient would hide their errors."""
        groups = [names]
        for _ in range(ROUNDS):
            left = [self._round(group, found) for group in groups if not found.refuted]
            groups = [part for group, rest in zip(groups, left, strict=False) for part in self._parts(group, rest)]

    def _parts(self, names: list[str], left: list[str]) -> list[list[str]]:
        """Return the groups of tensors for the next round. The tensors of a group move together.

        If the last round could not have detected any error in float32, noise of other tensors may be the reason, so the
        group is halved.

        Args:
            names: the group of the last round.
            left: the tensors of the group in which errors could still be undetected.
        """
        if len(left) < len(names) or self.loss.exact:
            return [left] if 0 < len(left) < len(names) else []
        half = len(names) // 2
        return [names[:half], names[half:]] if half else []

    def _round(self, names: Sequence[str], found: Judgement) -> list[str]:
        """Check tensors along common directions, and return those in which an error could still be undetected."""
        trials = [self._trial(names)]
        if not (trials[0].agrees and names[0] in self._groups[-1]):  # for mere noise, one direction is enough
            trials.append(self._trial(names))
            if trials[0].agrees != trials[1].agrees:  # a kink spoils one direction, a wrong gradient all
                trials.append(self._trial(names))
        found.kinked |= any(trial.kinked for trial in trials)
        second = sorted(trial.error for trial in trials)[-2:][0]
        found.error = found.error or second
        if sum(not trial.agrees for trial in trials) >= 2:
            found.refuted = list(names)
        for name in names:
            found.visible[name] = min(trial.allowed / max(abs(trial.shares[name]), 1e-300) for trial in trials)
        if all(trial.still for trial in trials):
            found.still += names
            return []
        return [name for name in names if found.visible[name] >= self.loss.fault]

    def wrong_among(self, names: Sequence[str]) -> dict[str, float]:
        """Find the tensors with wrong gradients by bisection, and return a map: tensor -> relative error."""
        wrong: dict[str, float] = {}
        groups = [list(names)]
        while groups and len(wrong) < NAMED:
            group = groups.pop()
            trials = [self._trial(group) for _ in range(2)]
            if all(trial.agrees for trial in trials):
                continue
            if len(group) == 1:
                wrong[group[0]] = max(trial.error for trial in trials)
            else:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return wrong

    def _trial(self, names: Sequence[str]) -> SlopeComparison:
        """Compare the claimed and the measured slope along one random direction that moves these tensors."""
        ways = self._ways(names, self._rng.choice((-1.0, 1.0), len(names)))
        self._trials += 1
        shares = {name: way.share for name, way in ways.items()}
        claimed = sum(shares.values())
        noise = _noise_along(ways)
        total = sum(map(abs, shares.values()))
        agreed = NOTHING_MORE * total + noise
        loss = self.loss
        along = partial(loss.moved, ways)
        measured = slope(along, loss.value, loss.steps(total), agreed, loss.digits, loss.each)
        size = max(abs(claimed), abs(measured.value)) if not self.loss.exact else total
        allowed = measured.doubt + NOISES * noise + self.loss.tolerance * size
        return SlopeComparison(claimed, measured.value, allowed, shares, measured.kink / 2)

    def _ways(self, names: Sequence[str], signs: Sequence[float] | np.ndarray) -> dict[str, Direction]:
        """Return a map: tensor -> the direction in which the next comparison moves it.

        `signs` has a sign for each of `names`; -1 reverses the direction of the tensor.
        """
        return {
            name: self._claims.direction(name, self._trials, sign * self._amplitudes[name])
            for name, sign in zip(names, signs, strict=True)
        }


def _noise_along(ways: Mapping[str, Direction]) -> float:
    """Return the noise of the claimed slope along the sum of some directions."""
    noises = zip(*(way.noises for way in ways.values()), strict=True)
    return max((max(abs(sum(parts)), math.hypot(*parts)) for parts in noises), default=0.0)


def off(a: np.ndarray, b: np.ndarray, least: float = 0.0) -> float:
    """Return the largest difference between entries of two arrays, relative to the largest finite entry of `b`.

    If `least` is larger than that entry, the result is relative to `least`. Two entries that are the same infinity, or
    both NaN, don't differ.
    """
    worst, largest = distance(a, b)
    return worst / max(largest, least, 1e-30)


def distance(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the largest difference between entries (see `off`), and the largest finite magnitude in `b`."""
    if a.dtype.kind in "bOU":  # truth values and strings have no distance
        return 0.0 if np.array_equal(a, b) else math.inf, 1.0
    if a.shape != b.shape:
        a, b = np.broadcast_arrays(a, b)
    worst, largest = 0.0, 0.0
    for (_, x), (_, y) in zip(slices(np.ravel(a)), slices(np.ravel(b)), strict=True):
        with np.errstate(invalid="ignore"):
            apart = x - y
            farthest, size = _largest(apart), _largest(y)
            if not (math.isfinite(farthest) and math.isfinite(size)):
                apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
                farthest, size = _largest(apart), _largest(y[np.isfinite(y)])
        worst = float(np.maximum(worst, farthest))  # nan stays nan
        largest = max(largest, size)
    return worst, largest


def _largest(x: np.ndarray) -> float:
    """Return the largest magnitude in an array: 0 if it is empty, NaN if it contains NaN."""
    return float(np.maximum(np.abs(np.max(x, initial=0.0)), np.abs(np.min(x, initial=0.0))))
