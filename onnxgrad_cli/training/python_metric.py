"""A metric as a Python function of all predictions and labels, which is exact however the data are cut into batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import numpy as np

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.metrics import METRICS, Kind


class _Collected:
    """What a function gives of all batches, which are kept until then."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        if not self._batches:
            self._call(predictions, labels)  # what does not fit is told at the first batch
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
            raise UsageError(f"the metric '{name}' fails on {shapes}: {reason}", "correct the function") from error
        if found.size != 1 or found.dtype.kind not in "biuf":
            hint = "it takes predictions and labels, and gives a number"
            raise UsageError(f"the metric '{name}' gives {found!r}", hint)
        return float(found.reshape(()))


def register(function: Callable[..., Any], higher: bool) -> str:
    """Make a function a metric, for this process; the name it is asked for by, which is the function's.

    Args:
        function: `function(predictions, labels)` of all samples, the first axis, which gives a number.
        higher: whether more is better.

    Raises:
        UsageError: there is a metric of that name.
    """
    name = function.__name__
    there = next((kind for kind in METRICS if kind.name == name), None)
    if there is not None and not isinstance(there.function, partial):
        raise UsageError(f"`metrics`: '{name}' is a metric that there is", "call the function otherwise")
    METRICS.add(name, Kind(name, update_wrapper(partial(_Collected, function), function), higher, ()), override=True)
    return name
