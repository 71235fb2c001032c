"""Metrics: measure the quality of predictions, batch by batch, with a result that does not depend on the batch size.

A metric keeps sums over samples, not means of batches, so that all samples have the same weight, even those in a
shorter last batch. A metric from a file is an ONNX model that compares predictions with labels. Its values for the
batches are averaged, weighted by the batch sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from onnx import helper

from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Option, declared, exactly, pairs, require
from onnxgrad_cli.errors import OnnxgradError, conflict, unknown_name, wrong_shape, wrong_type, wrong_value
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.files import load_external_data, load_model
from onnxgrad_cli.ir.types import dtype_of, is_float
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.passes.loss.model_file import in_order


class Metric(Protocol):
    """A measure of the quality of predictions. Its value is nan before the first batch."""

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        """Add a batch: the model's predictions, (N, ...), and the labels."""

    def value(self) -> float:
        """Return the metric over all batches so far."""


@dataclass(frozen=True)
class MetricKind(Documented):
    """A kind of metric.

    Attributes:
        name: its name on the command line.
        function: `function(**options)` creates a metric.
        higher: True if higher values are better.
        options: the options that it takes.
    """

    name: str
    function: Callable[..., Metric]
    higher: bool
    options: tuple[Option, ...]


@dataclass(frozen=True)
class RequestedMetric:
    """A metric that the user requested, or a default metric of a loss.

    Attributes:
        name: the text of the request, such as 'top-5' or 'accuracy:OUTPUT'; for a file,
            its name without folder and '.onnx', and ':OUTPUT' if the request names one.
        higher: True if higher values are better.
        begin: creates a new `Metric`, to which no batch was added.
        kind: the name of the metric in `METRICS`; "" for a metric from a file.
        output: the model output that the metric compares with labels; "" if the request names none.
        term: the loss whose output and label the metric compares; None before the losses are known.
    """

    name: str
    higher: bool
    begin: Callable[[], Metric]
    kind: str = ""
    output: str = ""
    term: Term | None = None


METRICS: Catalogue[MetricKind] = Catalogue(
    "metric", "metrics", ["onnxgrad_cli.training.class_metrics"], "any other metric can be given as a file, NAME.onnx"
)
"""All metrics: those that count correct classes, those for regression, and then the others for classification."""


def metric(
    name: str, *, higher: bool, options: Mapping[str, str] | None = None, override: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated class as a metric; its keyword-only parameters are its options.

    Args:
        name: the name of the metric on the command line.
        higher: True if higher values are better.
        options: option -> its description. Types and defaults are read from the signature.
        override: replace a metric with the same name instead of raising an error.

    Raises:
        OnnxgradError: a metric with the same name is registered, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        METRICS.add(name, MetricKind(name, function, higher, declared(function, options, f"metric '{name}'")), override)
        return function

    return register


def parse_metric(text: str, **defaults: object) -> RequestedMetric:
    """Parse `NAME[:OUTPUT][:KEY=VALUE,...]` or `FILE.onnx[:OUTPUT][:higher=true]`.

    Lower values of a metric from a file are better, unless `higher=true` is given.

    Args:
        text: a name in `METRICS`, 'top-5' for 'top-k:k=5', or a file; then the output and the options.
        defaults: values of options that `text` does not set. Options that the metric does not have are ignored.

    Raises:
        UsageError: the metric doesn't exist, an option is wrong, or the file is not a metric.
    """
    name, output, options = _spelled(text)
    if name.endswith(".onnx"):
        given = exactly(FILE_OPTIONS, options, name)
        told = f"{Path(name).stem}:{output}" if output else Path(name).stem
        return RequestedMetric(told, given.get("higher", False), partial(copy, _File(name)), "", output)
    kind = METRICS.lookup(name)
    known = {option.name for option in kind.options}
    settings = exactly(kind.options, {k: v for k, v in defaults.items() if k in known} | options, name)
    begin = partial(kind.function, **settings)
    begin()  # report values that do not fit
    return RequestedMetric(text, kind.higher, begin, name, output)


def _spelled(text: str) -> tuple[str, str, dict[str, object]]:
    """Split the text of a request into the metric, the output and the options. The output's name may contain colons."""
    file = re.match(r".*?\.onnx(?=:|$)", text)
    name, _, rest = (file[0], "", text[file.end() + 1 :]) if file else text.partition(":")
    output, _, last = rest.rpartition(":")
    if "=" not in last:
        output, last = rest, ""
    options = pairs(last, text, "NAME[:OUTPUT][:KEY=VALUE,KEY=VALUE]")
    if found := re.fullmatch("top-([0-9]{1,18})", name.strip()):
        return "top-k", output, {"k": int(found[1]), **options}
    return name.strip(), output, options


def metrics_of(texts: Sequence[str], terms: Sequence[Term]) -> list[RequestedMetric]:
    """Return the requested metrics, each with the loss whose output and label it compares.

    Args:
        texts: requests in the form that `parse_metric` takes; () takes the default metrics of the losses.
        terms: the losses.

    Raises:
        UsageError: a metric names an output that no loss uses, does not fit the loss, or has the name of another metric
            or 'loss'.
    """
    judged = [term for term in terms if term.label]
    if not texts:
        several = len({(term.output, term.label) for term in judged}) > 1
        found = [_renamed(named, term) if several else named for term in judged for named in default_metrics(term)]
        return list({named.name: named for named in reversed(found)}.values())[::-1]
    found = [_of_a_term(text, judged) for text in texts]
    names = ["loss", *(named.name for named in found)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "name each metric once, and give two metric files different names"
        raise conflict(f"`metrics`: two results would have the name '{twice}'", hint)
    return found


def _of_a_term(text: str, judged: Sequence[Term]) -> RequestedMetric:
    output = _spelled(text)[1]
    term = next((term for term in judged if output in ("", term.output)), None)
    if term is None:
        there = f"outputs with a loss: {', '.join(term.output for term in judged)}" if judged else "no loss has a label"
        raise unknown_name(f"`metrics`: '{text}' names an output that has no loss", there)
    named = parse_metric(text, **_settings(term))
    if term.name == "causal-lm" and named.kind != "perplexity":
        message = f"`metrics`: '{text}' can't be combined with causal-lm: it would compare tokens with themselves"
        raise conflict(message, "use perplexity, which compares each token with the next one")
    return replace(named, term=term)


def _renamed(named: RequestedMetric, term: Term) -> RequestedMetric:
    """Return the metric with the output of the loss appended to its name, such as accuracy:cls."""
    name, _, options = named.name.partition(":")
    return replace(named, name=":".join(filter(None, (name, term.output, options))))


YES_AND_NO = {"bce": 0.5, "bce-logits": 0.0}
"""Binary loss -> the threshold above which an output predicts the positive class."""


def _settings(term: Term) -> dict[str, object]:
    """Return the options that a metric takes over from a loss: class axis, shift, threshold and ignored label."""
    found: dict[str, object] = {"class_axis": term.class_axis, "shift": int(term.name == "causal-lm")}
    if term.name in YES_AND_NO:
        found["threshold"] = YES_AND_NO[term.name]
    return found if term.ignore_index is None else {**found, "ignore_index": term.ignore_index}


DEFAULTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cross-entropy", "nll", "log", "bce"), ("accuracy",)),
    "bce-logits": ("accuracy:threshold=0",),
    "mse": ("rmse", "r2"),
    **dict.fromkeys(("mae", "huber", "smooth-l1", "elastic"), ("mae", "r2")),
}
"""Loss -> its default metrics, which are easier to interpret than the loss."""


def default_metrics(term: Term) -> list[RequestedMetric]:
    """Return the default metrics of a loss: accuracy for classification, r2 and rmse or mae for regression.

    Returns:
        [] for other losses.
    """
    return [replace(parse_metric(text, **_settings(term)), term=term) for text in DEFAULTS.get(term.name, ())]


# -- classification ------------------------------------------------------------------------------------

OF_CLASSES = {
    "ignore_index": "the label of samples to leave out",
    "class_axis": "the axis of the output with the classes; -1 is the last axis",
}


THRESHOLD = "value above which a prediction means yes, if there are no classes: 0 for logits"


class Average:
    """Base class of metrics whose value is a sum divided by a count; nan if the count is 0."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def value(self) -> float:
        """Return the average over all batches so far."""
        return self._sum / self._count if self._count else float("nan")


class OfClasses:
    """Base class of metrics that compare predicted classes, or binary predictions, with the labels.

    Attributes:
        name: the name of the metric, for messages.
    """

    name: str

    def __init__(self, *, threshold: float = 0.5, ignore_index: int = -100, class_axis: int = 1) -> None:
        super().__init__()
        self._threshold, self._ignored, self._axis = threshold, ignore_index, class_axis

    def _chosen(self, predictions: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the predicted and the true class of each label that is not ignored, and the number of classes.

        Args:
            predictions, labels: (N, C, ...) and (N, ...). If both have the same shape, the task is binary: a prediction
                above the threshold means class 1, any other prediction class 0.

        Raises:
            UsageError: the shapes don't fit each other, or binary labels are neither all from 0 to 1 nor all 1 or -1.
        """
        if predictions.shape == labels.shape:
            found, wanted, count = predictions > self._threshold, means_yes(self.name, labels, self._ignored), 2
        else:
            check_classes(self.name, predictions, labels, self._axis)
            found, wanted, count = predictions.argmax(self._axis), labels, predictions.shape[self._axis]
        counted = labels != self._ignored
        return found[counted], wanted[counted], count


@metric("accuracy", higher=True, options={**OF_CLASSES, "threshold": THRESHOLD})
class _Accuracy(OfClasses, Average):
    """The fraction of labels that are predicted correctly.

    Predictions (N, C, ...) with labels (N, ...) are class scores: the class with the largest score is predicted.
    Predictions with the same shape as the labels are binary: the threshold decides, and each element counts.
    """

    name = "accuracy"

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        found, wanted, _ = self._chosen(predictions, labels)
        self._sum += int((found == wanted).sum())
        self._count += len(found)


@metric("top-k", higher=True, options={"k": "number of largest outputs among which the label must be", **OF_CLASSES})
class _TopK(Average):
    """The fraction of labels whose class is among the k largest outputs."""

    def __init__(self, *, k: int = 5, ignore_index: int = -100, class_axis: int = 1) -> None:
        super().__init__()
        require(k > 0, f"k must be above 0, not {k}")
        self._k, self._ignored, self._axis = k, ignore_index, class_axis

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        check_classes("top-k", predictions, labels, self._axis)
        predictions = np.moveaxis(predictions, self._axis, 1)
        order = np.argsort(-np.asarray(predictions, np.float64), 1, kind="stable")
        right, counted = (order[:, : self._k] == labels[:, None]).any(1), labels != self._ignored
        self._sum += int((right & counted).sum())
        self._count += int(counted.sum())


def means_yes(name: str, labels: np.ndarray, ignored: int) -> np.ndarray:
    """Return a boolean array: True where a binary label is positive.

    If all labels lie between 0 and 1, those above 0.5 are positive. If all labels are 1 or -1, 1 is positive.

    Raises:
        UsageError: a label that is not ignored has a different value.
    """
    within = (labels >= 0) & (labels <= 1) if not (labels == -1).any() else np.abs(labels) == 1
    others = labels[~within & (labels != ignored)]
    if others.size:
        message = f"{name} requires binary labels, 1 and 0 or 1 and -1, but there is a label {others.flat[0]:g}"
        raise wrong_value(message, "use a regression metric, such as rmse or r2")
    return labels > 0.5


def check_classes(name: str, predictions: np.ndarray, labels: np.ndarray, axis: int) -> None:
    """Check that the shape of the labels is the shape of the predictions without the class axis.

    Raises:
        UsageError: the shapes don't match, or there is no such axis.
    """
    there = predictions.ndim > 1 and -predictions.ndim < axis < predictions.ndim
    if not there or tuple(np.delete(predictions.shape, axis)) != labels.shape:
        message = f"{name} can't compare predictions {list(predictions.shape)} with labels {list(labels.shape)}"
        hint = f"save labels as class numbers, with the output's shape without its axis {axis}"
        raise wrong_shape(message, hint)


# -- regression ----------------------------------------------------------------------------------------


class _Mean(Average):
    """Base class of metrics whose value is the mean, over all elements, of a function of prediction - label."""

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        self._sum += float(self.measure(np.subtract(*_wide(predictions, labels))).sum())
        self._count += labels.size

    measure: Callable[..., np.ndarray]


@metric("mae", higher=False)
class _AbsoluteError(_Mean):
    """The mean of the absolute differences, over all elements."""

    measure = staticmethod(np.abs)


@metric("mse", higher=False)
class _SquaredError(_Mean):
    """The mean of the squared differences, over all elements."""

    measure = staticmethod(np.square)


@metric("rmse", higher=False)
class _RootOfSquaredError(_SquaredError):
    """The square root of the mean squared difference over all elements.

    For several columns this differs from sklearn.metrics.root_mean_squared_error, which takes the root of each column
    and returns the mean of the roots.
    """

    def value(self) -> float:
        return float(np.sqrt(super().value()))


@metric("r2", higher=True)
class _R2:
    """The fraction of the labels' variance that is explained; the mean over the outputs. As sklearn.metrics.r2_score.

    Means and sums of squares of batches are merged as in T. F. Chan et al., Updating formulae and a pairwise algorithm,
    1979. If all labels of an output are equal, its value is 1 if all predictions are exact, and 0 otherwise.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._spread = self._off = np.zeros(())

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        samples = len(labels) if labels.ndim else 1  # a model may have one scalar output for the whole batch
        found, wanted = (array.reshape(samples, -1) for array in _wide(predictions, labels))
        count, mean = len(wanted), wanted.mean(0)
        shift = mean - self._mean
        share = count / (self._count + count)
        self._spread = self._spread + np.square(wanted - mean).sum(0) + shift**2 * self._count * share
        self._mean = self._mean + shift * share
        self._off = self._off + np.square(found - wanted).sum(0)
        self._count += count

    def value(self) -> float:
        if self._count < 2:
            return float("nan")
        known = self._spread > 0
        share = 1 - self._off / np.where(known, self._spread, 1.0)
        return float(np.where(known, share, self._off == 0).mean())


def _wide(predictions: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if predictions.shape != labels.shape:
        message = f"predictions {list(predictions.shape)} and labels {list(labels.shape)} have different shapes"
        raise wrong_shape(message, "for classes, use accuracy or top-k")
    return predictions.astype(np.float64), labels.astype(np.float64)


# -- from a file ---------------------------------------------------------------------------------------


FILE_OPTIONS = (Option("higher", "bool", False, "true if larger is better"),)


class _File(Average):
    """A metric from a file: an ONNX model with the inputs prediction and label and a scalar output.

    The value is the mean of the model's outputs for the batches, weighted by the batch sizes.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        model, source = load_model(path)
        load_external_data(model, source)
        self.path, graph = path, model.graph
        stored = {tensor.name for tensor in graph.initializer}
        inputs = [value for value in graph.input if value.name not in stored]
        if len(inputs) != 2 or len(graph.output) != 1:
            hint = "give it the inputs prediction and label, and one output"
            raise wrong_value(f"the metric '{path}' has {len(inputs)} inputs and {len(graph.output)} outputs", hint)
        if not is_float(graph.output[0].type):
            message = f"the output '{graph.output[0].name}' of the metric '{path}' is not a float"
            raise wrong_type(message, "add a Cast to float32 to the file")
        self._types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in in_order(inputs)}
        self._run = Executor(model)

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        """Add a batch.

        Raises:
            UsageError: the model does not take the dtype of an array, or its output is not one number.
            OnnxgradError: the model fails on these arrays.
        """
        feeds = dict(zip(self._types, (predictions, labels), strict=True))
        for name, array in feeds.items():
            wanted = self._types[name]
            if not np.can_cast(array.dtype, wanted, "same_kind"):
                message = f"the metric '{self.path}' takes '{name}' as {wanted}, not {array.dtype}"
                raise wrong_type(message, f"add a Cast from {array.dtype} to {wanted} to the file")
            feeds[name] = np.asarray(array, wanted, order="C")
        try:
            (found,) = self._run(feeds).values()
        except Exception as error:  # the executors' exceptions share no base class
            shapes = f"predictions {list(predictions.shape)} and labels {list(labels.shape)}"
            raise OnnxgradError(f"the metric '{self.path}' fails on {shapes}: {error}".strip()) from error
        if found.size != 1:
            hint = "reduce them in the file"
            raise wrong_shape(f"the metric '{self.path}' returns {found.size} numbers, not one", hint)
        self._sum += float(found.reshape(())) * len(labels)
        self._count += len(labels)
