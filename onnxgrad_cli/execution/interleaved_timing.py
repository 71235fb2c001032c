"""Interleaved timing: measure steps in alternation, so that other load on the machine affects all of them alike.

The steps are measured in blocks. A block has one step that is not measured, and then all the steps that fit into a
fraction of a second. This module only requires the standard library.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

BLOCK_SECONDS, LONG_STEP_SECONDS = 0.05, 0.5
"""The length of a block in seconds; and the length of a first step, in seconds, above which this step is the block."""

Rounds = Mapping[str, Sequence[float]]
"""Map from the name of a step to the seconds per step in each round."""


def block(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Run one block and return the seconds per step. A short first step is not counted."""
    start = clock()
    step()
    if (spent := clock() - start) > LONG_STEP_SECONDS:
        return spent
    count, start = 0, clock()
    while (spent := clock() - start) < BLOCK_SECONDS or not count:
        step()
        count += 1
    return spent / count


def rounds(
    blocks: Mapping[str, Callable[[], float]], repeat: int, seed: int = 0, until: float = math.inf, least: int = 3
) -> Rounds:
    """Run all blocks once per round, and return a map from name to the seconds per step in each round.

    The order of a round is random, and every second round reverses the order of the one before. So a block does not
    always follow the same other block, and does not come first more often than others.

    Args:
        blocks: name -> a function that runs a block and returns the seconds per step.
        repeat: the largest number of rounds.
        seed: the seed of the random orders.
        until: no further round begins after this reading of `time.monotonic`, in seconds.
        least: the number of rounds that are run in any case.
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
    """Return the median milliseconds of each step, over `repeat` rounds. A round runs a block of each step."""
    found = rounds({name: partial(block, step) for name, step in steps.items()}, repeat)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in found.items()}
