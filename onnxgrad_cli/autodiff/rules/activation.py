"""Rules of activation functions. All conventions at kinks are those of PyTorch.

If a derivative can be computed from the output `y`, the rule uses `y`, so that the input x need not be kept.
"""

from __future__ import annotations

import math

from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import formula_rule, no_gradient, rule
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require

no_gradient("Hardmax", kink="0 at the jumps too")

GELU_SATURATION_SQUARE = 100.0
"""For x² above this, Gelu(x) is x or 0 in every type, so x² may be clipped. In float16, x² overflows at x = 256."""

STEP_SLOPE = 3e38
"""A slope with which HardSigmoid is a step function: 1 for every positive normal float32, and 0 for x <= 0."""

BELOW = -1e-30
"""The offset of this HardSigmoid, practically 0. OpenVINO replaces an offset of exactly 0 by the default 0.5."""


def step(op: Op, x: Val) -> Val:
    """Return 1 where `x` > 0 and 0 elsewhere, in the type of `x`.

    For float32, the step is written as a steep HardSigmoid, whose derivative is zero like the derivative of a step.
    Multiplying by it takes 0.3 to 0.8 times as long as multiplying by Cast(x > 0), which takes half as long as a Where
    (1024x3072 and 4096x3136, two threads). For other types onnxruntime has no HardSigmoid kernel, so Cast(x > 0) is
    used.
    """
    if x.dtype == TensorProto.FLOAT:
        return op.HardSigmoid(x, alpha=STEP_SLOPE, beta=BELOW)
    return op.cast(x > 0, x)


def split(op: Op, g: Val, x: Val) -> tuple[Val, Val]:
    """Split `g` into two addends: `g` where `x` > 0 and 0 elsewhere, and `g` where `x` <= 0 and 0 elsewhere."""
    above = g * step(op, x)
    return above, g - above


relu = formula_rule("Relu", lambda op, g, y, x: g * step(op, y), kink="0 at x = 0")


@rule("LeakyRelu", kink="alpha at x = 0")
def leaky_relu(op, g, y, x, *, alpha):
    above, below = split(op, g, x)
    return above + below * alpha


LARGER_SLOPE = (
    "its slope is larger than x, which the standard forbids, but onnxruntime broadcasts x",
    "give the slope the shape of x, or of the last axes of x",
)


def _is_no_larger(slope: Val, x: Val) -> bool:
    """Return True if `slope` broadcasts to the shape of `x`. Unknown sizes are assumed to fit."""
    pairs = zip(reversed(slope.shape), reversed(x.shape), strict=False)
    return slope.rank <= x.rank and all(a in (1, b) or isinstance(a, str) or isinstance(b, str) for a, b in pairs)


@rule("PRelu", kink="the slope at x = 0")
def prelu(op, g, y, x, slope):
    require(_is_no_larger(slope, x), *LARGER_SLOPE)
    above, below = split(op, g, x)
    return above + below * slope, below * x if op.wants(slope) else None


def _exponential(op: Op, g: Val, x: Val, scale: float, rate: float) -> Val:
    """Return `g` where x > 0, and g * scale * exp(x * rate) elsewhere."""
    above, below = split(op, g, x)
    decay = op.Exp(op.Min(x, 0.0) * rate if rate != 1.0 else op.Min(x, 0.0))
    return above + below * (decay * scale if scale != 1.0 else decay)


@rule("Elu", kink="alpha at x = 0")
def elu(op, g, y, x, *, alpha):
    """y = x above zero, alpha (exp(x) - 1) below.

    Below zero, the derivative alpha exp(x) is not computed as y + alpha, which would lose all digits far below zero.
    """
    return _exponential(op, g, x, alpha, 1.0)


@rule("Selu", kink="gamma alpha at x = 0")
def selu(op, g, y, x, *, alpha, gamma):
    """y = gamma elu(x)."""
    return _exponential(op, g * gamma, x, alpha, 1.0)


@rule("Celu")
def celu(op, g, y, x, *, alpha):
    """y = max(0, x) + min(0, alpha (exp(x / alpha) - 1)), which has a continuous derivative."""
    return _exponential(op, g, x, 1.0, 1.0 / alpha)


thresholded_relu = formula_rule(
    "ThresholdedRelu", lambda op, g, y, x, *, alpha: g * op.cast(x > alpha, x), kink="0 at x = alpha"
)
formula_rule("Shrink", lambda op, g, y, x, *, bias, lambd: g * op.cast(op.Abs(x) > lambd, x), kink="0 at |x| = lambd")


@rule("HardSigmoid", kink="0 at both ends")
def hard_sigmoid(op, g, y, x, *, alpha, beta):
    if alpha >= STEP_SLOPE / 2:
        return None
    return g * op.cast(op.And(y > 0, y < 1), x) * alpha


@rule("HardSwish", kink="0 at x = -3, 1 at x = 3")
def hard_swish(op, g, y, x):
    """y = x h(x) with h = clip(x / 6 + 1/2, 0, 1). Where h is not clipped, y' = h + x / 6 = 2 h - 1/2."""
    h = op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    return g * op.Where(op.And(h > 0, h < 1), h * 2 - 0.5, h)


@rule("Softsign")
def softsign(op, g, y, x):
    d = op.Abs(x) + 1
    return g / (d * d)


softplus = formula_rule("Softplus", lambda op, g, y, x: g * op.Sigmoid(x))
sigmoid = formula_rule("Sigmoid", lambda op, g, y, x: g * y * (1 - y))
tanh = formula_rule("Tanh", lambda op, g, y, x: g * (1 - y * y))


@rule("Gelu")
def gelu(op, g, y, x, *, approximate):
    """y = x cdf(x), where cdf is that of the normal distribution, or with approximate='tanh' y = x sigmoid(2 u).

    Here u = sqrt(2/pi) (x + 0.044715 x^3).

    Source: D. Hendrycks and K. Gimpel, Gaussian Error Linear Units, 2016. The sigmoid form of the tanh
    approximation takes 0.77 times as long as the textbook form (1024x3072).
    """
    if approximate == "tanh":
        a = 2 * math.sqrt(2 / math.pi)
        square = x * x if x.dtype != TensorProto.FLOAT16 else op.Min(x * x, GELU_SATURATION_SQUARE)
        s = op.Sigmoid(x * (square * (0.044715 * a) + a))
        return g * (s + y * (1 - s) * (square * (3 * 0.044715 * a) + a))
    t = x * math.sqrt(0.5)
    cdf = (op.Erf(t) + 1) * 0.5
    pdf = op.Exp(-math.log(2 * math.pi) / 2 - t * t)
    return g * (cdf + x * pdf)


@rule("Mish")
def mish(op, g, y, x):
    """y = x tanh(softplus(x)). Source: D. Misra, Mish, 2019."""
    t = op.Tanh(op.Softplus(x))
    return g * (t + x * op.Sigmoid(x) * (1 - t * t))


@rule("Softmax", versions=(13, None))
def softmax(op, g, y, x, *, axis):
    """dx = y (g - sum(y g)).

    If a row of x is -inf everywhere, its y is nan. A model may replace these nan by a Where, so that their `g` is 0.
    But 0 * nan is nan. In this case each nan in y is replaced by 0 first, so that the row gets the cotangent 0.
    """
    if _replaced(op, y.name):
        y = op.Where(op.IsNaN(y), op.const(0.0, y), y)
    return y * (g - op.sum(y * g, [axis]))


def _replaced(op: Op, name: str) -> bool:
    """Return True if a Where replaces some elements of a value, as exported attention does for fully masked rows."""
    return any(
        (node.op_type == "Where" and position > 0)
        or (node.op_type in ("Cast", "Identity") and _replaced(op, node.output[0]))
        for node, position in op.readers(name)
    )


@rule("LogSoftmax", versions=(13, None))
def log_softmax(op, g, y, x, *, axis):
    """dx = g + exp(y) (-sum(g)). If `g` is zero except at labels, the Add becomes a scatter onto the other term."""
    return g + op.Exp(y) * -op.sum(g, [axis])


@rule("Dropout", versions=(12, None))
def dropout(op, gs, ys, x, ratio, training_mode, *, seed):
    """y = x mask / (1 - ratio) in training mode, otherwise x.

    The mask must be an output of the node, because a mask that is drawn again would differ.
    """
    g, mask = gs[0], ys[1] if len(ys) > 1 else None
    if training_mode is None or (training_mode.const is not None and not training_mode.const):
        return g, None, None
    hint = "build with `mode='train'`, which adds the output, or with `mode='eval'`, which removes the Dropout"
    require(mask, "it is a Dropout in training mode without the mask output", hint)
    ratio = op.const(0.5, x) if ratio is None else ratio
    if ratio.const is not None and ratio.const >= 1:
        return None, None, None
    scale = 1 / (1 - op.cast(ratio, x)) if ratio.const is None else op.const(1 / (1 - float(ratio.const)), x)
    if training_mode.const is None:
        scale = op.Where(training_mode, scale, op.const(1.0, x))
    return g * (op.cast(mask, x) * scale), op.no("the ratio of a Dropout can't be trained"), None
