"""Recognize tensors whose values follow a formula: masks, tables of sines, grids, filters.

Learned values do not follow a formula. Each test is strict, up to the rounding of the tensor's type. A learned table
that is merely smooth or sparse does not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, numpy_helper

from onnxgrad_cli.ir.types import is_external, nbytes

MAX_EXAMINED_BYTES = 1 << 26
"""Largest size of a tensor, in bytes, whose values are examined."""

SAMPLE = 128
"""Number of entries examined along each of the last two axes. Along other axes, 8 are examined."""

COLUMNS = 48
"""Largest number of columns of a table that are compared with a formula."""

HUGE = 1e30
LEAST_HIDDEN = 0.2
"""Smallest fraction of a table's entries that a mask hides. A causal mask hides nearly half of them."""

MASKED = -100.0
"""Largest (least negative) number that hides a score when a mask adds it. Swin's masks use this number."""


def sample(tensor: TensorProto, folder: Path | None) -> np.ndarray | None:
    """Return the first entries of a tensor in float64, or None if they can't be read.

    Args:
        tensor: the tensor.
        folder: the folder that locations of external data are relative to.
    """
    array = None if nbytes(tensor) > MAX_EXAMINED_BYTES else values_of(tensor, folder)
    if array is None:
        return None
    if array.size > SAMPLE**2:
        array = array[tuple(slice(SAMPLE if axis >= array.ndim - 2 else 8) for axis in range(array.ndim))]
    return np.asarray(array).astype(np.float64)


def values_of(tensor: TensorProto, folder: Path | None) -> np.ndarray | None:
    """Return the values of a tensor, or None if they can't be read. See `sample` for the arguments."""
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
    """Return the tolerance for the distance of values from a formula, relative to their size: a few rounding errors.

    It depends on the tensor's type, except that bfloat16 gets the tolerance of float32. With a tolerance as coarse as
    bfloat16 itself, smooth learned values would pass. So in bfloat16, a formula is recognized only if the type can
    represent its values exactly.
    """
    return 4e-4 if tensor.data_type == TensorProto.FLOAT16 else 2e-5


# -- few values -------------------------------------------------------------------------------------------------------


def is_mask(x: np.ndarray) -> bool:
    """Return True for a mask: huge or very negative entries, which hide scores when they are added.

    A mask consists of zeros and one very negative number, or of huge values and at most one other number. A table with
    several other numbers is a mask only if at least the fraction `LEAST_HIDDEN` of its entries is huge, and these are
    not just whole rows or whole columns. Otherwise it may be a learned table in which rows or single entries are
    switched off.
    """
    hidden = np.abs(x) >= HUGE
    if hidden.any():
        shown = x[~hidden]
        return not shown.size or np.ptp(shown) == 0 or (hidden.mean() >= LEAST_HIDDEN and _crosses(hidden))
    if x.size < 9 or x.max() != 0 or x.min() > MASKED:
        return False
    return bool(np.all((x == 0) | (x == x.min())))


def _crosses(hidden: np.ndarray) -> bool:
    """Return True if the hidden entries are neither whole rows nor whole columns."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    whole = (np.all(rows == rows[:, :1]), np.all(rows == rows[:1]))
    return not any(map(bool, whole))


def is_selection(x: np.ndarray) -> bool:
    """Return True for a matrix of zeros and ones that is neither an identity matrix nor an identity filter."""
    if x.size < 9 or x.min() != 0 or x.max() != 1 or not np.all((x == 0) | (x == 1)):
        return False
    return sum(size > 1 for size in x.shape) > 1 and not bool(np.all(x.reshape(x.shape[0], -1).sum(1) <= 1))


def is_whole(x: np.ndarray) -> bool:
    """Return True if all values are whole numbers and one is large or many differ, as in strides or counts."""
    if not x.size or not bool(np.all(x == np.round(x))):
        return False
    return bool(np.abs(x).max() >= 8) or (x.size >= 9 and len(np.unique(x)) > 2)


def is_evenly_spaced(x: np.ndarray, tol: float) -> bool:
    """Return True if the distinct values are evenly spaced, as in a grid.

    A tensor needs at least 8 entries and 3 distinct values.
    """
    values = np.unique(np.round(x / (_scale(x) * tol * 4))) if x.size >= 8 else x
    if x.size < 8 or not 3 <= len(values) <= x.size // 2 + 4:
        return False
    steps = np.diff(values)
    return bool(np.ptp(steps) <= 2 + 4 * tol * steps.mean()) and _repeats(x, len(values), tol)


def _repeats(x: np.ndarray, count: int, tol: float) -> bool:
    """Return True if the steps between neighbours along an axis have few different values, as in a flattened grid.

    Learned low-bit values are evenly spaced too, but any of the `count` values may follow any other one, so they have
    many different steps.
    """
    bound, grain = max(3, count // 2), _scale(x) * tol * 8
    for axis in (axis for axis, size in enumerate(x.shape) if size >= 5):
        steps = np.round(np.diff(x, axis=axis) / grain)
        columns = np.moveaxis(steps, axis, -1).reshape(-1, x.shape[axis] - 1)
        if all(len(np.unique(column)) <= bound for column in columns[:COLUMNS]):
            return True
    return False


def is_uniform_kernel(x: np.ndarray) -> bool:
    """Return True if all channels of a depthwise convolution have the same kernel, which isn't constant, as in a blur.

    Kernels of whole numbers with at least three different values pass too, such as those of Sobel and Laplace.
    """
    if x.ndim >= 4 and x.shape[1] == 1 and len(np.unique(x)) >= 3 and bool(np.all(x == np.round(x))):
        return True
    return x.ndim >= 3 and x.shape[0] > 1 and x.shape[1] == 1 and bool(np.all(x == x[:1])) and np.ptp(x[0]) > 0


def _scale(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0)) or 1.0


# -- along an axis ----------------------------------------------------------------------------------------------------


def is_progression(x: np.ndarray, tol: float, least: int = 4) -> bool:
    """Return True for a geometric progression, such as frequencies or the slopes of ALiBi."""
    flat = x.reshape(-1)
    if sum(size > 1 for size in x.shape) != 1 or len(flat) < least or not bool(np.all(flat > 0)):
        return False
    logs = np.diff(np.log(flat))
    return bool(abs(logs[0]) > 0.01 and np.ptp(logs) <= tol * 10 * max(1.0, abs(logs[0])))


def is_arithmetic(x: np.ndarray, tol: float, least: int = 3) -> bool:
    """Return True for an arithmetic progression, such as the centers of bins or the roots of a Bessel function."""
    flat = x.reshape(-1)
    if sum(size > 1 for size in x.shape) != 1 or len(flat) < least:
        return False
    steps = np.diff(flat)
    return bool(abs(steps[0]) > 0 and np.ptp(steps) <= tol * _scale(x))


def is_count(x: np.ndarray) -> bool:
    """Return True for the numbers 0, 1, 2, ... along one axis, such as a detector's bins, over which it averages."""
    flat = x.reshape(-1)
    return len(flat) >= 8 and max(x.shape) == len(flat) and bool(np.all(flat == np.arange(len(flat))))


def is_harmonic(x: np.ndarray, tol: float) -> bool:
    """Return True if, along one axis of a tensor, the entries form sines or straight lines, each with its own step.

    For a sine of evenly spaced angles and for a straight line, there is a c in [-2, 2] such that x[n-1] + x[n+1] = c
    x[n] for all n.
    """
    return any(_runs(np.moveaxis(x, axis, 0).reshape(size, -1), tol) for axis, size in enumerate(x.shape) if size >= 5)


def _runs(x: np.ndarray, tol: float) -> bool:
    """Return True if the columns that vary satisfy the recurrence of `is_harmonic` at 80 % of their entries.

    At least a fifth of the columns must vary. If there are many columns, only some are examined.
    """
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
    """Return one bool per column: True if its differences from row to row are larger than rounding errors."""
    return np.abs(np.diff(x, axis=0)).max(0) > 25 * tol * np.abs(x).max(0)


def steady(x: np.ndarray, tol: float) -> tuple[np.ndarray, np.ndarray]:
    """Return two counts per column: entries that satisfy the recurrence of `is_harmonic`, and entries examined."""
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
    """Return True if each row consists of sines and cosines of the same angles.

    The sum of squares of such a row is half its width. One or two rows may be zero, such as the row of a padding token.
    """
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x
    if x.ndim < 2 or len(rows) < 3 or x.shape[-1] < 4 or x.shape[-1] % 2 or _scale(x) > 1 + tol:
        return False
    norms = (rows**2).sum(1)
    off = np.abs(norms - x.shape[-1] / 2) > 4 * tol * x.shape[-1] ** 0.5
    return bool(off.sum() <= 2 and np.all(norms[off] == 0) and off.sum() < len(rows) / 2 and np.ptp(rows) > 0)


def is_rotation(x: np.ndarray, y: np.ndarray, tol: float) -> bool:
    """Return True if two tensors are the cosines and sines of the same angles, and the angles vary."""
    return bool(np.all(np.abs(x * x + y * y - 1) <= 4 * tol)) and bool(np.ptp(x) > 1e-3)


def is_window(x: np.ndarray, tol: float) -> bool:
    """Return True if a vector is a raised cosine, such as a Hann or Hamming window."""
    flat = x.reshape(-1)
    if len(flat) < 8 or max(x.shape) != len(flat) or abs(flat.max() - 1) > 0.1:
        return False
    return any(bool(raised_cosines(flat, period, tol)) for period in (len(flat), len(flat) - 1))


def raised_cosines(x: np.ndarray, period: int, tol: float) -> np.ndarray:
    """Return True if a vector is a constant plus a cosine of this period; for a matrix, one bool for each column."""
    waves = np.stack([np.ones(len(x)), np.cos(2 * np.pi * np.arange(len(x)) / period)], -1)
    parts = np.linalg.lstsq(waves, x)[0]
    return (np.abs(parts[1]) > 0.1) & (np.abs(x - waves @ parts).max(0) <= 2 * tol)


# -- matrices ---------------------------------------------------------------------------------------------------------


def is_filter_bank(x: np.ndarray) -> bool:
    """Return True for a filter bank: each column (or each row) rises from zeros to a peak and falls to zeros again.

    At least 40 % of the entries must be zeros.
    """
    x = x.squeeze() if x.ndim > 2 else x
    if x.ndim != 2 or min(x.shape) < 3 or x.shape[0] == x.shape[1]:
        return False
    if x.min() < 0 or x.max() == 0 or (x == 0).mean() < 0.4:
        return False
    return any(_rise_and_fall(each) for each in (x, x.T))


def _rise_and_fall(x: np.ndarray) -> bool:
    """Return True if each column rises to one maximum and falls, and the maxima's row numbers never decrease."""
    tops = x.argmax(0)
    at = np.arange(len(x))[:, None]
    steps = np.diff(x, axis=0)
    good = np.where(at[:-1] < tops, steps >= 0, steps <= 0)
    return bool(np.all(good) and np.all(np.diff(tops[x.max(0) > 0]) >= 0)) and len(np.unique(tops)) > 2


def is_adjacency(x: np.ndarray, tol: float) -> bool:
    """Return True for the adjacency matrix of a graph: it has zeros, isn't diagonal, and is symmetric or averages.

    A matrix averages if it has no negative entries and all its rows, or all its columns, add up to 1.
    """
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
    """Return True if a vector without zeros has length 1, as the singular vectors of spectral normalization have."""
    flat = x.reshape(-1)
    vector = len(flat) >= 3 and max(x.shape) == len(flat) and bool(np.all(flat))
    return vector and bool(abs(np.linalg.norm(flat) - 1) <= tol and np.ptp(np.abs(flat)) > 0.01)


# -- the lists of tests -----------------------------------------------------------------------------------------------


class Test(NamedTuple):
    """A test for a formula: its identifier, a description of the formula, and the function that tests values."""

    name: str
    words: str
    passes: Callable[[np.ndarray, float], bool]


Tests = tuple[Test, ...]

NOTHING = Test("nothing", "a tensor that contains only NaN", lambda x, tol: bool(np.isnan(x).all()))

SINUSOIDS = Test("sinusoids", "a table of sines and cosines", is_sinusoidal)

FROZEN: Tests = (SINUSOIDS, Test("count", "the numbers 0, 1, 2 and so on", lambda x, tol: is_count(x)))
"""Tests that find constants even among the parameters that an exporter recorded.

PyTorch code stores some constants as parameters that are not trained.
"""

PROGRESSIONS: Tests = (
    Test("geometric", "geometric", lambda x, tol: is_progression(x, tol, least=3)),
    Test("arithmetic", "arithmetic", is_arithmetic),
)
"""Tests that tables of fixed frequencies pass and learned frequencies do not."""

ANYWHERE: Tests = (
    Test("mask", "a mask with the values 0 and a large negative number", lambda x, tol: is_mask(x)),
    SINUSOIDS,
    Test("lines", "a table of sines or of evenly spaced values", is_harmonic),
    Test("window", "a window of a Fourier transform", is_window),
    Test("filters", "a bank of filters", lambda x, tol: is_filter_bank(x)),
)
"""Tests for constants, whichever nodes read them, unless an operator expects a bias or a scale at that position."""

WHOLE = "whole"
ELEMENTWISE: Tests = (
    Test("selection", "a mask of zeros and ones", lambda x, tol: is_selection(x)),
    Test(WHOLE, "a table of whole numbers", lambda x, tol: is_whole(x)),
    Test("grid", "a grid of evenly spaced values", is_evenly_spaced),
    Test("progression", "a geometric progression", is_progression),
)
"""Additional tests for constants that elementwise operators read."""

MULTIPLIED: Tests = (
    Test("graph", "the adjacency matrix of a graph", is_adjacency),
    Test("kernel", "the same kernel for all channels", lambda x, tol: is_uniform_kernel(x)),
    Test("unit", "a singular vector of a spectral normalization", is_unit),
)
"""Additional tests for constants that matrix products or convolutions read."""


def first(x: np.ndarray, tol: float, tests: Tests) -> Test | None:
    """Return the first of `tests` that the values pass, or None."""
    if x.size < 2 or bool(np.any(np.isnan(x))):
        return None
    with np.errstate(all="ignore"):
        return next((test for test in tests if test.passes(x, tol)), None)


# -- a fast filter for many vectors of one length, because some models have thousands ---------------------------------


MIN_TESTED_LENGTH = 8
"""Smallest length of vectors that `suspects` tests. Shorter vectors pass too many of its tests."""


def suspects(vectors: np.ndarray, tol: float) -> np.ndarray:
    """Return the vectors that may pass one of the tests. This is a fast filter: no vector that passes a test is missed.

    Args:
        vectors: float64 of shape [count, length], with at least `MIN_TESTED_LENGTH` entries each.
        tol: the tolerance of the tests.

    Returns:
        One bool per vector: True if it has to be tested.
    """
    with np.errstate(all="ignore"):
        seen = np.isnan(vectors).any(1)
        for may_pass in (
            _may_be_few_values,
            _may_run,
            _may_be_window,
            _may_be_whole,
            _may_be_evenly_spaced,
            _may_be_progression,
            _may_be_unit,
        ):
            seen |= may_pass(vectors, tol)
    return seen


def _may_be_few_values(x: np.ndarray, tol: float) -> np.ndarray:
    """Return one bool per vector: True if it may be a mask (huge values, or a maximum of 0 and a very low minimum)."""
    return (np.abs(x).max(1) >= HUGE) | ((x.max(1) == 0) & (x.min(1) <= MASKED))


def _may_run(x: np.ndarray, tol: float) -> np.ndarray:
    """Return one bool per vector: True if it may be a sine or a straight line."""
    right, places = steady(x.T, tol)
    return moving(x.T, tol) & (right >= 0.8 * places)


def _may_be_window(x: np.ndarray, tol: float) -> np.ndarray:
    """Return one bool per vector: True if it may be a raised cosine."""
    found, high = np.zeros(len(x), bool), np.abs(x.max(1) - 1) <= 0.1
    length = x.shape[1]
    for period in (length, length - 1):
        found[high] |= raised_cosines(x[high].T, period, 2 * tol)
    return found


def _may_be_whole(x: np.ndarray, tol: float) -> np.ndarray:
    """Return one bool per vector: True if it may be a table of whole numbers."""
    return (x == np.round(x)).all(1) & ((np.abs(x).max(1) >= 8) | (np.ptp(x, 1) >= 2))


def _may_be_evenly_spaced(x: np.ndarray, tol: float) -> np.ndarray:
    """Return one bool per vector: True if its values may be evenly spaced."""
    places = np.sort(np.round(x / (np.abs(x).max(1, keepdims=True) * tol * 4)))
    steps = np.diff(places)
    others = steps > 0
    count = 1 + others.sum(1)
    spread = steps.max(1) - np.where(others, steps, np.inf).min(1)
    mean = (places[:, -1] - places[:, 0]) / (count - 1)
    return (count >= 3) & (count <= x.shape[1] // 2 + 4) & (spread <= 3 + 5 * tol * mean)


def _may_be_progression(x: np.ndarray, tol: float) -> np.ndarray:
    """Return one bool per vector: True if it may be a geometric or arithmetic progression."""
    logs, steps = np.diff(np.log(x)), np.diff(x)
    geometric = (x > 0).all(1) & (np.ptp(logs, 1) <= tol * 20 * np.maximum(1, np.abs(logs[:, 0])))
    arithmetic = np.ptp(steps, 1) <= 2 * tol * np.abs(x).max(1)
    return (geometric | arithmetic) & (np.ptp(x, 1) > 0)


def _may_be_unit(x: np.ndarray, tol: float) -> np.ndarray:
    """Return one bool per vector: True if it may have length 1."""
    return (np.abs(np.linalg.norm(x, axis=1) - 1) <= 2 * tol) & (np.ptp(np.abs(x), 1) > 0)
