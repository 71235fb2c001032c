"""Reference optimizers in numpy, with which the proof compares the step of a training model.

The formulas come from the documentation of torch.optim, and from the papers of Lion and LAMB. They share no code with
the passes that emit the step. Options have PyTorch's meaning; `t` is the number of the step, from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from onnxgrad_cli.ir.types import Arrays

Options = Mapping[str, float]
Reference = Callable[[np.ndarray, np.ndarray, Arrays, Options, float, int], tuple[np.ndarray, Arrays]]
"""Type of a reference, in float64: weight, gradient, slots, options, learning rate, t -> next weight, next slots."""

UNDECIDED = 1e-5
"""If a sum is smaller than this fraction of its terms, its sign is not compared: float32 may give the other sign."""


def _sgd(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    return w - lr * (g + o["weight_decay"] * w), {}


def _momentum(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    buffer = g if t == 1 else o["momentum"] * s["m"] + (1 - o["dampening"]) * g
    return w - lr * buffer, {"m": buffer}


def _nesterov(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    buffer = g if t == 1 else o["momentum"] * s["m"] + g
    return w - lr * (g + o["momentum"] * buffer), {"m": buffer}


def _rmsprop(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    after = {"v": o["alpha"] * s["v"] + (1 - o["alpha"]) * g**2}
    variance = after["v"]
    if o["centered"]:
        after["a"] = o["alpha"] * s["a"] + (1 - o["alpha"]) * g
        variance = variance - after["a"] ** 2
    step = g / (np.sqrt(variance) + o["eps"])
    if o["momentum"] > 0:
        step = after["m"] = o["momentum"] * s["m"] + step
    return w - lr * step, after


def _adagrad(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    total = s["v"] + g**2
    return w - lr / (1 + (t - 1) * o["lr_decay"]) * g / (np.sqrt(total) + o["eps"]), {"v": total}


def _adam(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    direction, after = _adam_direction(g + o["weight_decay"] * w, s, o, t)
    return w - lr * direction, after


def _adamw(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    direction, after = _adam_direction(g, s, o, t)
    return w - lr * o["weight_decay"] * w - lr * direction, after


def _adam_direction(g: np.ndarray, s: Arrays, o: Options, t: int) -> tuple[np.ndarray, Arrays]:
    m = o["beta1"] * s["m"] + (1 - o["beta1"]) * g
    v = o["beta2"] * s["v"] + (1 - o["beta2"]) * g**2
    after = {"m": m, "v": v}
    if o.get("amsgrad"):
        v = after["vmax"] = np.maximum(s["vmax"], v)
    unbiased = m / (1 - o["beta1"] ** t), v / (1 - o["beta2"] ** t)
    return unbiased[0] / (np.sqrt(unbiased[1]) + o["eps"]), after


def _adamax(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    m = o["beta1"] * s["m"] + (1 - o["beta1"]) * g
    u = np.maximum(o["beta2"] * s["u"], np.abs(g) + o["eps"])
    return w - lr * m / ((1 - o["beta1"] ** t) * u), {"m": m, "u": u}


def _nadam(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    m = o["beta1"] * s["m"] + (1 - o["beta1"]) * g
    v = o["beta2"] * s["v"] + (1 - o["beta2"]) * g**2
    mu = o["beta1"] * (1 - 0.5 * 0.96 ** (np.arange(1, t + 2) * o["momentum_decay"]))
    now, then = (1 - mu[-2]) / (1 - np.prod(mu[:-1])), mu[-1] / (1 - np.prod(mu))
    step = (now * g + then * m) / (np.sqrt(v / (1 - o["beta2"] ** t)) + o["eps"])
    return w - lr * step, {"m": m, "v": v}


def _radam(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    m = o["beta1"] * s["m"] + (1 - o["beta1"]) * g
    v = o["beta2"] * s["v"] + (1 - o["beta2"]) * g**2
    unbiased, after = m / (1 - o["beta1"] ** t), {"m": m, "v": v}
    rest = 1 - o["beta2"] ** t
    most = 2 / (1 - o["beta2"]) - 1
    rho = most - 2 * t * o["beta2"] ** t / rest
    if rho <= 5:
        return w - lr * unbiased, after
    factor = np.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
    return w - lr * factor * unbiased * np.sqrt(rest) / (np.sqrt(v) + o["eps"]), after


def _adadelta(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    g = g + o["weight_decay"] * w
    v = o["rho"] * s["v"] + (1 - o["rho"]) * g**2
    delta = np.sqrt((s["d"] + o["eps"]) / (v + o["eps"])) * g
    return w - lr * delta, {"v": v, "d": o["rho"] * s["d"] + (1 - o["rho"]) * delta**2}


def _lion(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    old, new = o["beta1"] * s["m"], (1 - o["beta1"]) * g
    open_ = np.abs(old + new) < UNDECIDED * (np.abs(old) + np.abs(new))
    direction = np.where(open_, np.nan, np.sign(old + new))
    return w - lr * (direction + o["weight_decay"] * w), {"m": o["beta2"] * s["m"] + (1 - o["beta2"]) * g}


def _lamb(w: np.ndarray, g: np.ndarray, s: Arrays, o: Options, lr: float, t: int) -> tuple[np.ndarray, Arrays]:
    direction, after = _adam_direction(g, s, o, t)
    direction = direction + o["weight_decay"] * w
    lengths = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(direction**2))
    ratio = lengths[0] / lengths[1] if lengths[0] > 0 and lengths[1] > 0 else 1.0
    return w - lr * ratio * direction, after


REFERENCES: dict[str, Reference] = {
    "sgd": _sgd, "momentum": _momentum, "nesterov": _nesterov, "rmsprop": _rmsprop, "adagrad": _adagrad, "adam": _adam,
    "adamw": _adamw, "adamax": _adamax, "adadelta": _adadelta, "nadam": _nadam, "radam": _radam, "lion": _lion,
    "lamb": _lamb,
}  # fmt: skip
"""Name of an optimizer -> its reference."""


def clip(gradients: Arrays, norm: float | None, value: float | None) -> Arrays:
    """Clip gradients as torch.nn.utils.clip_grad_norm_ and clip_grad_value_ do."""
    if norm is not None:
        length = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
        return {name: g * min(norm / (length + 1e-6), 1.0) for name, g in gradients.items()}
    if value is not None:
        return {name: np.clip(g, -value, value) for name, g in gradients.items()}
    return gradients
