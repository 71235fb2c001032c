"""Steps against the gradient, or against a sum of the gradients so far: one rate for all elements of a weight."""

from __future__ import annotations

from onnxgrad_cli.common.settings import require
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.optimizers.registry import State, optimizer

DECAY = "added to the gradient: this times the weight"
MOMENTUM = "how much of the sum so far stays"
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
        "dampening": "how much of each gradient but the first is left out of the sum",
        "weight_decay": DECAY,
    },
)
def momentum(op, w, g, state, *, momentum: float = 0.9, dampening: float = 0.0, weight_decay: float = 0.0):
    """Descent with momentum, m = momentum m + g, w - rate m. As torch.optim.SGD(momentum=...).

    Source: B. T. Polyak, Some methods of speeding up the convergence of iteration methods, 1964; the form without the
    rate in m is that of Sutskever et al., On the importance of initialization and momentum, ICML 2013.
    """
    return w - state.rate * _sum(op, decayed(w, g, weight_decay), state, momentum, dampening)


@optimizer("nesterov", slots=SUM, options={"momentum": MOMENTUM, "weight_decay": DECAY})
def nesterov(op, w, g, state, *, momentum: float = 0.9, weight_decay: float = 0.0):
    """Descent with Nesterov's momentum, m = momentum m + g, w - rate (g + momentum m). As torch.optim.SGD(nesterov).

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """
    g = decayed(w, g, weight_decay)
    return w - state.rate * (g + momentum * _sum(op, g, state, momentum, 0.0))


def _sum(op: Op, g: Val, state: State, momentum: float, dampening: float) -> Val:
    require(momentum >= 0, "momentum must not be negative")
    if dampening:
        g = g * op.Where(op.Equal(state.count, op.const(0.0, g)), op.const(1.0, g), op.const(1 - dampening, g))
    state["m"] = momentum * state["m"] + g
    return state["m"]


def decayed(w: Val, g: Val, weight_decay: float) -> Val:
    """The gradient of the loss and of weight_decay / 2 times the sum of the squares of the weight."""
    require(weight_decay >= 0, "weight_decay must not be negative")
    return g + weight_decay * w if weight_decay else g
