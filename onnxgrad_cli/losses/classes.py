"""Losses of a classifier: the label is the number of a class, and axis 1 of the output runs over the classes.

The label picks from the logarithms, so that no one-hot array is made; the gradient is softmax minus one-hot. With
GatherElements a step on 512 x 30522 logits takes 26 ms, with a comparison against a range of classes 84 ms
(onnxruntime 1.31, 2 threads).
"""

from __future__ import annotations

import math

from onnxgrad_cli.common.settings import Floats, require
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.fusion import Fusion
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.losses.registry import loss
from onnxgrad_cli.losses.values import log_of, per_element

OPTIONS = {
    "class_weights": "one weight per class; the mean divides by the sum of the weights met",
    "ignore_index": "the label of samples that do not count",
}


@loss(
    "cross-entropy",
    label="class",
    rank=2,
    options={**OPTIONS, "label_smoothing": "the share of the label that is spread over all classes"},
    rather={"Softmax": "log"},
)
def cross_entropy(
    op,
    prediction,
    label,
    *,
    class_weights: Floats = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
):
    """Cross-entropy of logits: minus the logarithm of the label's softmax. As torch.nn.CrossEntropyLoss."""
    require(0 <= label_smoothing <= 1, "label_smoothing must lie between 0 and 1")
    logs = log_softmax(op, prediction)
    return likelihood(op, logs, label, class_weights, ignore_index, label_smoothing)


def log_softmax(op: Op, x: Val) -> Val:
    """Log-probabilities along axis 1.

    Where axes follow, onnxruntime's operator moves this one behind them: 14 ms for 4 x 21 x 128 x 128, 1 ms when it is
    written out (two threads).
    """
    if x.rank == 2:
        return op.LogSoftmax(x, axis=1)
    shifted = x - op.max(x, [1])
    powers = op.Exp(shifted)
    total = op.sum(powers, [1])
    y = shifted - op.Log(total)
    if op.training is not None:
        kept = (powers.name, total.name)
        op.training.fusions[y.name] = Fusion("ai.onnx::LogSoftmax", (x.name,), kept, through_log_softmax)
    return y


def through_log_softmax(op, g, x, powers, total):
    """A sum, as in the rule of LogSoftmax: where g is zero but at the labels, it is scattered onto the other term."""
    return (g + powers * -(op.sum(g, [1]) / total),)


@loss("nll", label="class", rank=2, options=OPTIONS, rather={"Softmax": "log"})
def nll(op, prediction, label, *, class_weights: Floats = None, ignore_index: int = -100):
    """Minus the label's log-probability, which the output holds. As torch.nn.NLLLoss."""
    return likelihood(op, prediction, label, class_weights, ignore_index)


@loss("log", label="class", rank=2, options=OPTIONS, rather={"LogSoftmax": "nll", "Sigmoid": "bce"})
def log(op, prediction, label, *, class_weights: Floats = None, ignore_index: int = -100):
    """Log loss: minus the logarithm of the label's probability, which the output holds. As sklearn's log_loss.

    A model that ends in a Softmax has such an output; cross-entropy on what goes into the Softmax is more precise.
    No logarithm goes below -100 (float32: -87), where its gradient is 0.
    """
    return likelihood(op, log_of(op, prediction), label, class_weights, ignore_index)


def likelihood(op, logs, label, class_weights, ignore_index, smoothing=0.0):
    """The weighted losses and their weights."""
    table = None if class_weights is None else per_element(op, "class_weights", class_weights, logs, 1)
    if table is not None:
        require(
            class_weights.ndim == 1 and bool((class_weights >= 0).all()), "class_weights: one a class, none negative"
        )
    return picked(op, logs, label, table, ignore_index, smoothing)


def picked(
    op: Op, logs: Val, label: Val, table: Val | None = None, ignore_index: int | None = None, smoothing: float = 0.0
) -> tuple[Val, Val | None]:
    """Minus the logarithms (N, C, ...) at the labels (N, ...), weighted, and their weights (None: all are 1).

    A negative label other than `ignore_index` makes both nan. `table` holds one weight a class.
    """
    known, weights, ignored = label, None, None
    if ignore_index is not None:
        ignored = op.Equal(label, ignore_index)
        known = op.Where(ignored, op.const(0, label), label)
        weights = op.cast(op.Not(ignored), logs)
    losses = -op.squeeze(op.GatherElements(logs, op.unsqueeze(known, [1]), axis=1), [1])
    one = op.const(1.0, logs) if weights is None else weights
    counted = op.Where(known < 0, op.const(math.nan, logs), one)
    weights = None if weights is None else counted
    if table is not None:
        share = op.Gather(table, known)
        losses, weights = losses * share, share * counted
    if smoothing:
        spread = logs if table is None else logs * op.unsqueeze(table, range(1, logs.rank - 1))
        losses = losses * (1 - smoothing) - op.mean(spread, [1], keepdims=False) * smoothing
    losses = losses * counted
    return losses if ignored is None else op.Where(ignored, op.const(0.0, logs), losses), weights
