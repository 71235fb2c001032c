"""Interleaved timing: what is compared is measured in alternation; other load on the machine falls on all alike.

A block is as many steps as fit into a moment, after one that is not measured. This module needs the standard library
alone.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

BLOCK, LONG = 0.05, 0.5
"""Seconds of a block; and of a step so long that no other step need come before it."""

Rounds = Mapping[str, Sequence[float]]
"""For each name, the seconds that a step took in each round."""


def block(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds a step takes by a clock, the first one of the block left out if it is short."""
    start = clock()
    step()
    if (spent := clock() - start) > LONG:
        return spent
    count, start = 0, clock()
    while (spent := clock() - start) < BLOCK or not count:
        step()
        count += 1
    return spent / count


def rounds(
    blocks: Mapping[str, Callable[[], float]], repeat: int, seed: int = 0, until: float = math.inf, least: int = 3
) -> Rounds:
    """The seconds that each block returns in each round.

    The order of a round is drawn, and every other round goes through the last one backwards, so that nobody always
    follows the same one, nor comes first more often.

    Args:
        blocks: by name, what runs a block and returns the seconds of a step.
        repeat: rounds, at most.
        seed: of the draws.
        until: the reading of `time.monotonic`, in seconds, at which no further round begins.
        least: rounds that there are all the same.
    """
    found: dict[str, list[float]] = {name: [] for name in blocks}
    draw, order = random.Random(seed), list(blocks)
    for i in range(repeat):
        if i >= least and time.monotonic() >= until:
            break
        order = order[::-1] if i % 2 else draw.sample(order, len(order))
        for name in order:
            found[name].append(blocks[name]())
    return found


def interleaved(steps: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median milliseconds of each step, over `repeat` rounds of one block each."""
    found = rounds({name: partial(block, step) for name, step in steps.items()}, repeat)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in found.items()}
