"""Gradient descent and momentum: steps with one learning rate for all elements of a weight."""

from __future__ import annotations

from onnxgrad_cli.common.settings import require
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.optimizers.registry import State, optimizer

DECAY = "L2 penalty: this factor times the weight is added to the gradient"
MOMENTUM = "the fraction of the previous sum that is kept at each step"
AVERAGED = frozenset({"alpha", "beta1", "beta2", "rho"})
"""The options that are decay rates of moving averages."""

SUM = {"m": "the decaying sum of the gradients"}


@optimizer("sgd", options={"weight_decay": DECAY})
def sgd(op, w, g, state, *, weight_decay: float = 0.0):
    """Gradient descent, w - rate g. As torch.optim.SGD."""
    return w - state.rate * decayed(w, g, weight_decay)


@optimizer(
    "momentum",
    slots=SUM,
    options={
        "momentum": MOMENTUM,
        "dampening": "the fraction of each gradient, except the first, that is left out of the sum",
        "weight_decay": DECAY,
    },
    cycled="momentum",
)
def momentum(op, w, g, state, *, momentum: float = 0.9, dampening: float = 0.0, weight_decay: float = 0.0):
    """Descent with momentum: m = momentum m + g, then w - rate m. As torch.optim.SGD(momentum=...).

    Source: B. T. Polyak, Some methods of speeding up the convergence of iteration methods, 1964. The form with the rate
    outside m is from Sutskever et al., On the importance of initialization and momentum, ICML 2013.
    """
    return w - state.rate * _sum(op, decayed(w, g, weight_decay), state, momentum, dampening)


@optimizer("nesterov", slots=SUM, options={"momentum": MOMENTUM, "weight_decay": DECAY}, cycled="momentum")
def nesterov(op, w, g, state, *, momentum: float = 0.9, weight_decay: float = 0.0):
    """Descent with Nesterov's momentum: m = momentum m + g, then w - rate (g + momentum m). As in torch.optim.SGD.

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """
    g = decayed(w, g, weight_decay)
    return w - state.rate * (g + momentum * _sum(op, g, state, momentum, 0.0))


def _sum(op: Op, g: Val, state: State, momentum: float | Val, dampening: float) -> Val:
    check_ranges(momentum=momentum)
    if dampening:
        g = g * op.Where(op.Equal(state.count, op.const(0.0, g)), op.const(1.0, g), op.const(1 - dampening, g))
    state["m"] = momentum * state["m"] + g
    return state["m"]


def check_ranges(**options: float | Val) -> None:
    """Raise an error unless the decay rates of averages are in [0, 1), and other options are not negative.

    A `Val`, which is known only at run time, is not checked.
    """
    for name, value in options.items():
        if isinstance(value, Val):
            continue
        require(value >= 0, f"{name} must not be negative, but is {value:g}")
        require(value < 1 or name not in AVERAGED, f"{name} must be below 1, but is {value:g}")


def decayed(w: Val, g: Val, weight_decay: float) -> Val:
    """Return the gradient of loss + weight_decay / 2 * |w|², which is g + weight_decay w."""
    check_ranges(weight_decay=weight_decay)
    return g + weight_decay * w if weight_decay else g
