"""The standard's losses inside a model against PyTorch's in float64; class weights against a one-hot sum of our own."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from tests.facts import raises
from tests.harness import with_gradient
from tests.nodes import compare, gradients, normal, one_node, written_out

CLASSES = 5
NAMES = {"SoftmaxCrossEntropyLoss": functional.cross_entropy, "NegativeLogLikelihoodLoss": functional.nll_loss}
SHAPES = [(4, CLASSES), (3, CLASSES, 4), (2, CLASSES, 2, 1, 3)]
IGNORED = [None, 1, -100, 9]
"""Nothing; a class; and labels on either side of the classes."""


def labels(shape, ignored, dtype=np.int64):
    values = np.random.default_rng([1, *shape]).integers(0, CLASSES, (shape[0], *shape[2:]))
    if ignored is not None:
        values.reshape(-1)[::3] = ignored
    return values.astype(dtype)


def by_one_hot(x, label, weight, ignored, reduction):
    kept = label != (-1 if ignored is None else ignored)
    hot = functional.one_hot(torch.where(kept, label, 0), CLASSES).movedim(-1, 1) * kept.unsqueeze(1)
    weights = hot * weight.reshape(1, -1, *[1] * (x.ndim - 2))
    losses = -(x * weights).sum(1)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / weights.sum()}[reduction]


def reference(op, ignored, reduction):
    """PyTorch has no gradient of the class weights: theirs alone is the one-hot sum's."""

    def loss(scores, labels, weights=None):
        label = labels.long()
        known = {} if ignored is None else {"ignore_index": ignored}
        weight = None if weights is None else weights.detach()
        y = NAMES[op](scores, label, weight, reduction=reduction, **known)
        logs = scores.log_softmax(1)
        if weights is not None:
            chosen = logs if op == "SoftmaxCrossEntropyLoss" else scores
            other = by_one_hot(chosen.detach(), label, weights, ignored, reduction)
            torch.testing.assert_close(other, y)
            y = y + other - other.detach()
        return y, logs

    return loss


@pytest.mark.parametrize("opset", [13, 22])
@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.thinned(24, 5)
def test_losses(reduction, weighted, op, opset):
    forms = itertools.product(SHAPES, IGNORED, [np.int64, np.int32]) if opset == 13 else [(SHAPES[1], 1, np.int64)]
    for shape, ignored, dtype in forms:
        feeds = {
            "scores": normal(*shape), "labels": labels(shape, ignored, dtype),
            "weights": np.abs(normal(CLASSES)) if weighted else None,
        }  # fmt: skip
        outputs = ("y", "logs") if op == "SoftmaxCrossEntropyLoss" and ignored != -100 else ("y",)
        attributes = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
        compare(reference(op, ignored, reduction), op, feeds, outputs, attributes, opset=opset)


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_that_counts_for_nothing(op, weighted):
    """The mean of nothing is nan and its gradient 0, as PyTorch has it."""
    feeds = {
        "scores": normal(2, CLASSES),
        "labels": np.array([1, 1]),
        "weights": np.ones(CLASSES) if weighted else None,
    }
    model, given = one_node(op, feeds, ("y",), {"ignore_index": 1}, opset=18)
    values, _, found = gradients(written_out(model), given)
    assert np.isnan(values["y"])
    assert all((gradient == 0).all() for gradient in found.values())


def test_scores_far_apart():
    """In float32: the softmax minus one-hot of logits that differ by thousands."""
    scores = np.array([[4e3, -4e3, 0, 1, 2], [1e4, 1e4, -1e4, 0, 0]], np.float32)
    compare(reference("SoftmaxCrossEntropyLoss", None, "mean"), "SoftmaxCrossEntropyLoss",
            {"scores": scores, "labels": np.array([0, 2])}, ("y",), {}, tolerance=1e-6, opset=18)  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_half(reduction):
    """As many samples as float16 can't count."""
    count = 70_000 if reduction == "mean" else 300
    rng = np.random.default_rng(0)
    feeds = {
        "scores": rng.standard_normal((2, CLASSES, count // 2)).astype(np.float16),
        "labels": rng.integers(0, CLASSES, (2, count // 2)),
        "weights": np.full(CLASSES, 2, np.float16),
    }
    op = "SoftmaxCrossEntropyLoss"
    compare(reference(op, None, reduction), op, feeds, ("y",), {"reduction": reduction}, tolerance=3e-3,
            symbolic=(False,), opset=18)  # fmt: skip


def test_second_order():
    feeds = {"scores": normal(3, CLASSES, 2), "labels": labels((3, CLASSES, 2), 1), "weights": np.abs(normal(CLASSES))}
    model, given = one_node("SoftmaxCrossEntropyLoss", feeds, ("y",), {"ignore_index": 1}, opset=18)
    first = with_gradient(written_out(model), ["scores"], ["y"], "g_")
    second = with_gradient(first, ["scores"], ["g_grad_scores"], "h_")
    way = normal(3, CLASSES, 2, seed=4)
    found = Executor(second)({**given, "g_y": np.array(1.5), "h_g_grad_scores": way})["h_grad_scores"]
    x = torch.tensor(feeds["scores"], requires_grad=True)
    y = functional.cross_entropy(x, torch.tensor(feeds["labels"]), torch.tensor(feeds["weights"]), ignore_index=1)
    (slope,) = torch.autograd.grad(y * 1.5, x, create_graph=True)
    (expected,) = torch.autograd.grad((slope * torch.tensor(way)).sum(), x)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)


def test_another_reduction_is_refused():
    """Onnxruntime takes any word for a reduction, and sums."""
    feeds = {"scores": normal(4, CLASSES), "labels": labels((4, CLASSES), None)}
    for op in NAMES:
        model, _ = one_node(op, feeds, ["y"], {"reduction": "max"})
        with raises(UnsupportedError, "refused", "node", op, "max"):
            with_gradient(model, ["scores"], ["y"], "g_")
