"""Metrics of classes that take more than a count of what is right: F1, the area under the ROC curve, perplexity.

All are exact over the whole data, however they are cut into batches.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.common.settings import require
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.metrics import OF_CLASSES, check_classes, means_yes, metric

THRESHOLD = "above which a prediction means yes, where there are no classes: 0 for logits"


def chosen(
    name: str, predictions: np.ndarray, labels: np.ndarray, *, threshold: float, ignored: int, axis: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """What was chosen and what would have been right, as numbers of classes, of what counts.

    Args:
        name: of the metric, for messages.
        predictions, labels: (N, C, ...) and (N, ...), or of one shape: then they are yes (1) and no (0).
        threshold: above which a prediction means yes.
        ignored: the label of what does not count.
        axis: that of the classes.

    Returns:
        Two arrays of one shape, int64 (n,), and how many classes there are.

    Raises:
        UsageError: the shapes don't fit each other.
    """
    if predictions.shape == labels.shape:
        found, wanted, count = predictions > threshold, means_yes(name, labels, ignored), 2
    else:
        check_classes(name, predictions, labels, axis)
        found, wanted, count = predictions.argmax(axis), labels, predictions.shape[axis]
    counted = labels != ignored
    return found[counted].astype(np.int64), wanted[counted].astype(np.int64), count


class Confusion:
    """How often each class was taken for each: rows are labels, columns what was chosen.

    Attributes:
        matrix: int64 (C, C); (0, 0) before the first batch.
    """

    def __init__(self, *, threshold: float = 0.5, ignore_index: int = -100, class_axis: int = 1) -> None:
        self._threshold, self._ignored, self._axis = threshold, ignore_index, class_axis
        self.matrix = np.zeros((0, 0), np.int64)

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        """Take a batch; see `Metric.update`."""
        found, wanted, count = chosen(
            "a confusion matrix", predictions, labels, threshold=self._threshold, ignored=self._ignored, axis=self._axis
        )
        new = np.bincount(wanted * count + found, minlength=count**2).reshape(count, count)
        self.matrix = new if not self.matrix.size else self.matrix + new


F1_OPTIONS = {**OF_CLASSES, "threshold": THRESHOLD}


class _Counts:
    """Of each class, how often it was chosen rightly, how often it was chosen, and how often it was the label.

    Labels of the output's shape with several columns are several answers of yes and no, each of which is a class.
    """

    name: str

    def __init__(self, *, threshold: float = 0.5, ignore_index: int = -100, class_axis: int = 1) -> None:
        self._threshold, self._ignored, self._axis = threshold, ignore_index, class_axis
        self._counts = np.zeros((3, 0), np.int64)
        self._several = False

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        self._several = predictions.shape == labels.shape and labels.ndim > 1 and labels.shape[-1] > 1
        if self._several:
            columns = labels.shape[-1]
            counted = (labels != self._ignored).reshape(-1, columns)
            found = (predictions > self._threshold).reshape(-1, columns) & counted
            wanted = means_yes(self.name, labels, self._ignored).reshape(-1, columns) & counted
            new = np.stack([np.sum(found & wanted, 0), found.sum(0), wanted.sum(0)])
        else:
            found, wanted, count = chosen(
                self.name, predictions, labels, threshold=self._threshold, ignored=self._ignored, axis=self._axis
            )
            parts = (found[found == wanted], found, wanted)
            new = np.stack([np.bincount(part, minlength=count) for part in parts])
        self._counts = self._counts + new if self._counts.size else new

    @property
    def _each(self) -> np.ndarray:
        """The F1 of each class; 0 of one that is never met, as sklearn has it."""
        right, found, wanted = self._counts
        return 2 * right / np.maximum(found + wanted, 1)

    @property
    def _nothing(self) -> bool:
        return not self._counts.any()


@metric("f1", higher=True, options=F1_OPTIONS)
class _F1(_Counts):
    """The F1 of yes, or of the second of two classes. As sklearn's f1_score."""

    name = "f1"

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        super().update(predictions, labels)
        if self._several or len(self._each) != 2:
            raise UsageError(
                f"f1 is of yes and no, and there are {len(self._each)} classes",
                "choose f1-macro, f1-micro, f1-weighted",
            )

    def value(self) -> float:
        return float("nan") if self._nothing else float(self._each[1])


@metric("f1-macro", higher=True, options=F1_OPTIONS)
class _MacroF1(_Counts):
    """The mean of the classes' F1, of those that are met. As sklearn's f1_score(average='macro')."""

    name = "f1-macro"

    def value(self) -> float:
        met = np.ones(len(self._each), bool) if self._several else self._counts.any(0)
        return float("nan") if self._nothing else float(self._each[met].mean())


@metric("f1-micro", higher=True, options=F1_OPTIONS)
class _MicroF1(_Counts):
    """The F1 of all classes counted together. As sklearn's f1_score(average='micro')."""

    name = "f1-micro"

    def value(self) -> float:
        right, found, wanted = self._counts.sum(1)
        return float("nan") if self._nothing else float(2 * right / (found + wanted))


@metric("f1-weighted", higher=True, options=F1_OPTIONS)
class _WeightedF1(_Counts):
    """The mean of the classes' F1, each as often as it is the label. As sklearn's f1_score(average='weighted')."""

    name = "f1-weighted"

    def value(self) -> float:
        wanted = self._counts[2]
        return float("nan") if self._nothing else float((self._each * wanted).sum() / max(wanted.sum(), 1))


@metric("auc", higher=True, options=OF_CLASSES)
class _Auc:
    """The area under the ROC curve: of yes and no, of two classes, or the mean of each class against the rest.

    As sklearn's roc_auc_score, with multi_class='ovr'. Of classes it is the area by probability: outputs that are not
    between 0 and 1 are taken through a softmax. A class of which there are no samples, or nothing else, does not count.
    All scores are kept until the end.
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
    """Scores (n, C) as probabilities; else they are logits or logarithms, as torchmetrics has it."""
    if not scores.size or (scores.min() >= 0 and scores.max() <= 1):
        return scores
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """How likely a positive has a higher score than a negative, where equal ones count half; Mann and Whitney's U."""
    yes, no = int(positive.sum()), int((~positive).sum())
    if not yes or not no:
        return float("nan")
    _, which, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[which]
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


@metric(
    "perplexity",
    higher=False,
    options={
        **OF_CLASSES,
        "shift": "how many places later the label of an output stands: 1 where tokens predict tokens",
    },
)
class _Perplexity:
    """The exponential of the mean of minus the labels' log-probabilities, of outputs that are logits or such."""

    def __init__(self, *, ignore_index: int = -100, class_axis: int = 1, shift: int = 0) -> None:
        require(shift >= 0, f"shift must not be negative, it is {shift}")
        self._ignored, self._axis, self._shift = ignore_index, class_axis, shift
        self._sum, self._count = 0.0, 0

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        check_classes("perplexity", predictions, labels, self._axis)
        logits = np.moveaxis(predictions, self._axis, -1)
        if self._shift:
            if labels.ndim < 2:
                raise UsageError(f"perplexity: labels {list(labels.shape)} have no places to shift", "leave shift away")
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
        return float(np.exp(self._sum / self._count)) if self._count else float("nan")
