"""Check the rule of an operator: differentiate a model that contains it, and compare with finite differences.

The differences are central differences in float64, computed by onnxruntime or, if it lacks a kernel, by onnx.reference.
Neither shares code with the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import CheckFailed
from onnxgrad_cli.execution.double import widened
from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.files import ModelSource, read_model
from onnxgrad_cli.ir.types import Arrays, is_float
from onnxgrad_cli.verification.gradients.differences import vjp_difference

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
        step: the step of the differences.
        seed: the seed of the random cotangents and directions.
        ops: Python implementations of operators that onnxruntime and onnx.reference lack.

    Returns:
        The largest relative error found.

    Raises:
        CheckFailed: a gradient has another shape than its input, or a directional derivative differs from the measured
            one.
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
        _check_shapes(gradients, values)
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


def _check_shapes(gradients: Arrays, values: Arrays) -> None:
    """Check that each gradient has the shape of its input."""
    for name, gradient in gradients.items():
        if gradient.shape != values[name].shape:
            raise CheckFailed(
                f"the gradient of '{name}' has the shape {gradient.shape}, but '{name}' has {values[name].shape}"
            )


def _inputs(model: ModelProto, names: Sequence[str]) -> list[str]:
    """Return the inputs with these names, in the model's order."""
    return [value.name for value in model.graph.input if value.name in names]
