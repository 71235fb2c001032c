"""Times of things that are compared: they take turns, so that what else the machine does falls on all alike.

A block is as many steps as fit into a moment, after one that is not measured. This module needs the standard library
alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

BLOCK, LONG = 0.05, 0.5
"""Seconds that one computes before it is another's turn; and of a step so long that nothing else need come before."""

Rounds = Mapping[str, Sequence[float]]
"""Of each the seconds that a step took in each round."""


def block(step: Callable[[], object]) -> float:
    """Seconds a step takes, the first one of the block left out if it is short."""
    start = time.perf_counter()
    step()
    if (spent := time.perf_counter() - start) > LONG:
        return spent
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < BLOCK or not count:
        step()
        count += 1
    return spent / count


def rounds(blocks: Mapping[str, Callable[[], float]], repeat: int) -> Rounds:
    """What each takes, in rounds in which they take turns; the order turns round too."""
    found: dict[str, list[float]] = {name: [] for name in blocks}
    for i in range(repeat):
        for name in list(blocks)[:: 1 - 2 * (i % 2)]:
            found[name].append(blocks[name]())
    return found


def in_turn(steps: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median milliseconds of each step, of `repeat` blocks, in which they take turns."""

    def turn(step: Callable[[], object]) -> Callable[[], float]:
        return lambda: block(step)

    found = rounds({name: turn(step) for name, step in steps.items()}, repeat)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in found.items()}
