"""The proof of a gradient: random directional derivatives against central differences.

For a function f and a claimed gradient G at a point x, every direction d must satisfy
(f(x + h d) - f(x - h d)) / 2h = <G, d> up to O(h^2). The tests of the rules and `onnxgrad check` use this module.
Source: JAX's `check_grads` and the classical gradient check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.ir.types import Arrays


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
) -> Difference:
    """Compare claimed `gradients` at `point` with a central difference of `function` along a random direction.

    Args:
        function: point -> scalar.
        point: the arrays `function` depends on; those without a gradient stay fixed.
        gradients: the claimed gradient of some of them, in the shape of each.
        step: h; in float64 the best is near the cube root of its precision.
        floor: a scale below which a difference counts as none (the noise of the function's own arithmetic).
    """
    direction = {name: rng.standard_normal(np.shape(point[name])) for name in gradients}
    ends = []
    for sign in (1.0, -1.0):
        moved = {name: np.asarray(point[name] + sign * step * d, point[name].dtype) for name, d in direction.items()}
        ends.append(function({**point, **moved}))
    measured = (ends[0] - ends[1]) / (2 * step)
    claimed = float(sum(np.sum(np.float64(g) * direction[name]) for name, g in gradients.items()))
    size = max(abs(claimed), abs(measured), floor, 1e-30)
    return Difference(claimed, measured, abs(claimed - measured) / size)


def vjp_difference(
    run: Callable[[Arrays], Arrays],
    point: Arrays,
    cotangents: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    step: float = 1e-6,
    floor: float = 1e-3,
) -> Difference:
    """Compare claimed vector-Jacobian products with differences of a model: the worse of two random directions.

    Args:
        run: point -> the model's outputs, by name.
        point: its inputs.
        cotangents: one for each output that is differentiated, of its shape.
        gradients: the claimed products, by input.
        step: of the differences.
        floor: the share of the outputs' size below which a difference is noise.
    """

    def function(at: Arrays) -> float:
        outputs = run(at)
        return float(sum(np.sum(outputs[name] * cotangent) for name, cotangent in cotangents.items()))

    values = run(point)
    scale = sum(float(np.sum(np.abs(values[name] * cotangent))) for name, cotangent in cotangents.items())
    found = [directional(function, point, gradients, rng, step, floor * scale) for _ in range(2)]
    return max(found, key=lambda difference: difference.error)


@dataclass(frozen=True)
class Jacobian:
    """A Jacobian in the order of the chain rule: row i holds the derivatives of all outputs by input entry i.

    Attributes:
        entries: [inputs, outputs], float64; 0 in the rows of kinks.
        kinks: [inputs]: whether the function has no derivative in this entry: a kink, a step, or another shape beside.
    """

    entries: np.ndarray
    kinks: np.ndarray


def jacobian(
    function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 2.0**-20, bent: float = 1e-2
) -> Jacobian:
    """Central differences of a function of one array, one entry at a time.

    Args:
        function: x -> the outputs, in any shape.
        x: where.
        step: h, larger for entries beyond a thousand; a power of two, so that numbers of few digits move exactly.
        bent: how much the slopes on the two sides may differ, relative to the slope; at a kink they do by all of it.
    """
    here = np.ravel(np.asarray(function(x), np.float64))
    entries, kinks = np.zeros((x.size, here.size)), np.zeros(x.size, bool)

    def slopes(i: int, h: float) -> np.ndarray:
        ends = []
        for sign in (1.0, -1.0):
            moved = np.array(x)
            moved.flat[i] += sign * h
            end = np.ravel(np.asarray(function(moved), np.float64))
            ends.append(sign * (end - here) / h if end.size == here.size else np.full(here.size, np.nan))
        return np.stack(ends)

    for i in range(x.size):
        h = step * 2.0 ** np.ceil(np.log2(max(1.0, abs(float(x.flat[i])) / 1024)))
        sides = slopes(i, h)
        slope = np.mean(sides, 0)
        allowed = bent * max(1.0, float(np.max(np.abs(slope), initial=0.0)))
        smooth = np.max(np.abs(sides[0] - sides[1]), initial=0.0) <= allowed
        if smooth and np.max(h * np.abs(slope) / np.maximum(1.0, np.abs(here)), initial=0.0) > 1e-3:  # or a step?
            smooth = np.max(np.abs(np.mean(slopes(i, h / 16), 0) - slope)) <= allowed
        kinks[i] = not smooth
        entries[i] = slope if smooth else 0.0
    return Jacobian(entries, kinks)


def rounded(
    function: Callable[[Arrays], Arrays], point: Mapping[str, np.ndarray], moving: Iterable[str], step: float
) -> bool:
    """Whether a function rounds more than float64 does: its second differences are then its rounding.

    Args:
        function: point -> its outputs; those of a shape that changes on the way are left out.
        point: where.
        moving: the entries of `point` that move.
        step: how far, in six steps along random directions.
    """
    rng = np.random.default_rng(0)
    for _ in range(3):
        ways = {name: step * rng.standard_normal(np.shape(point[name])) for name in moving}
        values = [function({**point, **{name: point[name] + i * way for name, way in ways.items()}}) for i in range(6)]
        for name in values[0]:
            if len({np.shape(each[name]) for each in values}) == 1:
                bends = np.abs(np.diff([each[name] for each in values], 2, axis=0))
                if np.nanmax(bends, initial=0.0) > 4e-9 * np.nanmax(np.abs(values[0][name]), initial=1e-3):
                    return True
    return False
