"""Steps whose size adapts to the gradients so far, element by element."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.common.settings import require
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.optimizers.descent import DECAY, decayed
from onnxgrad_cli.optimizers.registry import State, optimizer

EPS = "added to the root that is divided by"
SHRINK = "the weight shrinks by this times the rate"
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
    require_shares(alpha=alpha)
    require(eps >= 0 and momentum >= 0, "eps and momentum must not be negative")
    g = decayed(w, g, weight_decay)
    spread = decaying_mean(state, "v", alpha, g * g)
    if centered:
        a = decaying_mean(state, "a", alpha, g)
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
    return w - adam_step(op, decayed(w, g, weight_decay), state, state.rate, beta1, beta2, eps, amsgrad)


@optimizer("adamw", slots=MEANS, options={**ADAM, "weight_decay": SHRINK})
def adamw(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01,
    amsgrad: bool = False,
):  # fmt: skip
    """Adam after w (1 - rate weight_decay): the weight decay is no part of the gradient. As torch.optim.AdamW.

    Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    require(weight_decay >= 0, "weight_decay must not be negative")
    shrunk = w * (1 - state.rate * weight_decay) if weight_decay else w
    return shrunk - adam_step(op, g, state, state.rate, beta1, beta2, eps, amsgrad)


@optimizer(
    "adamax",
    slots={"m": MEANS["m"], "u": "the decaying maximum of their magnitudes"},
    options={
        "beta1": ADAM["beta1"],
        "beta2": "how much of the maximum stays",
        "eps": "added to the magnitudes",
        "weight_decay": DECAY,
    },
)
def adamax(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
):  # fmt: skip
    """w - rate m / u, m the unbiased decaying mean of g, u = max(beta2 u, |g| + eps). As torch.optim.Adamax.

    Source: D. Kingma and J. Ba, Adam: A Method for Stochastic Optimization, ICLR 2015, section 7.1.
    """
    require_shares(beta1=beta1, beta2=beta2)
    require(eps >= 0, "eps must not be negative")
    g = decayed(w, g, weight_decay)
    m = decaying_mean(state, "m", beta1, g)
    u = state["u"] = op.Max(beta2 * state["u"], op.Abs(g) + eps)
    return w - state.rate / mean_weight(op, beta1, state.count + 1) * m / u


@optimizer(
    "adadelta",
    slots={"v": "the decaying mean of the squared gradients", "d": "the decaying mean of the squared steps"},
    options={
        "rho": "how much of either mean stays",
        "eps": "added to the means before their roots",
        "weight_decay": DECAY,
    },
)
def adadelta(op, w, g, state, *, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0):
    """w - rate d, d = √(mean of d²) / √(mean of g²) g. As torch.optim.Adadelta, whose rate begins at 1.

    Source: M. Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012.
    """
    require_shares(rho=rho)
    require(eps >= 0, "eps must not be negative")
    g = decayed(w, g, weight_decay)
    v = decaying_mean(state, "v", rho, g * g)
    step = op.Sqrt(state["d"] + eps) / op.Sqrt(v + eps) * g
    decaying_mean(state, "d", rho, step * step)
    return w - state.rate * step


@optimizer(
    "nadam",
    slots={slot: MEANS[slot] for slot in ("m", "v")},
    options={
        **{option: ADAM[option] for option in ("beta1", "beta2", "eps")},
        "momentum_decay": "how fast the momentum rises from half of beta1 to beta1",
        "weight_decay": DECAY,
    },
)
def nadam(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, momentum_decay: float = 0.004,
    weight_decay: float = 0.0,
):  # fmt: skip
    """Adam with Nesterov's momentum. As torch.optim.NAdam, whose rate begins at 0.002.

    The momentum of step t is beta1 (1 - 0.96^(t momentum_decay) / 2).

    Source: T. Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016.
    """
    require_shares(beta1=beta1, beta2=beta2)
    require(eps >= 0 and momentum_decay >= 0, "eps and momentum_decay must not be negative")
    g, steps = decayed(w, g, weight_decay), state.count + 1
    m, v = decaying_mean(state, "m", beta1, g), decaying_mean(state, "v", beta2, g * g)
    decay = momentum_decay * math.log(0.96)

    def momentum(steps: Val) -> Val:
        return beta1 * (1 - 0.5 * op.Exp(steps * decay))

    root = op.Sqrt(mean_weight(op, beta2, steps))
    now = (1 - momentum(steps)) / _momenta_weight(op, beta1, decay, steps)
    then = momentum(steps + 1) / _momenta_weight(op, beta1, decay, steps + 1)
    return w - (state.rate * root) * (now * g + then * m) / (op.Sqrt(v) + root * eps)


def _momenta_weight(op: Op, beta1: float, decay: float, steps: Val) -> Val:
    """Return 1 - the product of NAdam's momenta up to a step, without a state.

    The logarithm of 1 - exp(decay i) / 2 is a power series in exp(decay i). Each power is a geometric series over the
    steps i, which has a closed form. Terms beyond 52 are below the last digit of float64.
    """
    if beta1 == 0:
        return op.const(1.0, steps)
    if decay == 0:
        return mean_weight(op, beta1 / 2, steps)
    powers = np.arange(1.0, 53.0)
    shares = np.exp(decay * powers) / (2**powers * powers * -np.expm1(decay * powers))
    halves = op.Tanh(steps * op.const(powers * (-decay / 2), steps))
    logarithm = op.sum(op.const(shares, steps) * (2 * halves / (1 + halves)), [0], keepdims=False)
    half = op.Tanh((steps * -math.log(beta1) + logarithm) / 2)
    return 2 * half / (1 + half)


@optimizer(
    "radam",
    slots={slot: MEANS[slot] for slot in ("m", "v")},
    options={**{option: ADAM[option] for option in ("beta1", "beta2", "eps")}, "weight_decay": DECAY},
)
def radam(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
):  # fmt: skip
    """Adam without its division in the first steps, whose mean of squares varies too much. As torch.optim.RAdam.

    Source: L. Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, ICLR 2020, algorithm 2.
    """
    require_shares(beta1=beta1, beta2=beta2)
    require(eps >= 0, "eps must not be negative")
    g, steps = decayed(w, g, weight_decay), state.count + 1
    m, v = decaying_mean(state, "m", beta1, g), decaying_mean(state, "v", beta2, g * g)
    rate, longest = state.rate / mean_weight(op, beta1, steps), 2 / (1 - beta2) - 1
    if longest <= LEAST_LENGTH:
        return w - rate * m
    length = _length_of_mean(op, beta2, steps)
    known = op.Max(length, op.const(LEAST_LENGTH, steps))
    full = longest / ((longest - 4) * (longest - 2))
    root = op.Sqrt(mean_weight(op, beta2, steps))
    rectified = op.Sqrt((known - 4) * (known - 2) / known * full) * root / (op.Sqrt(v) + eps)
    return w - rate * m * op.Where(length > LEAST_LENGTH, rectified, op.const(1.0, steps))


LEAST_LENGTH = 5.0
"""The length of a mean of squares from which RAdam divides by its root."""


def _length_of_mean(op: Op, share: float, steps: Val) -> Val:
    """Return RAdam's rho: the number of squares that a decaying mean is worth.

    2 / (1 - share) - 1 - 2 steps share**steps / (1 - share**steps) is a small difference of large numbers, which
    float32 does not hold. With L(x) = coth(x) - 1/x it is steps - steps L(a steps) + L(a), a = -ln(share) / 2.
    """
    a = -math.log(share) / 2
    if steps.dtype == TensorProto.DOUBLE:
        return 2 / (1 - share) - 1 - 2 * steps * (1 / mean_weight(op, share, steps) - 1)
    x = steps * a
    square = x * x
    series = x * (1 / 3 - square * (1 / 45 - square * (2 / 945 - square * (1 / 4725 - square * (2 / 93555)))))
    langevin = op.Where(x < 0.5, series, 1 / op.Tanh(x) - 1 / x)
    return steps - steps * langevin + (1 / math.tanh(a) - 1 / a)


def adam_step(
    op: Op, g: Val, state: State, rate: Val | float, beta1: float, beta2: float, eps: float, amsgrad: bool = False
) -> Val:
    """What Adam subtracts: rate m / (√v + eps), m and v the unbiased decaying means of g and g²."""
    require_shares(beta1=beta1, beta2=beta2)
    require(eps >= 0, "eps must not be negative")
    steps = state.count + 1
    m, v = decaying_mean(state, "m", beta1, g), decaying_mean(state, "v", beta2, g * g)
    if amsgrad:
        v = state["vmax"] = op.Max(state["vmax"], v)
    root = op.Sqrt(mean_weight(op, beta2, steps))  # of scalars: a tensor less to divide
    return (rate * root / mean_weight(op, beta1, steps)) * m / (op.Sqrt(v) + root * eps)


def decaying_mean(state: State, slot: str, share: float, x: Val) -> Val:
    """Take `x` into a mean of which `share` stays."""
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


def require_shares(**shares: float) -> None:
    """Refuse what is no share of a mean."""
    for name, value in shares.items():
        require(0 <= value < 1, f"{name} must lie between 0 and 1, and not be 1")
