"""Classification metrics that need more than a count of correct predictions: F1, area under the ROC curve, perplexity.

Each metric is computed over all samples, not averaged over batches, so it does not depend on the batch size.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.common.settings import require
from onnxgrad_cli.errors import conflict, wrong_shape
from onnxgrad_cli.training.metrics import OF_CLASSES, THRESHOLD, Average, OfClasses, check_classes, means_yes, metric


class Confusion(OfClasses):
    """A confusion matrix.

    Attributes:
        matrix: int64 (C, C), with a row for each true class and a column for each predicted class; (0, 0) before the
            first batch.
    """

    name = "a confusion matrix"
    matrix = np.zeros((0, 0), np.int64)

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        """Add a batch: predictions (N, C, ...) with labels (N, ...), or binary predictions and labels of one shape."""
        found, wanted, count = self._chosen(predictions, labels)
        pairs = wanted.astype(np.int64) * count + found
        new = np.bincount(pairs, minlength=count**2).reshape(count, count)
        self.matrix = new if not self.matrix.size else self.matrix + new


F1_OPTIONS = {**OF_CLASSES, "threshold": THRESHOLD}


class _Counts(OfClasses):
    """Base class of F1 metrics. For each class, it counts the correct predictions, all predictions and all labels.

    If the labels have the same shape as the predictions, and several columns, the task is multi-label: each column is a
    class with binary labels.
    """

    _counts = np.zeros((3, 0), np.int64)
    _several = False

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        self._several = predictions.shape == labels.shape and labels.ndim > 1 and labels.shape[-1] > 1
        if self._several:
            columns = labels.shape[-1]
            counted = (labels != self._ignored).reshape(-1, columns)
            found = (predictions > self._threshold).reshape(-1, columns) & counted
            wanted = means_yes(self.name, labels, self._ignored).reshape(-1, columns) & counted
            new = np.stack([np.sum(found & wanted, 0), found.sum(0), wanted.sum(0)])
        else:
            found, wanted, count = self._chosen(predictions, labels)
            parts = (found[found == wanted], found, wanted)
            new = np.stack([np.bincount(part.astype(np.int64), minlength=count) for part in parts])
        self._counts = self._counts + new if self._counts.size else new

    @property
    def _each(self) -> np.ndarray:
        """The F1 of each class. It is 0 for a class that is neither predicted nor a label, as in sklearn."""
        right, found, wanted = self._counts
        return 2 * right / np.maximum(found + wanted, 1)

    def value(self) -> float:
        return float(self._average()) if self._counts.any() else float("nan")

    def _average(self) -> float:
        raise NotImplementedError


@metric("f1", higher=True, options=F1_OPTIONS)
class _F1(_Counts):
    """The F1 of the positive class: of binary labels, or the second of two classes. As sklearn's f1_score."""

    name = "f1"

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        super().update(predictions, labels)
        if self._several or len(self._each) != 2:
            hint = "use f1-macro, f1-micro or f1-weighted"
            raise conflict(f"f1 is for binary classification, but there are {len(self._each)} classes", hint)

    def _average(self) -> float:
        return self._each[1]


@metric("f1-macro", higher=True, options=F1_OPTIONS)
class _MacroF1(_Counts):
    """The mean F1 of all classes that are predicted or occur in the labels. As sklearn's f1_score(average='macro')."""

    name = "f1-macro"

    def _average(self) -> float:
        return self._each[self._several | self._counts.any(0)].mean()


@metric("f1-micro", higher=True, options=F1_OPTIONS)
class _MicroF1(_Counts):
    """The F1 computed from the counts summed over all classes. As sklearn's f1_score(average='micro')."""

    name = "f1-micro"

    def _average(self) -> float:
        right, found, wanted = self._counts.sum(1)
        return 2 * right / (found + wanted)


@metric("f1-weighted", higher=True, options=F1_OPTIONS)
class _WeightedF1(_Counts):
    """The mean of the classes' F1, weighted by the number of labels. As sklearn's f1_score(average='weighted')."""

    name = "f1-weighted"

    def _average(self) -> float:
        wanted = self._counts[2]
        return (self._each * wanted).sum() / max(wanted.sum(), 1)


@metric("auc", higher=True, options=OF_CLASSES)
class _Auc:
    """The area under the ROC curve. With more than two classes, the mean of the areas of each class against the others.

    As sklearn's roc_auc_score with multi_class='ovr'. Samples are ranked by the probability of a class. If the outputs
    are not between 0 and 1, a softmax converts them to probabilities. A class is left out of the mean if no sample, or
    every sample, belongs to it. All scores are kept in memory until the end.
    """

    def __init__(self, *, ignore_index: int = -100, class_axis: int = 1) -> None:
        self._ignored, self._axis = ignore_index, class_axis
        self._scores: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._classes = False

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        self._classes = predictions.shape != labels.shape
        if self._classes:
            check_classes("auc", predictions, labels, self._axis)
            counted = labels != self._ignored
            self._scores.append(np.moveaxis(predictions, self._axis, -1)[counted])
            self._labels.append(labels[counted])
        else:
            columns = labels.shape[-1] if labels.ndim > 1 else 1
            means_yes("auc", labels, self._ignored)
            self._scores.append(predictions.reshape(-1, columns))
            self._labels.append(labels.reshape(-1, columns))

    def value(self) -> float:
        if not self._scores:
            return float("nan")
        scores, labels = np.concatenate(self._scores).astype(np.float64), np.concatenate(self._labels)
        if np.isnan(scores).any():
            return float("nan")
        if self._classes:
            scores = _probabilities(scores)
            labels = labels[:, None] == np.arange(scores.shape[1])
            if scores.shape[1] == 2:
                scores, labels = scores[:, 1:], labels[:, 1:]
        areas = [
            _area(column[wanted != self._ignored], wanted[wanted != self._ignored] > 0.5)
            for column, wanted in zip(scores.T, labels.T, strict=True)
        ]
        found = [area for area in areas if not np.isnan(area)]
        return float(np.mean(found)) if found else float("nan")


def _probabilities(scores: np.ndarray) -> np.ndarray:
    """Return scores (n, C) as probabilities. If any score is outside 0 to 1, apply a softmax, as torchmetrics does."""
    if not scores.size or (scores.min() >= 0 and scores.max() <= 1):
        return scores
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the area under the ROC curve: the probability that a positive sample scores higher than a negative one.

    The area is computed from the Mann-Whitney U statistic. Ties count half.

    Returns:
        nan if there are no positives or no negatives.
    """
    yes, no = int(positive.sum()), int((~positive).sum())
    if not yes or not no:
        return float("nan")
    _, which, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[which]
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


SHIFT = "number of positions that labels lag behind outputs: 1 if each token predicts the next one"


@metric("perplexity", higher=False, options={**OF_CLASSES, "shift": SHIFT})
class _Perplexity(Average):
    """The exponential of the labels' mean negative log-probability. Outputs are logits or log-probabilities."""

    def __init__(self, *, ignore_index: int = -100, class_axis: int = 1, shift: int = 0) -> None:
        require(shift >= 0, f"shift must not be negative, but is {shift}")
        super().__init__()
        self._ignored, self._axis, self._shift = ignore_index, class_axis, shift

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        check_classes("perplexity", predictions, labels, self._axis)
        logits = np.moveaxis(predictions, self._axis, -1)
        if self._shift:
            if labels.ndim < 2:
                message = f"perplexity: labels {list(labels.shape)} have no positions to shift"
                raise wrong_shape(message, "leave out the setting shift")
            logits, labels = logits[:, : -self._shift], labels[:, self._shift :]
        counted = labels != self._ignored
        for row, place, label in zip(logits, counted, labels, strict=True):  # a row at a time: vocabularies are large
            scores = row[place].astype(np.float64).reshape(-1, logits.shape[-1])
            highest = scores.max(1, initial=-np.inf)
            total = highest + np.log(np.exp(scores - highest[:, None]).sum(1))
            wanted = np.atleast_1d(label[place]).reshape(-1, 1)
            self._sum += float((total - np.take_along_axis(scores, wanted, 1)[:, 0]).sum())
        self._count += int(np.count_nonzero(counted))

    def value(self) -> float:
        return float(np.exp(super().value()))
