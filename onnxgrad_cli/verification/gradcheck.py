"""The proof of a rule as its author makes it: any model that holds the operator, differentiated and measured.

The measure is a central difference in float64, on onnxruntime or where it has no kernel on onnx.reference; neither
knows the rules.
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
from onnxgrad_cli.verification.differences import vjp_difference

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
        model: any model (a file, the bytes of one, or itself); it is computed in float64, and not changed.
        point: an array for each input; keep it off kinks.
        wrt: the inputs to differentiate with respect to; by default all of floats.
        of: the outputs to differentiate; by default all of floats.
        order: 2 differentiates the gradient once more, and so on; each order is checked.
        tolerance: the largest relative error of a directional derivative, tenfold at each further order.
        step: of the differences.
        seed: of the random cotangents and directions.
        ops: Python implementations of operators that onnxruntime and onnx.reference lack.

    Returns:
        The largest relative error found.

    Raises:
        CheckFailed: a gradient has another shape than its input, or is not what is measured.
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
        _see_shapes(gradients, values)
        difference = vjp_difference(forward, values, cotangents, gradients, rng, step)
        if not difference.error <= tolerance * 10**depth:
            raise CheckFailed(
                f"order {depth + 1}, with respect to {', '.join(wanted)}: a directional derivative is "
                f"{difference.claimed:.9g}, and {difference.measured:.9g} by differences ({forward.name})",
                "the rule is wrong, or the point lies at a kink",
            )
        worst = max(worst, difference.error)
        model, values, wanted = backward, values_then, _inputs(backward, [*wanted, *added])
        ends = [output.name for output in backward.graph.output]
    return worst


def _see_shapes(gradients: Arrays, values: Arrays) -> None:
    """See that each gradient has the shape of its input."""
    for name, gradient in gradients.items():
        if gradient.shape != values[name].shape:
            raise CheckFailed(f"the gradient of '{name}', {values[name].shape}, has the shape {gradient.shape}")


def _inputs(model: ModelProto, names: Sequence[str]) -> list[str]:
    """The inputs of these names, in the model's order."""
    return [value.name for value in model.graph.input if value.name in names]
