"""Definitions of the optimizers in ai.onnx.preview.training, which have no kernels in onnxruntime.

The inputs of each operator are the learning rate R, the step counter T, all weights X, all their gradients G, and then
the optimizer states: the first state of every weight, then the second state of every weight.
Source: the operators' pages in the ONNX documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxgrad_cli.autodiff.registry import definition, refuse
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import PREVIEW
from onnxgrad_cli.ir.types import Dim
from onnxgrad_cli.optimizers.adaptive import mean_weight

refuse(
    "Gradient",
    "it requests a derivative, but does not compute it",
    "expand it first: onnxgrad expand MODEL",
    domain=PREVIEW,
)


@definition("Adagrad", domain=PREVIEW)
def adagrad(op, rate, step, *values, norm_coefficient, decay_factor, epsilon):
    r = rate / (1.0 + op.cast(step, rate) * decay_factor)

    def updated(x: Val, g: Val, h: Val) -> tuple[Val, ...]:
        g = norm_coefficient * x + g
        h = h + g * g
        return x - _times(op, r, g) / (op.Sqrt(h) + epsilon), h

    return _each(values, 3, updated)


@definition("Adam", domain=PREVIEW)
def adam(op, rate, step, *values, alpha, beta, epsilon, norm_coefficient, norm_coefficient_post):
    begun = op.Greater(step, op.const(0, step))
    # at T = 0 the corrected rate is not used, and T = 1 avoids 0 / 0
    t = op.cast(op.Where(begun, step, op.const(1, step)), rate)
    corrected = rate * op.Sqrt(mean_weight(op, beta, t)) / mean_weight(op, alpha, t)
    r = op.Where(begun, corrected, rate)

    def updated(x: Val, g: Val, v: Val, h: Val) -> tuple[Val, ...]:
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * (g * g)
        x = x - _times(op, r, v) / (op.Sqrt(h) + epsilon)
        return (1 - norm_coefficient_post) * x, v, h

    return _each(values, 4, updated)


@definition("Momentum", domain=PREVIEW)
def momentum(op, rate, step, *values, alpha, beta, mode, norm_coefficient):
    first = op.Equal(step, op.const(0, step))
    share = op.Where(first, op.const(1.0, rate), op.const(beta, rate))

    def updated(x: Val, g: Val, v: Val) -> tuple[Val, ...]:
        g = norm_coefficient * x + g
        v = alpha * v + _times(op, share, g)
        return x - _times(op, rate, g + alpha * v if mode == "nesterov" else v), v

    return _each(values, 3, updated)


def _each(values: Sequence[Val], kinds: int, updated: Callable[..., tuple[Val, ...]]) -> list[Val]:
    """Return the new values of all weights, then of all states.

    Args:
        values: all weights, then all gradients, then all states.
        kinds: the number of values for each weight: the weight X, its gradient G, and its states.
        updated: a function of X, G and the states of one weight, which returns its new X and states.

    Raises:
        Unknown: the number of values is not a multiple of `kinds`, or X, G and the states of a weight differ in shape.
    """
    count, rest = divmod(len(values), kinds)
    require(not rest, f"it has {len(values)} tensors, but needs {kinds} for each weight")
    tensors = [tuple(values[i::count]) for i in range(count)]
    for x, *others in tensors:
        for other in others:
            if other.rank != x.rank or any(map(_unequal, other.shape, x.shape)):
                sizes = [", ".join(map(str, each.shape)) for each in (other, x)]
                raise Unknown(f"'{other.name}' has the shape [{sizes[0]}], but its tensor '{x.name}' has [{sizes[1]}]")
    return [value for kind in zip(*(updated(*each) for each in tensors), strict=True) for value in kind]


def _unequal(a: Dim, b: Dim) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _times(op: Op, factor: Val, x: Val) -> Val:
    """Return the product of a scalar and a tensor. The scalar may have a different float type."""
    return op.cast(factor, x) * x
