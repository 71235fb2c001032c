"""Optimizers whose step size is adapted by earlier gradients, the gradient's sign, or the norm of the weight."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import norm
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.optimizers.descent import DECAY, check_ranges, decayed
from onnxgrad_cli.optimizers.registry import State, optimizer

EPS = "a small number that is added to the root in the denominator"
SHRINK = "the weight shrinks by this factor times the learning rate"
MEANS = {
    "m": "the moving average of the gradients",
    "v": "the moving average of the squared gradients",
    "vmax": "amsgrad: the largest v so far",
}
MEAN_AND_SQUARES = {slot: MEANS[slot] for slot in ("m", "v")}
BETAS = {
    "beta1": "the decay rate of the moving average of the gradients",
    "beta2": "the decay rate of the moving average of the squared gradients",
    "eps": EPS,
}
ADAM = {**BETAS, "amsgrad": "divide by the root of the largest average of squares so far"}


@optimizer(
    "rmsprop",
    slots={
        "v": "the moving average of the squared gradients",
        "a": "centered: the moving average of the gradients",
        "m": "with momentum: the decaying sum of the scaled gradients",
    },
    options={
        "alpha": "the decay rate of the moving average of the squared gradients",
        "eps": EPS,
        "weight_decay": DECAY,
        "momentum": "the fraction of the previous sum of scaled gradients that is kept; 0 is without momentum",
        "centered": "divide by the root of the variance instead of the mean square",
    },
    cycled="momentum",
)
def rmsprop(
    op, w, g, state, *, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
    momentum: float = 0.0, centered: bool = False,
):  # fmt: skip
    """v = alpha v + (1 - alpha) g², then w - rate g / (√v + eps). As torch.optim.RMSprop.

    Source: T. Tieleman and G. Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012; centered: A. Graves,
    Generating Sequences With Recurrent Neural Networks, 2013.
    """
    check_ranges(alpha=alpha, eps=eps, momentum=momentum)
    g = decayed(w, g, weight_decay)
    spread = decaying_mean(state, "v", alpha, g * g)
    if centered:
        a = decaying_mean(state, "a", alpha, g)
        spread = op.Max(spread - a * a, op.const(0.0, g))  # rounding may make the difference negative
    scaled = g / (op.Sqrt(spread) + eps)
    if momentum:
        scaled = state["m"] = momentum * state["m"] + scaled
    return w - state.rate * scaled


@optimizer(
    "adagrad",
    slots={"v": "the sum of the squared gradients"},
    options={
        "lr_decay": "the learning rate is divided by 1 + lr-decay times the number of past steps",
        "weight_decay": DECAY,
        "initial_accumulator_value": "the sum before the first step",
        "eps": EPS,
    },
)
def adagrad(
    op, w, g, state, *, lr_decay: float = 0.0, weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0, eps: float = 1e-10,
):  # fmt: skip
    """v = v + g², then w - rate g / (√v + eps). As torch.optim.Adagrad.

    Source: J. Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, JMLR 2011.
    """
    check_ranges(lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value, eps=eps)
    g = decayed(w, g, weight_decay)
    state.start("v", initial_accumulator_value)
    state["v"] = state["v"] + g * g
    rate = state.rate / (1 + state.count * lr_decay) if lr_decay else state.rate
    return w - rate * g / (op.Sqrt(state["v"]) + eps)


@optimizer("adam", slots=MEANS, options={**ADAM, "weight_decay": DECAY}, cycled="beta1")
def adam(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    amsgrad: bool = False,
):  # fmt: skip
    """w - rate m / (√v + eps), with bias-corrected decaying means m of g and v of g². As torch.optim.Adam.

    Source: D. Kingma and J. Ba, Adam: A Method for Stochastic Optimization, ICLR 2015; amsgrad: S. Reddi et al., On the
    Convergence of Adam and Beyond, ICLR 2018.
    """
    return w - adam_step(op, decayed(w, g, weight_decay), state, state.rate, beta1, beta2, eps, amsgrad)


@optimizer("adamw", slots=MEANS, options={**ADAM, "weight_decay": SHRINK}, cycled="beta1")
def adamw(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01,
    amsgrad: bool = False,
):  # fmt: skip
    """Adam whose weight decay multiplies w by 1 - rate weight_decay and does not change g. As torch.optim.AdamW.

    Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    check_ranges(weight_decay=weight_decay)
    shrunk = w * (1 - state.rate * weight_decay) if weight_decay else w
    return shrunk - adam_step(op, g, state, state.rate, beta1, beta2, eps, amsgrad)


@optimizer(
    "adamax",
    slots={"m": MEANS["m"], "u": "the decaying maximum of the gradients' magnitudes"},
    options={
        "beta1": ADAM["beta1"],
        "beta2": "the decay rate of the maximum",
        "eps": "a small number that is added to the magnitudes",
        "weight_decay": DECAY,
    },
    cycled="beta1",
)
def adamax(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
):  # fmt: skip
    """w - rate m / u, with the bias-corrected mean m of g and u = max(beta2 u, |g| + eps). As torch.optim.Adamax.

    Source: D. Kingma and J. Ba, Adam: A Method for Stochastic Optimization, ICLR 2015, section 7.1.
    """
    check_ranges(beta1=beta1, beta2=beta2, eps=eps)
    g = decayed(w, g, weight_decay)
    m = decaying_mean(state, "m", beta1, g)
    u = state["u"] = op.Max(beta2 * state["u"], op.Abs(g) + eps)
    return w - state.rate / mean_weight(op, beta1, state.count + 1) * m / u


@optimizer(
    "adadelta",
    slots={"v": "the moving average of the squared gradients", "d": "the moving average of the squared steps"},
    options={
        "rho": "the decay rate of both moving averages",
        "eps": "a small number that is added to the averages before their roots",
        "weight_decay": DECAY,
    },
)
def adadelta(op, w, g, state, *, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0):
    """w - rate d, d = g √(mean of d²) / √(mean of g²). As torch.optim.Adadelta, where the rate is 1 by default.

    Source: M. Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012.
    """
    check_ranges(rho=rho, eps=eps)
    g = decayed(w, g, weight_decay)
    v = decaying_mean(state, "v", rho, g * g)
    step = op.Sqrt(state["d"] + eps) / op.Sqrt(v + eps) * g
    decaying_mean(state, "d", rho, step * step)
    return w - state.rate * step


@optimizer(
    "nadam",
    slots=MEAN_AND_SQUARES,
    options={
        **BETAS,
        "momentum_decay": "how fast the momentum rises from half of beta1 to beta1",
        "weight_decay": DECAY,
    },
)
def nadam(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, momentum_decay: float = 0.004,
    weight_decay: float = 0.0,
):  # fmt: skip
    """Adam with Nesterov's momentum. As torch.optim.NAdam, where the learning rate is 0.002 by default.

    The momentum of step t is beta1 (1 - 0.96^(t momentum_decay) / 2).

    Source: T. Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016.
    """
    check_ranges(beta1=beta1, beta2=beta2, eps=eps, momentum_decay=momentum_decay)
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
    """Return 1 minus the product of NAdam's momenta of all steps so far, computed from the number of steps only.

    The logarithm of the product is a sum over the steps i of log(1 - exp(decay i) / 2), which is a power series in
    exp(decay i). Summed over the steps, each power is a geometric series and has a closed form. After 52 terms, the
    rest is below the precision of float64.
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


@optimizer("radam", slots=MEAN_AND_SQUARES, options={**BETAS, "weight_decay": DECAY}, cycled="beta1")
def radam(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
):  # fmt: skip
    """Adam that does not divide by √v in the first steps, when v varies too much. As torch.optim.RAdam.

    Source: L. Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, ICLR 2020, algorithm 2.
    """
    check_ranges(beta1=beta1, beta2=beta2, eps=eps)
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
"""The result of `_length_of_mean` above which RAdam divides by the root of the mean of squares."""


def _length_of_mean(op: Op, share: float, steps: Val) -> Val:
    """Return RAdam's rho: the number of values of a simple moving average that is equivalent to the decaying mean.

    The paper's formula, 2 / (1 - share) - 1 - 2 steps share**steps / (1 - share**steps), is a small difference of large
    numbers, which is inaccurate in float32. With L(x) = coth(x) - 1/x and a = -ln(share) / 2, the same value is steps -
    steps L(a steps) + L(a).
    """
    a = -math.log(share) / 2
    if steps.dtype == TensorProto.DOUBLE:
        return 2 / (1 - share) - 1 - 2 * steps * (1 / mean_weight(op, share, steps) - 1)
    x = steps * a
    square = x * x
    series = x * (1 / 3 - square * (1 / 45 - square * (2 / 945 - square * (1 / 4725 - square * (2 / 93555)))))
    langevin = op.Where(x < 0.5, series, 1 / op.Tanh(x) - 1 / x)
    return steps - steps * langevin + (1 / math.tanh(a) - 1 / a)


@optimizer(
    "lion",
    slots={"m": "the moving average of the gradients"},
    options={
        "beta1": "the weight of the moving average in the direction of a step",
        "beta2": "the decay rate of the moving average for the next step",
        "weight_decay": SHRINK,
    },
)
def lion(op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.0):
    """w (1 - rate weight_decay) - rate sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g.

    Source: X. Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, algorithm 2.
    """
    check_ranges(beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    direction = op.Sign(beta1 * state["m"] + (1 - beta1) * g)
    decaying_mean(state, "m", beta2, g)
    return w - state.rate * (direction + weight_decay * w if weight_decay else direction)


@optimizer(
    "lamb",
    slots=MEAN_AND_SQUARES,
    options={**BETAS, "weight_decay": "this factor times the weight is added to Adam's direction"},
)
def lamb(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01
):  # fmt: skip
    """w - rate (|w| / |r|) r, where r is Adam's step plus weight_decay w; |w| / |r| is 1 if a norm is zero.

    Source: Y. You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020, algorithm
    2, with the norm of the weight itself.
    """
    check_ranges(weight_decay=weight_decay)
    r = adam_step(op, g, state, 1.0, beta1, beta2, eps)
    r = r + weight_decay * w if weight_decay else r
    ours, theirs = norm(op, w), norm(op, r)
    moves = op.And(ours > 0.0, theirs > 0.0)
    return w - state.rate * op.Where(moves, ours / theirs, op.const(1.0, ours)) * r


def adam_step(
    op: Op, g: Val, state: State, rate: Val | float, beta1: float | Val, beta2: float, eps: float, amsgrad: bool = False
) -> Val:
    """Return the step that Adam subtracts: rate m / (√v + eps), with bias-corrected means m of g and v of g²."""
    check_ranges(beta1=beta1, beta2=beta2, eps=eps)
    steps = state.count + 1
    m, v = decaying_mean(state, "m", beta1, g), decaying_mean(state, "v", beta2, g * g)
    if amsgrad:
        v = state["vmax"] = op.Max(state["vmax"], v)
    root = op.Sqrt(mean_weight(op, beta2, steps))  # multiplied into scalars, which saves a division of a whole tensor
    return (rate * root / mean_weight(op, beta1, steps)) * m / (op.Sqrt(v) + root * eps)


def decaying_mean(state: State, slot: str, share: float | Val, x: Val) -> Val:
    """Replace the decaying mean in a slot by share * mean + (1 - share) * x, and return the new mean."""
    state[slot] = share * state[slot] + (1 - share) * x
    return state[slot]


def mean_weight(op: Op, share: float | Val, steps: Val) -> Val:
    """Return 1 - share**steps, by which a decaying mean is divided to correct its bias.

    It is computed as 2 t / (1 + t) with t = tanh(-steps ln(share) / 2). In float32, the difference 1 - share**steps
    would lose three of seven digits at share = 0.999.
    """
    if isinstance(share, Val):
        t = op.Tanh(op.Log(share) * steps * -0.5)
        return 2 * t / (1 + t)
    if not 0 < share < 1:
        return 1.0 - op.const(share, steps) ** steps
    t = op.Tanh(steps * (-math.log(share) / 2))
    return 2 * t / (1 + t)
