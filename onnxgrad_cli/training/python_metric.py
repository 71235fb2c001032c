"""Metrics that a Python function computes from all predictions and labels, so the batch size does not matter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import numpy as np

from onnxgrad_cli.errors import OnnxgradError, conflict, wrong_type, wrong_value
from onnxgrad_cli.training.metrics import METRICS, MetricKind


class _Collected:
    """A metric that collects all batches, and at the end calls a Python function with all predictions and labels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        if not self._batches:
            self._call(predictions, labels)  # report errors of the function at the first batch
        self._batches.append((predictions.copy(), labels.copy()))

    def value(self) -> float:
        if not self._batches:
            return math.nan
        predictions, labels = (np.concatenate(arrays) for arrays in zip(*self._batches, strict=True))
        return self._call(predictions, labels)

    def _call(self, predictions: np.ndarray, labels: np.ndarray) -> float:
        name = self._function.__name__
        try:
            found = np.asarray(self._function(predictions, labels))
        except OnnxgradError:
            raise
        except Exception as error:
            shapes = f"predictions {list(predictions.shape)} and labels {list(labels.shape)}"
            reason = f"{type(error).__name__}: {error}"
            raise wrong_value(f"the metric '{name}' fails on {shapes}: {reason}", "correct the function") from error
        if found.size != 1 or found.dtype.kind not in "biuf":
            hint = "write a function that takes predictions and labels, and returns a number"
            raise wrong_type(f"the metric '{name}' returns {found!r}", hint)
        return float(found.reshape(()))


FUNCTION = re.compile(r"(?P<file>.*?\.py):(?P<function>[^:]*)")
"""A regular expression for FILE.py:FUNCTION, which names a Python function on the command line."""


def parse_metric(text: str, load: Callable[[str, str], Callable[..., Any]]) -> str:
    """Convert a metric of the command line to a text that `metrics.parse_metric` accepts.

    If the text names a Python function, register the function as a metric. Otherwise, return the text unchanged.

    Args:
        text: NAME[:KEY=VALUE,...], FILE.onnx or FILE.py:FUNCTION. The suffix `:higher=true` of a function means that
            higher values are better.
        load: returns a function, given a Python file and the name of the function.
    """
    code = FUNCTION.match(text)
    if code is None:
        return text
    rest = text[code.end() :]
    higher = rest.endswith(":higher=true")
    rest = rest.removesuffix(":higher=true").removesuffix(":higher=false")
    return register(load(code["file"], code["function"]), higher) + rest


def register(function: Callable[..., Any], higher: bool) -> str:
    """Register a function as a metric in this process, and return its name, which is also the name of the metric.

    Args:
        function: `function(predictions, labels)` returns a number. Both arrays contain all samples, along the first
            axis.
        higher: True if higher values are better.

    Raises:
        UsageError: a built-in metric has the same name.
    """
    name = function.__name__
    there = next((kind for kind in METRICS if kind.name == name), None)
    if there is not None and not isinstance(there.function, partial):
        raise conflict(f"`metrics`: there already is a metric '{name}'", "rename the function")
    kind = MetricKind(name, update_wrapper(partial(_Collected, function), function), higher, ())
    METRICS.add(name, kind, override=True)
    return name
