"""Steps whose size adapts to the gradients so far, element by element."""

from __future__ import annotations

import math

from onnxgrad_cli.emit import Op, Val
from onnxgrad_cli.optimizers.descent import DECAY, decayed
from onnxgrad_cli.optimizers.registry import State, optimizer
from onnxgrad_cli.settings import require

EPS = "added to the root that is divided by"
MEANS = {
    "m": "the decaying mean of the gradients",
    "v": "the decaying mean of their squares",
    "vmax": "amsgrad: the largest v so far",
}
ADAM = {
    "beta1": "how much of the mean of the gradients stays",
    "beta2": "how much of the mean of their squares stays",
    "eps": EPS,
    "amsgrad": "divide by the root of the largest mean of squares so far",
}


@optimizer(
    "rmsprop",
    slots={
        "v": "the decaying mean of the squared gradients",
        "a": "centered: the decaying mean of the gradients",
        "m": "with momentum: the decaying sum of the scaled gradients",
    },
    options={
        "alpha": "how much of the mean of squares stays",
        "eps": EPS,
        "weight_decay": DECAY,
        "momentum": "how much of the sum of the scaled gradients stays; 0: there is none",
        "centered": "divide by the root of the variance instead of the mean square",
    },
)
def rmsprop(
    op, w, g, state, *, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
    momentum: float = 0.0, centered: bool = False,
):  # fmt: skip
    """v = alpha v + (1 - alpha) g², w - rate g / (√v + eps). As torch.optim.RMSprop.

    Source: T. Tieleman and G. Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012; centered: A. Graves,
    Generating Sequences With Recurrent Neural Networks, 2013.
    """
    _require_shares(alpha=alpha)
    require(eps >= 0 and momentum >= 0, "eps and momentum must not be negative")
    g = decayed(w, g, weight_decay)
    spread = _mean(state, "v", alpha, g * g)
    if centered:
        a = _mean(state, "a", alpha, g)
        spread = op.Max(spread - a * a, op.const(0.0, g))  # rounding may leave less than nothing
    scaled = g / (op.Sqrt(spread) + eps)
    if momentum:
        scaled = state["m"] = momentum * state["m"] + scaled
    return w - state.rate * scaled


@optimizer(
    "adagrad",
    slots={"v": "the sum of the squared gradients"},
    options={
        "lr_decay": "the rate is divided by one plus this times the steps done",
        "weight_decay": DECAY,
        "initial_accumulator_value": "the sum before the first step",
        "eps": EPS,
    },
)
def adagrad(
    op, w, g, state, *, lr_decay: float = 0.0, weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0, eps: float = 1e-10,
):  # fmt: skip
    """v = v + g², w - rate g / (√v + eps). As torch.optim.Adagrad.

    Source: J. Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, JMLR 2011.
    """
    require(min(lr_decay, initial_accumulator_value, eps) >= 0, "lr_decay, eps and the sum must not be negative")
    g = decayed(w, g, weight_decay)
    state.start("v", initial_accumulator_value)
    state["v"] = state["v"] + g * g
    rate = state.rate / (1 + state.count * lr_decay) if lr_decay else state.rate
    return w - rate * g / (op.Sqrt(state["v"]) + eps)


@optimizer("adam", slots=MEANS, options={**ADAM, "weight_decay": DECAY})
def adam(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    amsgrad: bool = False,
):  # fmt: skip
    """w - rate m / (√v + eps), m and v the unbiased decaying means of g and g². As torch.optim.Adam.

    Source: D. Kingma and J. Ba, Adam: A Method for Stochastic Optimization, ICLR 2015; amsgrad: S. Reddi et al., On
    the Convergence of Adam and Beyond, ICLR 2018.
    """
    return w - _adam(op, decayed(w, g, weight_decay), state, beta1, beta2, eps, amsgrad)


@optimizer("adamw", slots=MEANS, options={**ADAM, "weight_decay": "the weight shrinks by this times the rate"})
def adamw(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01,
    amsgrad: bool = False,
):  # fmt: skip
    """Adam after w (1 - rate weight_decay): the weight decay is no part of the gradient. As torch.optim.AdamW.

    Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    require(weight_decay >= 0, "weight_decay must not be negative")
    shrunk = w * (1 - state.rate * weight_decay) if weight_decay else w
    return shrunk - _adam(op, g, state, beta1, beta2, eps, amsgrad)


def _adam(op: Op, g: Val, state: State, beta1: float, beta2: float, eps: float, amsgrad: bool) -> Val:
    """What a step of Adam subtracts."""
    _require_shares(beta1=beta1, beta2=beta2)
    require(eps >= 0, "eps must not be negative")
    steps = state.count + 1
    m, v = _mean(state, "m", beta1, g), _mean(state, "v", beta2, g * g)
    if amsgrad:
        v = state["vmax"] = op.Max(state["vmax"], v)
    root = op.Sqrt(v) / op.Sqrt(mean_weight(op, beta2, steps)) + eps
    return state.rate / mean_weight(op, beta1, steps) * m / root


def _mean(state: State, slot: str, share: float, x: Val) -> Val:
    state[slot] = share * state[slot] + (1 - share) * x
    return state[slot]


def mean_weight(op: Op, share: float, steps: Val) -> Val:
    """1 - share**steps, which is what the weights of a decaying mean add up to.

    As 2 t / (1 + t) with t = tanh(-steps ln(share) / 2), for in float32 the difference itself has lost three of its
    seven digits at share = 0.999.
    """
    if not 0 < share < 1:
        return 1.0 - op.const(share, steps) ** steps
    t = op.Tanh(steps * (-math.log(share) / 2))
    return 2 * t / (1 + t)


def _require_shares(**shares: float) -> None:
    for name, value in shares.items():
        require(0 <= value < 1, f"{name} must lie between 0 and 1, and not be 1")
