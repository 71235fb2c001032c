"""Interleaved timing: what is compared is measured in alternation; other load on the machine falls on all alike.

A block is as many steps as fit into a moment, after one that is not measured. This module needs the standard library
alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

BLOCK, LONG = 0.05, 0.5
"""Seconds of a block; and of a step so long that no other step need come before it."""

Rounds = Mapping[str, Sequence[float]]
"""For each name, the seconds that a step took in each round."""


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
    """The seconds that each block returns in each of `repeat` rounds; every other round runs them in reverse order."""
    found: dict[str, list[float]] = {name: [] for name in blocks}
    for i in range(repeat):
        for name in list(blocks)[:: 1 - 2 * (i % 2)]:
            found[name].append(blocks[name]())
    return found


def interleaved(steps: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median milliseconds of each step, over `repeat` rounds of one block each."""
    found = rounds({name: partial(block, step) for name, step in steps.items()}, repeat)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in found.items()}
