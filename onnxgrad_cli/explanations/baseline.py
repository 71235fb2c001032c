"""What stands for nothing: where integrated gradients begin, and what hides a part."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.samples import TOGETHER, batches
from onnxgrad_cli.explanations.scorer import Scorer
from onnxgrad_cli.training.data import Data
from onnxgrad_cli.training.data.npy_folder import mapped
from onnxgrad_cli.training.data.npz import arrays_of


def baseline_of(method: Method, scorer: Scorer, data: Data) -> np.ndarray:
    """What stands for nothing, of a shape that broadcasts to samples.

    Raises:
        UsageError: a file has none that fits.
    """
    _, first = scorer.values(data.batch(np.arange(1)))
    if method.baseline == "zero":
        return np.zeros([1] * first.ndim, first.dtype)
    if method.baseline == "mean":
        total = np.zeros((1, *first.shape[1:]))
        for part in batches(np.arange(len(data)), scorer, TOGETHER):
            value = scorer.values(data.batch(part))[1]
            if value.shape[1:] != first.shape[1:]:
                raise UsageError("`baseline='mean'`: the samples are of different lengths", "take zero, or a file")
            total += value.astype(np.float64).sum(0, keepdims=True)
        return (total / len(data)).astype(first.dtype)
    path = checks.path("baseline", method.baseline)
    if not path.is_file():
        raise UsageError(f"`baseline`: no such file: '{path}'", "zero, mean, or an .npy or .npz file")
    if data.ragged:
        raise UsageError(f"`baseline={path.name}`: the samples are of different lengths", "take zero")
    array = _read(path, scorer.subject.name)
    if array.shape == first.shape[1:]:
        array = array[None]
    if array.shape != (1, *first.shape[1:]) or array.dtype.kind not in "biuf":
        raise UsageError(
            f"`baseline`: '{path}' holds {array.dtype} {list(array.shape)}, a sample is {list(first.shape[1:])}"
        )
    if not np.isfinite(array).all():
        raise UsageError(f"`baseline`: '{path}' is not finite")
    return array.astype(first.dtype)


def _read(path: Path, name: str) -> np.ndarray:
    """The array in an .npy file, or of an .npz file the one that is called like the input, or its only one."""
    if path.suffix == ".npy":
        return mapped(path)
    held = arrays_of(path)[0]
    if name in held or len(held) == 1:
        return held.get(name, next(iter(held.values())))
    raise UsageError(f"`baseline`: '{path}' has no '{name}'", suggest(name, list(held), "arrays"))
