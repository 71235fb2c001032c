"""Gradients judged by slopes of the loss along random directions, until every one of them has been seen.

Along a direction that moves several tensors, the claimed slope is the sum of their shares. A fault in one tensor shows
where its share is larger than what the measure leaves in doubt, so each direction tells in which tensors a fault of a
given size could not have hidden; those that are left move alone in the next. Sizes of moves are chosen so that the
shares are alike. This is group testing with the classical gradient check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from onnxgrad_cli.verification.claims import Claims, Direction, slices
from onnxgrad_cli.verification.loss_function import MUST_SHOW, ScalarFunction
from onnxgrad_cli.verification.slopes import slope

ROUNDS = 4
"""Rounds at most, each of two directions: a round moves the tensors that the last one did not see."""

LONGEST, SHORTEST = 1e3, 1e-3
"""How much farther or less far than in proportion to its size a tensor is moved, to make its share like the others'."""

NOTHING_MORE = 1e-5
"""How far two measures of a slope may be apart, relative to the shares in it, so that it is not measured once more; the
noise of the claim may be added to that."""

NOISE = (3e-4, 0.1)
"""Shares of a gradient that are noise: tensors are judged with others between the same bounds, and beyond the last one
nothing can be told of them but that the loss does not move with them either."""

NOISES, FAULT = 8, 0.2
"""How often the noise of a claim may be in a slope, and the size of a fault that is to show all the same."""

NAMED = 10
"""Wrong gradients that are looked for by name."""


@dataclass(frozen=True)
class Trial:
    """One direction: the slope as claimed and as measured, and how far they may be apart.

    Attributes:
        claimed, measured: the slopes.
        allowed: the doubt of the measure and the noise of the claim.
        shares: what each tensor contributes to the claim.
        kink: the share of what is allowed that a kink makes, where any slope between two is a derivative.
    """

    claimed: float
    measured: float
    allowed: float
    shares: Mapping[str, float]
    kink: float

    @property
    def agrees(self) -> bool:
        """Whether claim and measure agree."""
        return bool(abs(self.claimed - self.measured) <= self.allowed)

    @property
    def error(self) -> float:
        """How far claim and measure are apart, relative to the larger."""
        return abs(self.claimed - self.measured) / max(abs(self.claimed), abs(self.measured), 1e-300)

    @property
    def kinked(self) -> bool:
        """Whether a fault could hide in a kink."""
        return self.kink > MUST_SHOW[True] * sum(map(abs, self.shares.values()))

    def least_fault(self, name: str) -> float:
        """The size of the smallest fault in the gradient of a tensor, relative to it, that would have shown."""
        return self.allowed / max(abs(self.shares[name]), 1e-300)

    @property
    def still(self) -> bool:
        """Whether all gradients are zero and the loss stays: that is right, and shows nothing of any rule."""
        return self.measured == 0 and not any(self.shares.values())


@dataclass
class Judgement:
    """What came of it.

    Attributes:
        error: the largest error of a direction that moved all tensors, relative to its slope.
        refuted: tensors along which the loss has other slopes than they claim together; empty where all agree.
        visible: tensor -> the size of the smallest fault in its gradient, relative to it, that would have shown.
        still: tensors of which each gradient is zero, and along which the loss stays.
        directions: how many were measured.
        kinked: whether a fault could hide in a kink in one of them.
    """

    error: float = 0.0
    refuted: list[str] = field(default_factory=list)
    visible: dict[str, float] = field(default_factory=dict)
    still: list[str] = field(default_factory=list)
    directions: int = 0
    kinked: bool = False


class Judge:
    """Compares claimed gradients of a loss with its slopes.

    Args:
        loss: the loss, measured in whatever precision.
        claims: the gradients and their noise.
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
            name: float(np.clip(typical / influence, SHORTEST, LONGEST)) if influence > 0 else 1.0
            for name, influence in influences.items()
        }
        shares = {name: claims.noise(name) for name in names}
        self._groups = [[n for n in names if low <= shares[n] < high] for low, high in pairwise((0.0, *NOISE, np.inf))]
        self._amplitudes.update(dict.fromkeys(self._groups[-1], 1.0))
        self._trials = 0

    def judge(self) -> Judgement:
        """Judge the claims in rounds, each of the tensors in which a fault could still hide."""
        found = Judgement()
        for group in filter(None, self._groups):
            if not found.refuted:
                self._judge_together(group, found)
        found.directions = self._trials
        return found

    def drowned(self) -> bool:
        """Return True if noise hides faults of a fifth in most gradients, by the claims alone."""
        hidden = 0
        for group in self._groups:
            ways = self._ways(group, np.ones(len(group)))
            least = NOISES * _noise_along(ways) / FAULT
            hidden += sum(abs(way.share) <= least for way in ways.values())
        return 2 * hidden > len(self._claims.arrays)

    def could_hide(self, found: Judgement, name: str) -> float:
        """The size of the largest fault that could hide in a tensor's gradient, relative to the largest gradient."""
        return found.visible[name] * self._entries[name] / max(*self._entries.values(), 1e-300)

    def _judge_together(self, names: list[str], found: Judgement) -> None:
        """Judge tensors whose gradients are equally noisy: what is noise in one would hide faults of the others."""
        groups = [names]
        for _ in range(ROUNDS):
            left = [self._round(group, found) for group in groups if not found.refuted]
            groups = [part for group, rest in zip(groups, left, strict=False) for part in self._parts(group, rest)]

    def _parts(self, names: list[str], left: list[str]) -> list[list[str]]:
        """What moves together in the next round, of a group in which faults could hide in those that are left.

        Where nothing showed in float32, the others' noise may have hidden it.
        """
        if len(left) < len(names) or self.loss.exact:
            return [left] if 0 < len(left) < len(names) else []
        half = len(names) // 2
        return [names[:half], names[half:]] if half else []

    def _round(self, names: Sequence[str], found: Judgement) -> list[str]:
        """Judge some tensors along common directions; those in which a fault could hide all the same."""
        trials = [self._trial(names)]
        if not (trials[0].agrees and names[0] in self._groups[-1]):  # of noise alone, that the loss stays is enough
            trials.append(self._trial(names))
            if trials[0].agrees != trials[1].agrees:  # a kink may spoil one direction; a wrong gradient is so in all
                trials.append(self._trial(names))
        found.kinked |= any(trial.kinked for trial in trials)
        second = sorted(trial.error for trial in trials)[-2:][0]
        found.error = found.error or second
        if sum(not trial.agrees for trial in trials) >= 2:
            found.refuted = list(names)
        for name in names:
            found.visible[name] = min(trial.least_fault(name) for trial in trials)
        if all(trial.still for trial in trials):
            found.still += names
            return []
        return [name for name in names if found.visible[name] >= self.loss.fault]

    def wrong_among(self, names: Sequence[str]) -> dict[str, float]:
        """The tensors that are wrong alone, found by halves, with their errors."""
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

    def _trial(self, names: Sequence[str]) -> Trial:
        """The slope along a random direction in which some tensors move."""
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
        return Trial(claimed, measured.value, allowed, shares, measured.kink / 2)

    def _ways(self, names: Sequence[str], signs: Sequence[float] | np.ndarray) -> dict[str, Direction]:
        """Return the directions of tensors in the next trial."""
        return {
            name: self._claims.direction(name, self._trials, sign * self._amplitudes[name])
            for name, sign in zip(names, signs, strict=True)
        }


def _noise_along(ways: Mapping[str, Direction]) -> float:
    """Return by how much the claims are noisy along directions, together."""
    noises = zip(*(way.noises for way in ways.values()), strict=True)
    return max((max(abs(sum(parts)), math.hypot(*parts)) for parts in noises), default=0.0)


def off(a: np.ndarray, b: np.ndarray, least: float = 0.0) -> float:
    """How far two results are apart, relative to the larger of the largest finite entry and `least`.

    Entries that are the same infinity, or no number in both, are not apart.
    """
    worst, largest = distance(a, b)
    return worst / max(largest, least, 1e-30)


def distance(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the largest distance of two entries, see `off`, and the largest finite absolute entry of `b`."""
    if a.dtype.kind in "OU":  # strings
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
    """Return the largest absolute value, 0 of nothing, nan if there is one."""
    return float(np.maximum(np.abs(np.max(x, initial=0.0)), np.abs(np.min(x, initial=0.0))))
