"""Metrics of classes beside scikit-learn, over batches of unequal sizes."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.class_metrics import Confusion
from onnxgrad_cli.training.metrics import metrics_of
from tests.facts import raises
from tests.training.test_metrics import LOGITS, taken

random = np.random.default_rng(0)


CUTS = (1, 8, 9, 40, 41)


CLASSES = random.integers(0, 7, 60)


LABELS = random.integers(0, 5, 60)  # of the seven classes two are no label; one of them is never chosen either


CHOSEN = np.where(random.random((60, 1)) < 0.5, np.eye(7)[LABELS] * 3, 0) + np.where(np.arange(7) == 6, -9.0, LOGITS)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_of_classes(average: str) -> None:
    from sklearn import metrics as sklearn

    found = CHOSEN.argmax(1)
    assert 5 in found and 6 not in found
    wanted = sklearn.f1_score(LABELS, found, average=average, zero_division=0)
    assert 0.1 < wanted < 0.9
    assert taken(f"f1-{average}", CHOSEN, LABELS) == pytest.approx(wanted, rel=1e-12)
    counted = LABELS != 2
    wanted = sklearn.f1_score(LABELS[counted], found[counted], average=average, zero_division=0)
    assert taken(f"f1-{average}", CHOSEN, LABELS, ignore_index=2) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("average", ["binary", "macro", "micro", "weighted"])
@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_f1_of_yes_and_no(average: str, shape: tuple[int, ...]) -> None:
    from sklearn import metrics as sklearn

    scores, labels = random.normal(0.3, 1, shape), random.integers(0, 2, shape).astype(np.float32)
    name = "f1" if average == "binary" else f"f1-{average}"
    wanted = sklearn.f1_score(labels.ravel(), scores.ravel() > 0, average=average)
    assert taken(f"{name}:threshold=0", scores, labels) == pytest.approx(wanted, rel=1e-12)
    two = np.stack([-scores.ravel(), scores.ravel()], 1)
    assert taken(name, two, labels.ravel().astype(int)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_of_several_answers(average: str) -> None:
    from sklearn import metrics as sklearn

    scores, labels = random.normal(0.3, 1, (60, 4)), random.integers(0, 2, (60, 4))
    scores[:, 3], labels[:, 3] = -1, 0
    wanted = sklearn.f1_score(labels, scores > 0.5, average=average, zero_division=0)
    assert taken(f"f1-{average}", scores, labels) == pytest.approx(wanted, rel=1e-12)
    with raises(UsageError, "conflict", "f1", "4"):
        taken("f1", scores, labels)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(np.asarray(logits, np.float64))
    return powers / powers.sum(1, keepdims=True)


def test_auc_of_classes_is_by_probability() -> None:
    from sklearn import metrics as sklearn

    logits = CHOSEN * 3
    labels = np.where(np.arange(60) < 7, np.arange(60), LABELS)
    wanted = sklearn.roc_auc_score(labels, softmax(logits), multi_class="ovr")
    assert taken("auc", logits, labels) == pytest.approx(wanted, rel=1e-12)
    assert taken("auc", softmax(logits), labels) == pytest.approx(wanted, rel=1e-12)
    areas = [sklearn.roc_auc_score(label == LABELS, softmax(logits)[:, label]) for label in range(5)]
    assert taken("auc", logits, LABELS) == pytest.approx(np.mean(areas), rel=1e-12)  # two classes have no samples
    two = sklearn.roc_auc_score(labels[labels < 2], logits[labels < 2, 1] - logits[labels < 2, 0])
    assert taken("auc", logits[:, :2], np.where(labels < 2, labels, -100)) == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 3)])
def test_auc_of_yes_and_no_with_equal_scores(shape: tuple[int, ...]) -> None:
    from sklearn import metrics as sklearn

    scores, labels = random.normal(size=shape).round(1), random.integers(0, 2, shape).astype(np.float32)
    wanted = sklearn.roc_auc_score(labels.reshape(60, -1), scores.reshape(60, -1))
    assert taken("auc", scores, labels) == pytest.approx(wanted, rel=1e-12)
    assert np.isnan(taken("auc", scores, np.zeros(shape)))


def test_perplexity() -> None:
    import torch

    labels = np.where(np.arange(60) % 3, CLASSES, -100)
    wanted = torch.nn.functional.cross_entropy(torch.tensor(LOGITS), torch.tensor(labels)).exp().item()
    assert taken("perplexity", LOGITS, labels) == pytest.approx(wanted, rel=1e-5)
    assert taken("perplexity", np.log(softmax(LOGITS)), labels) == pytest.approx(wanted, rel=1e-5)
    logits, tokens = random.normal(size=(60, 5, 7)), random.integers(0, 7, (60, 5))
    tokens[::3, 3:] = -100
    (of_tokens,) = metrics_of(["perplexity"], [Term("causal-lm", "out", "y", 1.0, 7, -100, -1)])
    shifted = torch.tensor(logits[:, :-1]).reshape(-1, 7), torch.tensor(tokens[:, 1:]).reshape(-1)
    begun = of_tokens.begin()
    for part, wanted_part in zip(np.split(logits, CUTS), np.split(tokens, CUTS), strict=True):
        begun.update(part, wanted_part)
    assert begun.value() == pytest.approx(torch.nn.functional.cross_entropy(*shifted).exp().item(), rel=1e-9)


def test_a_confusion_matrix() -> None:
    from sklearn import metrics as sklearn

    matrix = Confusion(ignore_index=2)
    for part, labels in zip(np.split(CHOSEN, CUTS), np.split(LABELS, CUTS), strict=True):
        matrix.update(part, labels)
    counted = LABELS != 2
    wanted = sklearn.confusion_matrix(LABELS[counted], CHOSEN.argmax(1)[counted], labels=range(7))
    assert matrix.matrix.tolist() == wanted.tolist()
    yes = Confusion(threshold=0.0)
    yes.update(LOGITS[:, :2], CHOSEN[:, :2] > 0.1)
    wanted = sklearn.confusion_matrix(CHOSEN[:, :2].ravel() > 0.1, LOGITS[:, :2].ravel() > 0)
    assert yes.matrix.tolist() == wanted.tolist()
