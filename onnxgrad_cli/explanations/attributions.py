"""The attribution methods, each a function of a `Case`, and the baseline for integrated gradients and occlusion.

Sources: K. Simonyan, A. Vedaldi, A. Zisserman, Deep Inside Convolutional Networks, 2013, arXiv:1312.6034 (saliency);
D. Smilkov et al., SmoothGrad: removing noise by adding noise, 2017, arXiv:1706.03825;
M. Sundararajan, A. Taly, Q. Yan, Axiomatic Attribution for Deep Networks, 2017, arXiv:1703.01365 (integrated
gradients);
R. Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks, 2016, arXiv:1610.02391;
M. Zeiler, R. Fergus, Visualizing and Understanding Convolutional Networks, 2013, arXiv:1311.2901 (occlusion).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from onnxgrad_cli.common import checks
from onnxgrad_cli.data import Data
from onnxgrad_cli.data.array_files import arrays_of, mapped
from onnxgrad_cli.errors import missing_file, suggest, unknown_name, wrong_shape, wrong_value
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.open_samples import TOGETHER, batches
from onnxgrad_cli.explanations.scorer import Case, Scorer


def saliency(case: Case) -> np.ndarray:
    """Return |∂S/∂x|, float64 in the shape of x."""
    return np.abs(case.gradients(case.x))


def smoothgrad(case: Case, rows: Sequence[int], repeats: int, noise: float, seed: int) -> np.ndarray:
    """Return 1/n Σ ∂S/∂x (x + ε) with ε from N(0, σ²) and σ = `noise` (max x - min x), float64 in the shape of x.

    Args:
        case: the samples.
        rows: the numbers of the samples. They are part of the seed, so that a sample gets the same noise in any batch.
        repeats: n, the number of noisy copies of each sample.
        noise: σ as a fraction of the range of values of each sample.
        seed: the seed of the noise.
    """
    sources = [np.random.default_rng([seed, row]) for row in rows]
    axes = tuple(range(1, case.x.ndim))
    sigma = noise * (case.x.max(axes, keepdims=True) - case.x.min(axes, keepdims=True)).astype(np.float64)
    total = np.zeros(case.x.shape)
    for _ in range(repeats):
        drawn = np.stack([source.standard_normal(case.x.shape[1:]) for source in sources])
        total += case.gradients((case.x + sigma * drawn).astype(case.x.dtype))
    return total / repeats


def integrated_gradients(case: Case, baseline: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (x - b) ∫₀¹ ∂S/∂x (b + α (x - b)) dα, integrated by the midpoint rule.

    Args:
        case: the samples.
        baseline: b, which broadcasts to x.
        steps: the number of midpoints.

    Returns:
        The attributions, float64 in the shape of x, and the error of each sample, float64 (n,). The error is the
        difference between the sum of the attributions and S(x) - S(b), relative to S(x) - S(b). For the exact integral
        it would be 0, by the axiom of completeness.
    """
    x, start = case.x.astype(np.float64), np.broadcast_to(baseline, case.x.shape).astype(np.float64)
    total = np.zeros(x.shape)
    for step in range(steps):
        share = (step + 0.5) / steps
        total += case.gradients((start + share * (x - start)).astype(case.x.dtype))
    difference = case.scores(case.x) - case.scores(start.astype(case.x.dtype))
    values = (x - start) * total / steps
    off = np.abs(values.reshape(len(values), -1).sum(1) - difference)
    return values, off / np.maximum(np.abs(difference), np.finfo(np.float32).eps)


def grad_cam(case: Case) -> np.ndarray:
    """Return max(0, Σ_k α_k A_k), where α_k is the mean of ∂S/∂A_k over the spatial axes; float64 (n, *positions).

    Args:
        case: the samples. Their subject A is the result of a layer, [n, channels, *positions].
    """
    gradients = case.gradients(case.x)
    weights = gradients.mean(tuple(range(2, gradients.ndim)), keepdims=True)
    return np.maximum((weights * case.x).sum(1), 0.0)


def starts(size: int, window: int, stride: int) -> list[int]:
    """Return the starts of windows along an axis: every `stride` positions, and of a last window at the axis' end."""
    last = max(size - window, 0)
    return [*range(0, last, stride), last]


def occlusion(
    case: Case, baseline: np.ndarray, axes: Sequence[int], window: Sequence[int], stride: Sequence[int]
) -> np.ndarray:
    """Return the mean of S(x) - S(x with a window hidden) over all windows that cover a position.

    Args:
        case: the samples.
        baseline: the values that replace a window, which broadcast to x.
        axes: the axes along which windows move.
        window, stride: the size of the windows and the distance between them, one for each axis.

    Returns:
        float64 (n, ...), in the shape of x, but with size 1 along the other axes, which a window covers completely.
    """
    start = np.broadcast_to(baseline, case.x.shape)
    whole = case.scores(case.x)
    shape = [size if axis == 0 or axis in axes else 1 for axis, size in enumerate(case.x.shape)]
    total, count = np.zeros(shape), np.zeros(shape)
    for corner in product(
        *(starts(case.x.shape[each[0]], *each[1:]) for each in zip(axes, window, stride, strict=True))
    ):
        place: list[slice] = [slice(None)] * case.x.ndim
        for axis, first, size in zip(axes, corner, window, strict=True):
            place[axis] = slice(first, first + size)
        hidden = case.x.copy()
        hidden[tuple(place)] = start[tuple(place)]
        total[tuple(place)] += (whole - case.scores(hidden)).reshape(-1, *[1] * (case.x.ndim - 1))
        count[tuple(place)] += 1
    return total / count


def baseline_of(method: Method, scorer: Scorer, data: Data) -> np.ndarray:
    """Return the baseline of a method in a shape that broadcasts to samples.

    Raises:
        UsageError: the file of the baseline is missing or doesn't fit the samples, or the samples differ in length.
    """
    _, first = scorer.values(data.batch(np.arange(1)))
    if method.baseline == "zero":
        return np.zeros([1] * first.ndim, first.dtype)
    if method.baseline == "mean":
        total = np.zeros((1, *first.shape[1:]))
        for part in batches(np.arange(len(data)), scorer, TOGETHER):
            value = scorer.values(data.batch(part))[1]
            if value.shape[1:] != first.shape[1:]:
                raise wrong_shape("`baseline='mean'`: the samples have different lengths", "use the baseline zero")
            total += value.astype(np.float64).sum(0, keepdims=True)
        return (total / len(data)).astype(first.dtype)
    path = checks.path("baseline", method.baseline)
    if not path.is_file():
        raise missing_file(f"`baseline`: no such file: '{path}'", "use zero, mean, or an .npy or .npz file")
    if data.ragged:
        raise wrong_shape(f"`baseline={path.name}`: the samples have different lengths", "use the baseline zero")
    array = _read(path, scorer.subject.name)
    if array.shape == first.shape[1:]:
        array = array[None]
    if array.shape != (1, *first.shape[1:]) or array.dtype.kind not in "biuf":
        held = f"{array.dtype} {list(array.shape)}"
        raise wrong_shape(f"`baseline`: '{path}' contains {held}, but a sample has the shape {list(first.shape[1:])}")
    if not np.isfinite(array).all():
        raise wrong_value(f"`baseline`: '{path}' contains values that are not finite")
    return array.astype(first.dtype)


def _read(path: Path, name: str) -> np.ndarray:
    """Return the array of an .npy file. From an .npz file, return the array `name`, or the only array."""
    if path.suffix == ".npy":
        return mapped(path)
    held = arrays_of(path)[0]
    if name in held or len(held) == 1:
        return held.get(name, next(iter(held.values())))
    raise unknown_name(f"`baseline`: '{path}' has no array '{name}'", suggest(name, list(held), "arrays"))
