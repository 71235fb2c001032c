"""Losses that compare the output with a label of its own type and shape, element by element or sample by sample.

Each is PyTorch's of the same name, written so that neither the value nor the gradient overflows or cancels.
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


@loss("huber", options={"delta": "the error at which the square becomes a line"})
def huber(op, prediction, label, *, delta: float = 1.0):
    """(p - y)²/2 up to |p - y| = delta, and a line of slope delta beyond. As torch.nn.HuberLoss."""
    require(delta > 0, "delta must be positive")
    d = prediction - label
    near = op.Clip(d, op.const(-delta, d), op.const(delta, d))
    return near * (d - near * 0.5)


@loss("smooth-l1", options={"beta": "the error at which the square becomes a line; 0 is mae"})
def smooth_l1(op, prediction, label, *, beta: float = 1.0):
    """(p - y)²/2 beta up to |p - y| = beta, and a line of slope 1 beyond. As torch.nn.SmoothL1Loss."""
    require(beta >= 0, "beta must not be negative")
    if beta == 0:
        return mae(op, prediction, label)
    return huber(op, prediction, label, delta=beta) * (1 / beta)


@loss("elastic", options={"l1_ratio": "the share of the absolute error"})
def elastic(op, prediction, label, *, l1_ratio: float = 0.5):
    """A mixture of both errors, l1_ratio |p - y| + (1 - l1_ratio) (p - y)²."""
    require(0 <= l1_ratio <= 1, "l1_ratio must lie between 0 and 1")
    return mae(op, prediction, label) * l1_ratio + mse(op, prediction, label) * (1 - l1_ratio)


@loss("bce", rather={"Softmax": "log"})
def bce(op, prediction, label):
    """Binary cross-entropy of probabilities, -y log p - (1 - y) log(1 - p). As torch.nn.BCELoss.

    No logarithm goes below -100 (float32: -87), where its gradient is 0. An output that comes from a Sigmoid loses
    precision on the way: bce-logits on what goes into it is better.
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
        "log_target": "the label holds log-probabilities",
        "batchmean": "sum over each sample, so that the mean is over samples: the mathematical divergence",
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
        "eps": "added to the rate before its logarithm, without log_input",
    },
)
def poisson_nll(op, prediction, label, *, log_input: bool = True, full: bool = False, eps: float = 1e-8):
    """Negative log-likelihood of counts, exp p - y p, or p - y log p for a rate. As torch.nn.PoissonNLLLoss."""
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
    options={"axis": "the axis along which the vectors lie", "eps": "the smallest norm that is divided by"},
)
def cosine(op, prediction, label, *, axis: int = -1, eps: float = 1e-8):
    """One minus the cosine of the angle between output and label. The cosine is torch.nn.CosineSimilarity's."""
    require(-prediction.rank <= axis < prediction.rank, f"axis = {axis}: the output has {prediction.rank} axes")
    require(axis % prediction.rank > 0, "axis must not be the batch")
    require(eps > 0, "eps must be positive")

    def square(x):
        return op.Max(op.sum(x * x, [axis], keepdims=False), max(eps * eps, SMALLEST[x.dtype]))

    product = op.sum(prediction * label, [axis], keepdims=False)
    return 1 - product / (op.Sqrt(square(prediction)) * op.Sqrt(square(label)))


@loss("identity", label="none")
def identity(op, prediction):
    """The output itself, which already is a loss; no label."""
    return prediction


SMALLEST: dict[int, float] = {TensorProto.FLOAT: 2.0**-126, TensorProto.DOUBLE: math.exp(-100)}
"""The smallest probability whose logarithm is taken: the smallest normal number, or what gives PyTorch's -100."""


def log_of(op, p):
    """The logarithm of a probability that may be 0."""
    return op.Log(op.Max(p, SMALLEST[p.dtype]))


def softplus(op, x):
    """log(1 + exp x). But at opset 18 onnxruntime has no Softplus for double; what stands in for it has the right
    slope at 0 too, since Max shares a tie evenly.
    """
    if x.dtype == TensorProto.DOUBLE:
        return op.Max(x, 0) + op.Log(op.Exp(-op.Abs(x)) + 1)
    return op.Softplus(x)


def weighted_mean(op: Op, total: Val, weight: Val) -> Val:
    """total / weight; where nothing weighs anything it is nan, and its gradient 0, as PyTorch's."""
    none = op.Equal(weight, op.const(0.0, weight))
    return op.Where(none, op.const(math.nan, total), total / op.Where(none, op.const(1.0, weight), weight))


def per_element(op, name, values, x, axis):
    """One number, or one for each place along an axis of `x`, as a constant."""
    size = x.shape[axis]
    require(
        values.ndim == 0 or not isinstance(size, int) or len(values) == size,
        f"{name} has {values.size} values, the output {size} along that axis",
    )
    return op.const(values, x)
