"""Check gradients: compare directional derivatives along random directions with central differences.

For a function f and a claimed gradient G at a point x, every direction d must satisfy
(f(x + h d) - f(x - h d)) / 2h = <G, d> up to O(h^2). The tests of the rules and `onnxgrad check` use this module.

Source: JAX's `check_grads` and the classical gradient check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.ir.types import Arrays


@dataclass(frozen=True)
class Difference:
    """The comparison along one direction d.

    Attributes:
        claimed: the directional derivative <G, d> that the claimed gradient G predicts.
        measured: the central difference.
        error: |claimed - measured|, relative to the larger of the two.
    """

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
        function: computes a scalar from a point.
        point: the arrays that `function` takes, by name. Arrays without a gradient stay fixed.
        gradients: array name -> its claimed gradient, of the same shape.
        step: the step h. In float64 the best step is near the cube root of the machine epsilon.
        floor: the smallest scale for the relative error, if both derivatives are smaller. It is the rounding noise of
            the function.
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
    """Compare claimed vector-Jacobian products with differences of a model, and return the worse of two directions.

    Args:
        run: computes the model's outputs, by name, from a point.
        point: input -> its value.
        cotangents: differentiated output -> its cotangent, of the same shape.
        gradients: input -> the claimed product, of the same shape.
        step: the step of the differences.
        floor: the smallest scale for the relative error, as a fraction of the sum of the outputs' magnitudes.
    """

    def function(at: Arrays) -> float:
        outputs = run(at)
        return float(sum(np.sum(outputs[name] * cotangent) for name, cotangent in cotangents.items()))

    values = run(point)
    scale = sum(float(np.sum(np.abs(values[name] * cotangent))) for name, cotangent in cotangents.items())
    found = [directional(function, point, gradients, rng, step, floor * scale) for _ in range(2)]
    return max(found, key=lambda difference: difference.error)
