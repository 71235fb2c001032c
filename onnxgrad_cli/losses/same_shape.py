"""Losses that compare the output with a label of the same type and shape, per element or per sample.

Most equal a loss of PyTorch. They are written so that neither the value nor the gradient overflows or loses digits by
cancellation.
"""

from __future__ import annotations

import math

from onnx import TensorProto

from onnxgrad_cli.common.settings import Floats, require
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.losses.registry import loss


@loss("mse")
def mse(op, prediction, label):
    """Squared error, (p - y)². As torch.nn.MSELoss."""
    d = prediction - label
    return d * d


@loss("mae")
def mae(op, prediction, label):
    """Absolute error, |p - y|; its gradient is 0 at p = y. As torch.nn.L1Loss."""
    return op.Abs(prediction - label)


@loss("huber", options={"delta": "the error above which the loss is linear"})
def huber(op, prediction, label, *, delta: float = 1.0):
    """(p - y)² / 2 where |p - y| < delta, and delta (|p - y| - delta / 2) elsewhere. As torch.nn.HuberLoss."""
    require(delta > 0, "delta must be positive")
    d = prediction - label
    near = op.Clip(d, op.const(-delta, d), op.const(delta, d))
    return near * (d - near * 0.5)


@loss("smooth-l1", options={"beta": "the error above which the loss is linear; 0 gives mae"})
def smooth_l1(op, prediction, label, *, beta: float = 1.0):
    """(p - y)² / (2 beta) where |p - y| < beta, and |p - y| - beta / 2 elsewhere. As torch.nn.SmoothL1Loss."""
    require(beta >= 0, "beta must not be negative")
    if beta == 0:
        return mae(op, prediction, label)
    return huber(op, prediction, label, delta=beta) * (1 / beta)


@loss("elastic", options={"l1_ratio": "the fraction of the absolute error"})
def elastic(op, prediction, label, *, l1_ratio: float = 0.5):
    """Weighted sum of absolute and squared error, l1_ratio |p - y| + (1 - l1_ratio) (p - y)²."""
    require(0 <= l1_ratio <= 1, "l1_ratio must be between 0 and 1")
    return mae(op, prediction, label) * l1_ratio + mse(op, prediction, label) * (1 - l1_ratio)


@loss("bce", rather={"Softmax": "log"})
def bce(op, prediction, label):
    """Binary cross-entropy of probabilities, -y log p - (1 - y) log(1 - p). As torch.nn.BCELoss.

    Logarithms are clamped at -100 (float32: -87), and their gradient is 0 there. If a Sigmoid computes the output,
    bce-logits on the input of the Sigmoid is more precise.
    """
    return -(label * log_of(op, prediction) + (1 - label) * log_of(op, 1 - prediction))


@loss(
    "bce-logits",
    options={"pos_weight": "the weight of positive labels, one number or one per element of the last axis"},
    rather={"Sigmoid": "bce", "Softmax": "log"},
)
def bce_logits(op, prediction, label, *, pos_weight: Floats = None):
    """Binary cross-entropy of logits, y softplus(-p) + (1 - y) softplus(p). As torch.nn.BCEWithLogitsLoss."""
    positive = label * softplus(op, -prediction)
    if pos_weight is not None:
        positive = positive * per_element(op, "pos_weight", pos_weight, prediction, -1)
    return positive + (1 - label) * softplus(op, prediction)


@loss(
    "kl-div",
    rank=1,
    options={
        "log_target": "the label contains log-probabilities",
        "batchmean": "sum over each sample and average over the samples, as the mathematical divergence",
    },
    rather={"Softmax": "mse"},
)
def kl_div(op, prediction, label, *, log_target: bool = False, batchmean: bool = False):
    """Kullback-Leibler divergence y (log y - p), where the output p is a log-probability. As torch.nn.KLDivLoss."""
    target, log_of_target = (op.Exp(label), label) if log_target else (label, log_of(op, label))
    terms = target * log_of_target - target * prediction
    return op.sum(terms, range(1, terms.rank), keepdims=False) if batchmean and terms.rank > 1 else terms


@loss(
    "poisson-nll",
    options={
        "log_input": "the output is the logarithm of the rate",
        "full": "add Stirling's approximation of log y!",
        "eps": "a small number that is added to the rate before its logarithm, if log_input is false",
    },
)
def poisson_nll(op, prediction, label, *, log_input: bool = True, full: bool = False, eps: float = 1e-8):
    """Negative Poisson log-likelihood exp p - y p; p - y log p if p is a rate. As torch.nn.PoissonNLLLoss."""
    if log_input:
        losses = op.Exp(prediction) - label * prediction
    else:
        require(eps >= 0, "eps must not be negative")
        losses = prediction - label * op.Log(prediction + eps)
    if not full:
        return losses
    counted = label > 1
    safe = op.Where(counted, label, op.const(1.0, label))
    stirling = safe * op.Log(safe) - safe + op.Log(safe * (2 * math.pi)) * 0.5
    return losses + op.cast(counted, label) * stirling


@loss(
    "cosine",
    rank=2,
    options={
        "axis": "the axis along which the vectors lie",
        "eps": "a lower bound of the norms, which prevents a division by zero",
    },
)
def cosine(op, prediction, label, *, axis: int = -1, eps: float = 1e-8):
    """One minus the cosine of the angle between output and label. The cosine is as in torch.nn.CosineSimilarity."""
    checked_axis(prediction, axis)
    require(eps > 0, "eps must be positive")

    def square(x):
        return op.Max(op.sum(x * x, [axis], keepdims=False), max(eps * eps, MIN_PROBABILITY[x.dtype]))

    product = op.sum(prediction * label, [axis], keepdims=False)
    return 1 - product / (op.Sqrt(square(prediction)) * op.Sqrt(square(label)))


@loss("identity", label="none")
def identity(op, prediction):
    """The output itself, for a model that already computes its loss. There is no label."""
    return prediction


MIN_PROBABILITY: dict[int, float] = {TensorProto.FLOAT: 2.0**-126, TensorProto.DOUBLE: math.exp(-100)}
"""Map from an element type to the lower bound to which probabilities are clipped before a logarithm is taken.

PyTorch clamps logarithms at -100, so the bound for float64 is exp(-100). In float32, exp(-100) is subnormal, so the
bound is the smallest normal number.
"""


def log_of(op, p):
    """Return the logarithm of a probability `p`, or of `MIN_PROBABILITY` if `p` is smaller."""
    return op.Log(op.Max(p, MIN_PROBABILITY[p.dtype]))


def checked_axis(prediction: Val, axis: int) -> int:
    """Return an axis of the output as a non-negative number. The axis must exist and must not be the batch axis."""
    rank = prediction.rank
    require(-rank <= axis < rank, f"axis = {axis} does not exist: the output has {rank} axes")
    require(axis % rank > 0, "axis must not be the batch axis")
    return axis % rank


def softplus(op, x):
    """Return log(1 + exp x).

    At opset 18, onnxruntime has no float64 kernel for Softplus, so float64 values are computed by other operators.
    Their gradient at 0 is right too, because Max shares its gradient evenly between equal operands.
    """
    if x.dtype == TensorProto.DOUBLE:
        return op.Max(x, 0) + op.Log(op.Exp(-op.Abs(x)) + 1)
    return op.Softplus(x)


def weighted_mean(op: Op, total: Val, weight: Val) -> Val:
    """Return total / weight. If the weight is 0, the result is nan with gradient 0, as in PyTorch."""
    none = op.Equal(weight, op.const(0.0, weight))
    return op.Where(none, op.const(math.nan, total), total / op.Where(none, op.const(1.0, weight), weight))


def per_element(op, name, values, x, axis):
    """Return `values` as a constant of the type of `x`: one number, or one number per position along an axis of `x`."""
    size = x.shape[axis]
    fits = values.ndim == 0 or not isinstance(size, int) or len(values) == size
    require(fits, f"{name} has {values.size} values, but the output has {size} along that axis")
    return op.const(values, x)
