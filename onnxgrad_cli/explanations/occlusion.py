"""Occlusion: how much the score falls where a part is hidden.

Source: M. Zeiler, R. Fergus, Visualizing and Understanding Convolutional Networks, 2013, arXiv:1311.2901.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from onnxgrad_cli.explanations.scorer import Case


def starts(size: int, window: int, stride: int) -> list[int]:
    """Where windows begin along an axis: every `stride`, the last one at its end."""
    last = max(size - window, 0)
    return [*range(0, last, stride), last]


def occlusion(
    case: Case, baseline: np.ndarray, axes: Sequence[int], window: Sequence[int], stride: Sequence[int]
) -> np.ndarray:
    """The mean of S(x) - S(x with the window hidden) over all windows that cover a place.

    Args:
        case: the samples.
        baseline: what hides, which broadcasts to x.
        axes: the axes of places.
        window, stride: sizes of the window and of its steps, one for each axis.

    Returns:
        float64 (n, ...): of the shape of x, of size 1 along axes that are hidden as a whole.
    """
    start = np.broadcast_to(baseline, case.x.shape)
    whole = case.scores(case.x)
    shape = [size if axis == 0 or axis in axes else 1 for axis, size in enumerate(case.x.shape)]
    total, count = np.zeros(shape), np.zeros(shape)
    ways = [
        starts(case.x.shape[axis], *each) for axis, each in zip(axes, zip(window, stride, strict=True), strict=True)
    ]
    for corner in product(*ways):
        place: list[slice] = [slice(None)] * case.x.ndim
        for axis, first, size in zip(axes, corner, window, strict=True):
            place[axis] = slice(first, first + size)
        hidden = case.x.copy()
        hidden[tuple(place)] = start[tuple(place)]
        fall = whole - case.scores(hidden)
        total[tuple(place)] += fall.reshape(-1, *[1] * (case.x.ndim - 1))
        count[tuple(place)] += 1
    return total / count
