"""The proof of a gradient: random directional derivatives against central differences.

For a function f and a claimed gradient G at a point x, every direction d must satisfy
(f(x + h d) - f(x - h d)) / 2h = <G, d> up to O(h^2). The tests of the rules and `onnxgrad check` use this module.
Source: JAX's `check_grads` and the classical gradient check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Difference:
    """One direction: <G, d> as claimed, as measured, and |claimed - measured| relative to the larger."""

    claimed: float
    measured: float
    error: float


def directional(
    function: Callable[[Arrays], float],
    point: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    step: float = 1e-6,
    floor: float = 0.0,
    scale: Callable[[np.ndarray], np.ndarray | float] | None = None,
) -> Difference:
    """Compare claimed `gradients` at `point` with a central difference of `function` along a random direction.

    Args:
        function: point -> scalar.
        point: the arrays `function` depends on; those without a gradient stay fixed.
        gradients: the claimed gradient of some of them, in the shape of each.
        step: h; in float64 the best is near the cube root of its precision.
        floor: a scale below which a difference counts as none (the noise of the function's own arithmetic).
        scale: array -> the size of a step in it, as one number or one an entry (None: 1).
    """
    direction = {name: rng.standard_normal(np.shape(point[name])) for name in gradients}
    if scale is not None:
        for name, d in direction.items():
            d *= scale(point[name])
    ends = []
    for sign in (1.0, -1.0):
        moved = {name: np.asarray(point[name] + sign * step * d, point[name].dtype) for name, d in direction.items()}
        ends.append(function({**point, **moved}))
    measured = (ends[0] - ends[1]) / (2 * step)
    claimed = float(sum(np.sum(np.float64(g) * direction[name]) for name, g in gradients.items()))
    size = max(abs(claimed), abs(measured), floor, 1e-30)
    return Difference(claimed, measured, abs(claimed - measured) / size)


def by_array(x: np.ndarray) -> float:
    """The root mean square of an array: every entry moves by the size of a typical one."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) or 1.0


def by_entry(x: np.ndarray) -> np.ndarray | float:
    """The size of each entry: what is tiny hardly moves, so that it stays on its side of a kink."""
    return np.abs(x, dtype=np.float64) if np.any(x) else 1.0
