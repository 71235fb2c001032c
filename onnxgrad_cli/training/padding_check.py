"""Check on a sample that the padding of a batch does not change the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from onnxgrad_cli.data import Data
from onnxgrad_cli.data.ragged import ONE_BY_ONE, Ragged
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.session import Buffer
from onnxgrad_cli.training.evaluation import EvalResult, EvalSession

TOLERANCE, TOLERANCE_16_BIT = 1e-3, 2e-2
"""The largest relative difference of two losses: for outputs of 32 bits or more, and for outputs of 16 bits."""


def check_padding(session: EvalSession, data: Data, inputs: Mapping[str, str], weights: Mapping[str, Buffer]) -> None:
    """Compare the loss of the smallest sample with its loss when it is padded to the size of the largest sample.

    Data whose samples are not padded need no check. A model with a fixed batch size is not checked, because it can't
    take a single sample.

    Args:
        session: runs the model with its loss.
        data: the data.
        inputs: array of the data -> the input of the model that takes it, where the names differ.
        weights: the weights and state of a trainer.

    Raises:
        UsageError: the losses differ, because the model or a loss takes a mask but does not apply it to all values that
            depend on the padding.
    """
    columns = [column for column in data.arrays.values() if isinstance(column, Ragged)]
    if not columns or data.padding is None or data.padding.obstacle or data.batch_size is not None:
        return
    sizes = columns[0].elements.lengths[data.rows(np.arange(len(data)))]
    small, large = int(sizes.argmin()), int(sizes.argmax())
    pair = data.batch(np.array([small, large]))
    padded = {
        name: array if name in data.same or not array.ndim else array.take([0], axis=data.axes.get(name, 0))
        for name, array in pair.items()
    }
    alone, same = (
        session({inputs.get(name, name): array for name, array in feeds.items()}, weights)
        for feeds in (data.batch(np.array([small])), padded)
    )
    short = any(array.dtype.itemsize < 4 for array in alone.outputs.values())
    first, second = _loss(session, alone), _loss(session, same)
    if not math.isclose(first, second, rel_tol=TOLERANCE_16_BIT if short else TOLERANCE, abs_tol=1e-6):
        raise UsageError(
            f"'{data.source}': padding changes the loss of sample {small} (the first is 0) from {first:.6g} to "
            f"{second:.6g}, so the model or a loss does not apply its mask",
            ONE_BY_ONE,
        )


def _loss(session: EvalSession, result: EvalResult) -> float:
    """Return the loss of a batch; 0 for losses that ignore all labels, whose mean is nan."""
    return sum(w * v for w, v in zip(session.weights, result.values, strict=True) if not math.isnan(v))
