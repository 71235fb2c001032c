"""Which of many vectors may follow a formula: a look at all of one length at once, for some models have thousands.

What passes a test of `formulas` is a suspect here, where the tests are those or looser ones; all others are let off.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.passes.parameters import formulas

SHORTEST = 8
"""Entries of a vector from which there is a look; shorter ones pass too many tests."""


def suspects(vectors: np.ndarray, tol: float) -> np.ndarray:
    """Which vectors may pass a test of `formulas`.

    Args:
        vectors: float64 of shape [count, length], of at least `SHORTEST` entries each.
        tol: the tolerance of the tests.

    Returns:
        One bool for each vector.
    """
    with np.errstate(all="ignore"):
        seen = np.isnan(vectors).any(1)
        for screen in (_few_values, _runs, _window, _whole, _evenly_spaced, _progression, _unit):
            seen |= screen(vectors, tol)
    return seen


def _few_values(x: np.ndarray, tol: float) -> np.ndarray:
    """What a mask is: huge, or 0 at most and far below."""
    return (np.abs(x).max(1) >= formulas.HUGE) | ((x.max(1) == 0) & (x.min(1) <= formulas.MASKED))


def _runs(x: np.ndarray, tol: float) -> np.ndarray:
    """What runs as a sine or a line."""
    right, places = formulas.steady(x.T, tol)
    return formulas.moving(x.T, tol) & (right >= 0.8 * places)


def _window(x: np.ndarray, tol: float) -> np.ndarray:
    """What is a raised cosine."""
    found, high = np.zeros(len(x), bool), np.abs(x.max(1) - 1) <= 0.1
    length = x.shape[1]
    for period in (length, length - 1):
        found[high] |= formulas.raised_cosines(x[high].T, period, 2 * tol)
    return found


def _whole(x: np.ndarray, tol: float) -> np.ndarray:
    """What are whole numbers."""
    return (x == np.round(x)).all(1) & ((np.abs(x).max(1) >= 8) | (np.ptp(x, 1) >= 2))


def _evenly_spaced(x: np.ndarray, tol: float) -> np.ndarray:
    """What takes values at one distance from each other."""
    places = np.sort(np.round(x / (np.abs(x).max(1, keepdims=True) * tol * 4)))
    steps = np.diff(places)
    others = steps > 0
    count = 1 + others.sum(1)
    spread = steps.max(1) - np.where(others, steps, np.inf).min(1)
    mean = (places[:, -1] - places[:, 0]) / (count - 1)
    return (count >= 3) & (count <= x.shape[1] // 2 + 4) & (spread <= 3 + 5 * tol * mean)


def _progression(x: np.ndarray, tol: float) -> np.ndarray:
    """What steps by one factor, or by one distance."""
    logs, steps = np.diff(np.log(x)), np.diff(x)
    geometric = (x > 0).all(1) & (np.ptp(logs, 1) <= tol * 20 * np.maximum(1, np.abs(logs[:, 0])))
    arithmetic = np.ptp(steps, 1) <= 2 * tol * np.abs(x).max(1)
    return (geometric | arithmetic) & (np.ptp(x, 1) > 0)


def _unit(x: np.ndarray, tol: float) -> np.ndarray:
    """What has the length one."""
    return (np.abs(np.linalg.norm(x, axis=1) - 1) <= 2 * tol) & (np.ptp(np.abs(x), 1) > 0)
