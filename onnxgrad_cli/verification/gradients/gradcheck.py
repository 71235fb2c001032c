"""Check the rule of an operator: differentiate a model that contains it, and compare with finite differences.

The differences are central differences in float64, computed by onnxruntime or, if it lacks a kernel, by onnx.reference.
Neither shares code with the rules. For a function f and a claimed gradient G at a point x, every direction d must
satisfy (f(x + h d) - f(x - h d)) / 2h = <G, d> up to O(h^2).

Source: JAX's `check_grads` and the classical gradient check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import CheckFailed
from onnxgrad_cli.execution.double import widened
from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.files import ModelSource, read_model
from onnxgrad_cli.ir.types import Arrays, is_float

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun


def gradcheck(
    model: ModelSource,
    point: Mapping[str, np.ndarray],
    *,
    wrt: Sequence[str] = (),
    of: Sequence[str] = (),
    order: int = 1,
    tolerance: float = 1e-6,
    step: float = 1e-6,
    seed: int = 0,
    ops: Sequence[type[OpRun]] = (),
) -> float:
    """Differentiate a model and compare its gradients with central differences.

    Args:
        model: any model, as a file, as the bytes of a file, or in memory. It is computed in float64, and not changed.
        point: input -> an array. The function must be differentiable there, so avoid points such as 0 for Relu.
        wrt: the inputs to differentiate with respect to; by default all float inputs.
        of: the outputs to differentiate; by default all float outputs.
        order: the highest order of derivatives to check: 1 checks gradients, 2 also their gradients, and so on.
        tolerance: the largest accepted relative error of a directional derivative of order 1; ten times as much for
            each further order.
        step: the step of the central differences.
        seed: the seed of the random cotangents and directions.
        ops: Python implementations of operators that onnxruntime and onnx.reference lack.

    Returns:
        The largest relative error found.

    Raises:
        CheckFailed: a gradient has a different shape than its input, or a directional derivative differs from the
            measured one.
        UnsupportedError: the model can't be differentiated.
    """
    model, _ = read_model(model)
    rng = np.random.default_rng(seed)
    values = {name: widened(np.asarray(x)) for name, x in point.items()}
    wanted = _inputs(model, wrt or [name for name, x in values.items() if x.dtype.kind == "f"])
    ends = [output.name for output in model.graph.output if (output.name in of if of else is_float(output.type))]
    worst = 0.0
    for depth in range(order):
        backward = derive(model, of=ends, wrt=wanted)
        forward, run = (Executor(to_double(each), ops=ops) for each in (model, backward))
        outputs = forward(values)
        added = _inputs(backward, [value.name for value in backward.graph.input if value.name not in values])
        cotangents = {end: np.asarray(rng.standard_normal(outputs[end].shape)) for end in ends}
        values_then = {**values, **dict(zip(added, cotangents.values(), strict=True))}
        gradients = dict(zip(wanted, run(values_then).values(), strict=True))
        for name, gradient in gradients.items():
            if gradient.shape != values[name].shape:
                shapes = f"{gradient.shape}, but '{name}' has {values[name].shape}"
                raise CheckFailed(f"the gradient of '{name}' has the shape {shapes}")
        difference = vjp_difference(forward, values, cotangents, gradients, rng, step)
        if not difference.error <= tolerance * 10**depth:
            raise CheckFailed(
                f"order {depth + 1}, with respect to {', '.join(wanted)}: a directional derivative is "
                f"{difference.claimed:.9g}, but finite differences give {difference.measured:.9g} "
                f"({forward.name})",
                "correct the rule, or choose a point that is not at a kink",
            )
        worst = max(worst, difference.error)
        model, values, wanted = backward, values_then, _inputs(backward, [*wanted, *added])
        ends = [output.name for output in backward.graph.output]
    return worst


def _inputs(model: ModelProto, names: Sequence[str]) -> list[str]:
    """Return the inputs with these names, in the model's order."""
    return [value.name for value in model.graph.input if value.name in names]


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
        step: the step of the central differences.
        floor: the smallest scale for the relative error, as a fraction of the sum of the outputs' magnitudes.
    """

    def function(at: Arrays) -> float:
        outputs = run(at)
        return float(sum(np.sum(outputs[name] * cotangent) for name, cotangent in cotangents.items()))

    values = run(point)
    scale = sum(float(np.sum(np.abs(values[name] * cotangent))) for name, cotangent in cotangents.items())
    found = [directional(function, point, gradients, rng, step, floor * scale) for _ in range(2)]
    return max(found, key=lambda difference: difference.error)
