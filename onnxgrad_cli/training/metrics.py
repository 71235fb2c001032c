"""How good a model is, in numbers that people know: taken batch by batch, exact however the data are cut.

A metric keeps sums, not means of batches, so that a short last batch counts for what it is. One from a file is any
ONNX model that compares a prediction with a label; its batches are weighted by their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from onnx import helper

from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Option, declared, exactly, pairs, require
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.files import load_external_data, load_model
from onnxgrad_cli.ir.types import dtype_of, is_float
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.passes.loss.file import in_order


class Metric(Protocol):
    """A number that says how good predictions are; nan as long as there are none."""

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        """Take a batch: what the model has put out, (N, ...), and what it should have."""

    def value(self) -> float:
        """The metric of all batches so far."""


@dataclass(frozen=True)
class Kind(Documented):
    """A kind of metric.

    Attributes:
        name: what it is called on the command line.
        function: `function(**options)` begins a metric.
        higher: whether more is better.
        options: what it takes.
    """

    name: str
    function: Callable[..., Metric]
    higher: bool
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Named:
    """A metric that was asked for.

    Attributes:
        name: how it was asked for.
        higher: whether more of it is better.
        begin: what begins it anew.
        kind: its name in `METRICS`; "" for one from a file.
        output: the output that it is of; "" where none was named.
        term: the loss whose output and label it compares; None before it is known.
    """

    name: str
    higher: bool
    begin: Callable[[], Metric]
    kind: str = ""
    output: str = ""
    term: Term | None = None


METRICS: Catalogue[Kind] = Catalogue(
    "metric", "metrics", ["onnxgrad_cli.training.class_metrics"], "any other metric can be given as a file, NAME.onnx"
)
"""Those of classes, then those of numbers, then those of classes that take more than a count."""


def metric(
    name: str, *, higher: bool, options: Mapping[str, str] | None = None, override: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated class as a metric; its keyword-only parameters are its options.

    Args:
        name, higher: see `Kind`.
        options: option -> what it does. Kinds and defaults are read from the signature.
        override: replace a metric of this name instead of refusing.

    Raises:
        OnnxgradError: there is a metric of this name, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        METRICS.add(name, Kind(name, function, higher, declared(function, options, f"metric '{name}'")), override)
        return function

    return register


def parse_metric(text: str, **defaults: object) -> Named:
    """Read `NAME[:OUTPUT][:KEY=VALUE,...]` or `FILE.onnx[:OUTPUT][:higher=true]`; of a file, less is better by default.

    Args:
        text: a name of `METRICS`, 'top-5' for 'top-k:k=5', or a file; the output it is of; options.
        defaults: options where `text` says none, of which those count that the metric has.

    Raises:
        UsageError: there is no such metric, an option does not fit, or the file is no metric.
    """
    name, output, options = _spelled(text)
    if name.endswith(".onnx"):
        given = exactly(FILE_OPTIONS, options, name)
        told = f"{Path(name).stem}:{output}" if output else Path(name).stem
        return Named(told, given.get("higher", False), _File(name).begin, "", output)
    kind = METRICS.lookup(name)
    known = {option.name for option in kind.options}
    settings = exactly(kind.options, {k: v for k, v in defaults.items() if k in known} | options, name)
    kind.function(**settings)
    return Named(text, kind.higher, lambda: kind.function(**settings), name, output)


def _spelled(text: str) -> tuple[str, str, dict[str, object]]:
    """The name, the output and the options of a metric; an output's name may have colons itself."""
    file = re.match(r".*?\.onnx(?=:|$)", text)
    name, _, rest = (file[0], "", text[file.end() + 1 :]) if file else text.partition(":")
    output, _, last = rest.rpartition(":")
    if "=" not in last:
        output, last = rest, ""
    options = pairs(last, text, "NAME[:OUTPUT][:KEY=VALUE,KEY=VALUE]")
    if found := re.fullmatch("top-([0-9]{1,18})", name.strip()):
        return "top-k", output, {"k": int(found[1]), **options}
    return name.strip(), output, options


def metrics_of(texts: Sequence[str], terms: Sequence[Term]) -> list[Named]:
    """The metrics that were asked for, each with the loss whose output and label it compares; by default what suits.

    Args:
        texts: as `parse_metric` reads them; () is what says in other words what the losses say.
        terms: the losses.

    Raises:
        UsageError: a metric is of an output that no loss judges, or does not fit it, or two have one name.
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
        raise UsageError(f"`metrics`: two numbers would be called '{twice}'", "name each once, files by other names")
    return found


def _of_a_term(text: str, judged: Sequence[Term]) -> Named:
    output = _spelled(text)[1]
    term = next((term for term in judged if output in ("", term.output)), None)
    if term is None:
        there = f"losses judge {', '.join(term.output for term in judged)}" if judged else "no loss has a label"
        raise UsageError(f"`metrics`: '{text}' is of an output that no loss judges", there)
    named = parse_metric(text, **_settings(term))
    if term.name == "causal-lm" and named.kind != "perplexity":
        raise UsageError(
            f"`metrics`: '{text}' does not go with causal-lm: it would compare tokens with themselves",
            "perplexity does: it compares them with those that follow",
        )
    return replace(named, term=term)


def _renamed(named: Named, term: Term) -> Named:
    """A metric that says of which output it is: accuracy:cls."""
    name, _, options = named.name.partition(":")
    return replace(named, name=":".join(filter(None, (name, term.output, options))))


YES_AND_NO = {"bce": 0.5, "bce-logits": 0.0}
"""Losses of yes and no -> above what an output means yes."""


def _settings(term: Term) -> dict[str, object]:
    """What a loss says that metrics take as well."""
    found: dict[str, object] = {"class_axis": term.class_axis, "shift": int(term.name == "causal-lm")}
    if term.name in YES_AND_NO:
        found["threshold"] = YES_AND_NO[term.name]
    return found if term.ignore_index is None else {**found, "ignore_index": term.ignore_index}


DEFAULTS = {
    "cross-entropy": ("accuracy",),
    "nll": ("accuracy",),
    "log": ("accuracy",),
    "bce": ("accuracy",),
    "bce-logits": ("accuracy:threshold=0",),
    "mse": ("rmse", "r2"),
    "mae": ("mae", "r2"),
    "huber": ("mae", "r2"),
    "smooth-l1": ("mae", "r2"),
    "elastic": ("mae", "r2"),
}
"""Loss -> the metrics that say in other words what it says."""


def default_metrics(term: Term, loss_options: Mapping[str, object] | None = None) -> list[Named]:
    """What is told of a loss besides its value: the accuracy of classes, rmse and r2 of numbers, else nothing."""
    said = {**_settings(term), **(loss_options or {})}
    return [replace(parse_metric(text, **said), term=term) for text in DEFAULTS.get(term.name, ())]


# -- of classes ----------------------------------------------------------------------------------------

OF_CLASSES = {
    "ignore_index": "the label of samples that do not count",
    "class_axis": "the axis of the output that runs over the classes; -1 is the last",
}


class _Share:
    """The share of what was right; where nothing counted, nan."""

    def __init__(self) -> None:
        self._right = self._count = 0

    def _take(self, right: np.ndarray, counted: np.ndarray) -> None:
        self._right += int(np.count_nonzero(right & counted))
        self._count += int(np.count_nonzero(counted))

    def value(self) -> float:
        return self._right / self._count if self._count else float("nan")


@metric(
    "accuracy",
    higher=True,
    options={**OF_CLASSES, "threshold": "above which a prediction means yes, where there are no classes: 0 for logits"},
)
class _Accuracy(_Share):
    """The share of labels that are met: by the class of the largest output, or by yes and no.

    Predictions (N, C, ...) with labels (N, ...) are classes; of the labels' shape they are yes and no, one by one.
    """

    def __init__(self, *, threshold: float = 0.5, ignore_index: int = -100, class_axis: int = 1) -> None:
        super().__init__()
        self._threshold, self._ignored, self._axis = threshold, ignore_index, class_axis

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        if predictions.shape == labels.shape:
            right = (predictions > self._threshold) == means_yes("accuracy", labels, self._ignored)
        else:
            check_classes("accuracy", predictions, labels, self._axis)
            right = predictions.argmax(self._axis) == labels
        self._take(right, labels != self._ignored)


@metric("top-k", higher=True, options={"k": "how many of the largest outputs may hold the label", **OF_CLASSES})
class _TopK(_Share):
    """The share of labels that are among the k largest outputs."""

    def __init__(self, *, k: int = 5, ignore_index: int = -100, class_axis: int = 1) -> None:
        super().__init__()
        require(k > 0, f"k must be above 0, not {k}")
        self._k, self._ignored, self._axis = k, ignore_index, class_axis

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        check_classes("top-k", predictions, labels, self._axis)
        predictions = np.moveaxis(predictions, self._axis, 1)
        order = np.argsort(-np.asarray(predictions, np.float64), 1, kind="stable")
        best = order[:, : self._k]
        self._take((best == labels[:, None]).any(1), labels != self._ignored)


def means_yes(name: str, labels: np.ndarray, ignored: int) -> np.ndarray:
    """Which labels mean yes, of labels that are 1 and 0, shares between the two, or 1 and -1.

    Raises:
        UsageError: others count, which are numbers and answer nothing.
    """
    within = (labels >= 0) & (labels <= 1) if not (labels == -1).any() else np.abs(labels) == 1
    others = labels[~within & (labels != ignored)]
    if others.size:
        raise UsageError(
            f"{name} is of yes and no, which are labels of 1 and 0, and there is {others.flat[0]:g}",
            "choose a metric of numbers, such as rmse or r2",
        )
    return labels > 0.5


def check_classes(name: str, predictions: np.ndarray, labels: np.ndarray, axis: int) -> None:
    """Make sure that labels are the numbers of classes that predictions have along an axis.

    Raises:
        UsageError: the shapes don't fit each other.
    """
    there = predictions.ndim > 1 and -predictions.ndim < axis < predictions.ndim
    if not there or tuple(np.delete(predictions.shape, axis)) != labels.shape:
        raise UsageError(
            f"{name} does not go with predictions {list(predictions.shape)} and labels {list(labels.shape)}",
            f"labels are the numbers of classes, of the output's shape without its axis {axis}",
        )


# -- of numbers ----------------------------------------------------------------------------------------


class _Mean:
    """The mean over all elements of a measure of the differences."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        off = _wide(predictions, labels)
        self._sum += float(self.measure(off[0] - off[1]).sum())
        self._count += labels.size

    def value(self) -> float:
        return self._sum / self._count if self._count else float("nan")

    measure: Callable[..., np.ndarray]


@metric("mae", higher=False)
class _AbsoluteError(_Mean):
    """The mean of the magnitudes of the differences, over all elements."""

    measure = staticmethod(np.abs)


@metric("mse", higher=False)
class _SquaredError(_Mean):
    """The mean of the squares of the differences, over all elements."""

    measure = staticmethod(np.square)


@metric("rmse", higher=False)
class _RootOfSquaredError(_SquaredError):
    """The root of the mean of the squares of the differences, over all elements.

    For several columns, sklearn.metrics.root_mean_squared_error is the mean of the columns' roots instead.
    """

    def value(self) -> float:
        return float(np.sqrt(super().value()))


@metric("r2", higher=True)
class _R2:
    """The share of the labels' variance that is explained; the mean over the outputs. As sklearn.metrics.r2_score.

    Means and squares are merged as in T. F. Chan et al., Updating formulae and a pairwise algorithm, 1979. A label
    that never changes has 1 if it is met exactly, else 0.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._spread = self._off = np.zeros(())

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        samples = len(labels) if labels.ndim else 1  # a model may judge all at once
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
        raise UsageError(
            f"predictions {list(predictions.shape)} can't be compared with labels {list(labels.shape)} one by one",
            "choose a metric of classes: accuracy or top-k",
        )
    return predictions.astype(np.float64), labels.astype(np.float64)


# -- from a file ---------------------------------------------------------------------------------------


def _file(*, higher: bool = False) -> None: ...


FILE_OPTIONS = declared(_file, {"higher": "whether more is better"}, "metric file")


class _File:
    """A metric as a model with the inputs prediction and label and one scalar output."""

    def __init__(self, path: str) -> None:
        model, source = load_model(path)
        load_external_data(model, source)
        self.path, graph = path, model.graph
        stored = {tensor.name for tensor in graph.initializer}
        inputs = [value for value in graph.input if value.name not in stored]
        if len(inputs) != 2 or len(graph.output) != 1:
            raise UsageError(
                f"the metric '{path}' has {len(inputs)} inputs and {len(graph.output)} outputs",
                "a metric takes a prediction and a label, and gives one number",
            )
        if not is_float(graph.output[0].type):
            raise UsageError(f"the metric '{path}' gives '{graph.output[0].name}', which is no float", "cast it inside")
        self._types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in in_order(inputs)}
        self._run = Executor(model)

    def begin(self) -> Metric:
        return _FileMean(self)

    def __call__(self, predictions: np.ndarray, labels: np.ndarray) -> float:
        """The number that the model in the file gives for a batch; UsageError where inputs or output do not fit."""
        feeds = dict(zip(self._types, (predictions, labels), strict=True))
        for name, array in feeds.items():
            wanted = self._types[name]
            if not np.can_cast(array.dtype, wanted, "same_kind"):
                raise UsageError(
                    f"the metric '{self.path}' takes '{name}' as {wanted}, not {array.dtype}", "cast it inside"
                )
            feeds[name] = np.asarray(array, wanted, order="C")
        try:
            (found,) = self._run(feeds).values()
        except Exception as error:  # of many kinds, none of them public
            shapes = f"predictions {list(predictions.shape)} and labels {list(labels.shape)}"
            raise OnnxgradError(f"the metric '{self.path}' does not take {shapes}: {error}".strip()) from error
        if found.size != 1:
            raise UsageError(f"the metric '{self.path}' gives {found.size} numbers", "reduce them inside the file")
        return float(found.reshape(()))


class _FileMean:
    """The mean of what a file gives for each batch, weighted by the batches' sizes."""

    def __init__(self, file: _File) -> None:
        self._file, self._sum, self._count = file, 0.0, 0

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        self._sum += self._file(predictions, labels) * len(labels)
        self._count += len(labels)

    def value(self) -> float:
        return self._sum / self._count if self._count else float("nan")
