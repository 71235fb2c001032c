"""Tensors whose values follow a formula: masks, tables of sines, grids, filters. Nothing that was learned does.

Each test is strict, to the rounding of the tensor's type: a learned table that is smooth or sparse does not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, numpy_helper

from onnxgrad_cli.ir.types import is_external, nbytes

LARGEST = 1 << 26
"""Bytes. Values of larger tensors are not looked at."""

SAMPLE = 128
"""Of each of the last two axes so many entries are looked at; of the others, 8."""

COLUMNS = 48
"""Of a table so many columns are held against a formula."""

HUGE = 1e30
LEAST_HIDDEN = 0.2
"""Share of the entries of a table of several values that a mask hides at least: a causal one hides nearly half."""

MASKED = -100.0
"""What a mask adds to a score that is to vanish is this or less: Swin's is the mildest."""


def sample(tensor: TensorProto, folder: Path | None) -> np.ndarray | None:
    """The first entries of a tensor, in float64; None where they are out of reach.

    Args:
        tensor: the tensor.
        folder: where its external data are relative to.
    """
    array = None if nbytes(tensor) > LARGEST else values_of(tensor, folder)
    if array is None:
        return None
    if array.size > SAMPLE**2:
        array = array[tuple(slice(SAMPLE if axis >= array.ndim - 2 else 8) for axis in range(array.ndim))]
    return np.asarray(array).astype(np.float64)


def values_of(tensor: TensorProto, folder: Path | None) -> np.ndarray | None:
    """The values of a tensor; None where they are out of reach. Arguments: see `sample`."""
    return _external(tensor, folder) if is_external(tensor) else numpy_helper.to_array(tensor)


def _external(tensor: TensorProto, folder: Path | None) -> np.ndarray | None:
    info = external_data_helper.ExternalDataInfo(tensor)
    file = folder / info.location if folder is not None else None
    if file is None or not file.is_file():
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if file.stat().st_size < (info.offset or 0) + nbytes(tensor) or not nbytes(tensor):
        return None
    return np.memmap(file, dtype, "r", info.offset or 0, tuple(tensor.dims))


def tolerance(tensor: TensorProto) -> float:
    """How far values of a formula may lie from it, relatively: some roundings of the tensor's type.

    Of bfloat16's own it would take in what is learned and smooth: only what it holds exactly is seen.
    """
    return 4e-4 if tensor.data_type == TensorProto.FLOAT16 else 2e-5


# -- few values -------------------------------------------------------------------------------------------------------


def is_mask(x: np.ndarray) -> bool:
    """Return True if the values are one number and what makes a score vanish, or such ones hide parts of a table.

    A learned table may have rows or single entries that are switched off.
    """
    hidden = np.abs(x) >= HUGE
    if hidden.any():
        shown = x[~hidden]
        return not shown.size or np.ptp(shown) == 0 or (hidden.mean() >= LEAST_HIDDEN and _crosses(hidden))
    if x.size < 9 or x.max() != 0 or x.min() > MASKED:
        return False
    return bool(np.all((x == 0) | (x == x.min())))


def _crosses(hidden: np.ndarray) -> bool:
    """Return True if what is hidden are neither whole rows nor whole columns."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    whole = (np.all(rows == rows[:, :1]), np.all(rows == rows[:1]))
    return not any(map(bool, whole))


def is_selection(x: np.ndarray) -> bool:
    """Whether the values are 0 and 1, both, in a matrix that is neither the identity nor a filter like it."""
    if x.size < 9 or x.min() != 0 or x.max() != 1 or not np.all((x == 0) | (x == 1)):
        return False
    return sum(size > 1 for size in x.shape) > 1 and not bool(np.all(x.reshape(x.shape[0], -1).sum(1) <= 1))


def is_whole(x: np.ndarray) -> bool:
    """Whether the values are whole numbers such as strides, sizes and counts: some are large, or they are many."""
    if not x.size or not bool(np.all(x == np.round(x))):
        return False
    return bool(np.abs(x).max() >= 8) or (x.size >= 9 and len(np.unique(x)) > 2)


def is_evenly_spaced(x: np.ndarray, tol: float) -> bool:
    """Whether the values that occur lie at one distance from each other, as in a grid: three at least, of eight."""
    values = np.unique(np.round(x / (_scale(x) * tol * 4))) if x.size >= 8 else x
    if x.size < 8 or not 3 <= len(values) <= x.size // 2 + 4:
        return False
    steps = np.diff(values)
    return bool(np.ptp(steps) <= 2 + 4 * tol * steps.mean()) and _repeats(x, len(values), tol)


def _repeats(x: np.ndarray, count: int, tol: float) -> bool:
    """Return True if few different steps lead from entry to entry along an axis, as in a flattened grid.

    Learned numbers of few bits lie on a grid too, but step from any of the `count` values to any other.
    """
    bound, grain = max(3, count // 2), _scale(x) * tol * 8
    for axis in (axis for axis, size in enumerate(x.shape) if size >= 5):
        steps = np.round(np.diff(x, axis=axis) / grain)
        columns = np.moveaxis(steps, axis, -1).reshape(-1, x.shape[axis] - 1)
        if all(len(np.unique(column)) <= bound for column in columns[:COLUMNS]):
            return True
    return False


def is_uniform_kernel(x: np.ndarray) -> bool:
    """Return True if every channel of a convolution has the same kernel of several values, as a blur has.

    Or all kernels hold whole numbers, of three values at least, as those of Sobel and Laplace do.
    """
    if x.ndim >= 4 and x.shape[1] == 1 and len(np.unique(x)) >= 3 and bool(np.all(x == np.round(x))):
        return True
    return x.ndim >= 3 and x.shape[0] > 1 and x.shape[1] == 1 and bool(np.all(x == x[:1])) and np.ptp(x[0]) > 0


def _scale(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0)) or 1.0


# -- along an axis ----------------------------------------------------------------------------------------------------


def is_progression(x: np.ndarray, tol: float, least: int = 4) -> bool:
    """Whether a vector is a geometric progression: frequencies, or the slopes of ALiBi."""
    flat = x.reshape(-1)
    if sum(size > 1 for size in x.shape) != 1 or len(flat) < least or not bool(np.all(flat > 0)):
        return False
    logs = np.diff(np.log(flat))
    return bool(abs(logs[0]) > 0.01 and np.ptp(logs) <= tol * 10 * max(1.0, abs(logs[0])))


def is_arithmetic(x: np.ndarray, tol: float, least: int = 3) -> bool:
    """Whether a vector steps evenly, as the roots of Bessel functions and centers of bins do."""
    flat = x.reshape(-1)
    if sum(size > 1 for size in x.shape) != 1 or len(flat) < least:
        return False
    steps = np.diff(flat)
    return bool(abs(steps[0]) > 0 and np.ptp(steps) <= tol * _scale(x))


def is_count(x: np.ndarray) -> bool:
    """Return True for the numbers 0, 1, 2, ... along one axis: the bins over which a detector takes an expectation."""
    flat = x.reshape(-1)
    return len(flat) >= 8 and max(x.shape) == len(flat) and bool(np.all(flat == np.arange(len(flat))))


def is_harmonic(x: np.ndarray, tol: float) -> bool:
    """Whether a tensor runs along one of its axes as sines, or as straight lines, of which each has its own pace.

    For any sine of a steady angle, and for a line, x[n-1] + x[n+1] = c x[n], with one c in [-2, 2] for all n.
    """
    return any(_runs(np.moveaxis(x, axis, 0).reshape(size, -1), tol) for axis, size in enumerate(x.shape) if size >= 5)


def _runs(x: np.ndarray, tol: float) -> bool:
    """Whether most of the columns that vary obey the recurrence at four of five places; of many, some are looked at."""
    x = x[:, :: -(-x.shape[1] // COLUMNS)] if x.shape[1] else x
    moves = moving(x, tol)
    x = x[:, moves]
    if not x.size or moves.mean() < 0.2:
        return False
    right, places = steady(x, tol)
    if places.sum() - x.shape[1] < 3:
        return False
    return bool(right.sum() >= 0.8 * places.sum())


def moving(x: np.ndarray, tol: float) -> np.ndarray:
    """Which columns vary from row to row by so much that rounding does not hide what they obey."""
    return np.abs(np.diff(x, axis=0)).max(0) > 25 * tol * np.abs(x).max(0)


def steady(x: np.ndarray, tol: float) -> tuple[np.ndarray, np.ndarray]:
    """At how many places each column obeys the recurrence of its pace, and how many places tell."""
    size = np.abs(x).max(0)
    around, middle = x[:-2] + x[2:], x[1:-1]
    told = np.abs(middle) > 1e-2 * size
    count = np.maximum(told.sum(0), 1)
    ratios = np.where(told, around, 0) / np.where(told, middle, 1)
    ordered = np.sort(np.where(told, ratios, np.inf), axis=0)
    pace = ordered[(count - 1) // 2, np.arange(x.shape[1])]
    pace = np.where(np.abs(pace) <= 2.001, pace, np.nan)
    some = (np.abs(around) > tol * size) | told
    right = (np.abs(around - pace * middle) <= 2 * tol * size) & some
    return right.sum(0), some.sum(0)


def is_sinusoidal(x: np.ndarray, tol: float) -> bool:
    """Whether each row is made of the sines and cosines of some angles: half its width is the sum of its squares.

    One row or two may be zeros, which stand for padding.
    """
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x
    if x.ndim < 2 or len(rows) < 3 or x.shape[-1] < 4 or x.shape[-1] % 2 or _scale(x) > 1 + tol:
        return False
    norms = (rows**2).sum(1)
    off = np.abs(norms - x.shape[-1] / 2) > 4 * tol * x.shape[-1] ** 0.5
    return bool(off.sum() <= 2 and np.all(norms[off] == 0) and off.sum() < len(rows) / 2 and np.ptp(rows) > 0)


def is_rotation(x: np.ndarray, y: np.ndarray, tol: float) -> bool:
    """Whether two tensors are cosines and sines of the same angles, of which some are not zero."""
    return bool(np.all(np.abs(x * x + y * y - 1) <= 4 * tol)) and bool(np.ptp(x) > 1e-3)


def is_window(x: np.ndarray, tol: float) -> bool:
    """Whether a vector is a raised cosine, as the windows of Hann and Hamming are."""
    flat = x.reshape(-1)
    if len(flat) < 8 or max(x.shape) != len(flat) or abs(flat.max() - 1) > 0.1:
        return False
    return any(bool(raised_cosines(flat, period, tol)) for period in (len(flat), len(flat) - 1))


def raised_cosines(x: np.ndarray, period: int, tol: float) -> np.ndarray:
    """Whether a vector, or which columns of a matrix, are a constant and a cosine of that period."""
    waves = np.stack([np.ones(len(x)), np.cos(2 * np.pi * np.arange(len(x)) / period)], -1)
    parts = np.linalg.lstsq(waves, x)[0]
    return (np.abs(parts[1]) > 0.1) & (np.abs(x - waves @ parts).max(0) <= 2 * tol)


# -- matrices ---------------------------------------------------------------------------------------------------------


def is_filter_bank(x: np.ndarray) -> bool:
    """Whether each column, or each row, rises from zeros and falls to them again, and most entries are zeros."""
    x = x.squeeze() if x.ndim > 2 else x
    if (
        x.ndim != 2
        or min(x.shape) < 3
        or x.shape[0] == x.shape[1]
        or x.min() < 0
        or (x == 0).mean() < 0.4
        or x.max() == 0
    ):
        return False
    return any(_rise_and_fall(each) for each in (x, x.T))


def _rise_and_fall(x: np.ndarray) -> bool:
    """Whether every column rises to one maximum and falls, each further down than the one before it."""
    tops = x.argmax(0)
    at = np.arange(len(x))[:, None]
    steps = np.diff(x, axis=0)
    good = np.where(at[:-1] < tops, steps >= 0, steps <= 0)
    return bool(np.all(good) and np.all(np.diff(tops[x.max(0) > 0]) >= 0)) and len(np.unique(tops)) > 2


def is_adjacency(x: np.ndarray, tol: float) -> bool:
    """Whether a matrix is a graph's: it has zeros, and is symmetric or averages, and is more than a diagonal."""
    if x.ndim < 2 or x.shape[-1] < 3 or x.shape[-2] < 3:
        return False
    x = x.reshape(-1, *x.shape[-2:])
    zeros = x == 0
    if not 0.1 <= zeros.mean() < 1 or bool(np.all((~zeros).sum(-1) <= 1)):
        return False
    square = x.shape[-1] == x.shape[-2]
    symmetric = square and bool(np.all(np.abs(x - x.swapaxes(-1, -2)) <= tol * _scale(x)))
    averages = bool(np.all(x >= 0)) and any(bool(np.all(np.abs(x.sum(axis) - 1) <= 20 * tol)) for axis in (-1, -2))
    return (symmetric and bool(zeros.sum() > 2)) or averages


def is_unit(x: np.ndarray, tol: float) -> bool:
    """Whether a vector without zeros has the length one, as the singular vectors of a spectral norm have."""
    flat = x.reshape(-1)
    vector = len(flat) >= 3 and max(x.shape) == len(flat) and bool(np.all(flat))
    return vector and bool(abs(np.linalg.norm(flat) - 1) <= tol and np.ptp(np.abs(flat)) > 0.01)


# -- in words ---------------------------------------------------------------------------------------------------------


class Test(NamedTuple):
    """A formula that values may follow: its identifier, the same in words, and the test."""

    name: str
    words: str
    passes: Callable[[np.ndarray, float], bool]


Tests = tuple[Test, ...]

NOTHING = Test("nothing", "no number at all", lambda x, tol: bool(np.isnan(x).all()))

SINUSOIDS = Test("sinusoids", "a table of sines and cosines", is_sinusoidal)

FROZEN: Tests = (SINUSOIDS, Test("count", "the numbers 0, 1, 2 and so on", lambda x, tol: is_count(x)))
"""What is a constant even where it was a parameter: one that PyTorch was told not to train."""

PROGRESSIONS: Tests = (
    Test("geometric", "geometric", lambda x, tol: is_progression(x, tol, least=3)),
    Test("arithmetic", "arithmetic", is_arithmetic),
)
"""What frequencies are, where learned ones would not be."""

ANYWHERE: Tests = (
    Test("mask", "a mask: its values are 0 and one that makes a score vanish", lambda x, tol: is_mask(x)),
    SINUSOIDS,
    Test("lines", "a table of sines or of even steps", is_harmonic),
    Test("window", "a window of a Fourier transform", is_window),
    Test("filters", "a bank of filters", lambda x, tol: is_filter_bank(x)),
)
"""What is a constant wherever it is read, but where an operator expects a bias or a scale."""

WHOLE = "whole"
ELEMENTWISE: Tests = (
    Test("selection", "a mask of zeros and ones", lambda x, tol: is_selection(x)),
    Test(WHOLE, "a table of whole numbers", lambda x, tol: is_whole(x)),
    Test("grid", "a grid of even steps", is_evenly_spaced),
    Test("progression", "a geometric progression", is_progression),
)
"""What is a constant where it meets a value element by element, besides."""

MULTIPLIED: Tests = (
    Test("graph", "the matrix of a graph", is_adjacency),
    Test("kernel", "one kernel for all channels", lambda x, tol: is_uniform_kernel(x)),
    Test("unit", "a singular vector of a spectral norm", is_unit),
)
"""What is a constant in a product of matrices or a convolution, besides."""


def first(x: np.ndarray, tol: float, tests: Tests) -> Test | None:
    """Return the first of `tests` that the values pass."""
    if x.size < 2 or bool(np.any(np.isnan(x))):
        return None
    with np.errstate(all="ignore"):
        return next((test for test in tests if test.passes(x, tol)), None)
