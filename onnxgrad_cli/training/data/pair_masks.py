"""Masks that say of each pair of places in a row whether one sees the other: those before it in the same sample.

Samples that are packed into one row then stay apart: the mask is block-diagonal, each block a lower triangle. Source:
M. Krell et al., Efficient Sequence Packing without Cross-contamination, 2021, arXiv:2107.02027, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np


def pair_mask(samples: Sequence[np.ndarray], places: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """The mask of a batch, (rows, places, places), with an axis of 1 behind the rows where the rank is 4.

    Places behind the end of a row see themselves, as the softmax over no place is no number.

    Args:
        samples: for each row the number of the sample that each of its tokens is of, (tokens,).
        places: to which rows are padded.
        dtype: bool, where True is what is seen; else a float, which is added to scores: 0, or the least number.
        rank: 3 or 4.
    """
    seen = np.tile(np.eye(places, dtype=bool), (len(samples), 1, 1))
    for mask, row in zip(seen, samples, strict=True):
        mask[: len(row), : len(row)] |= np.tri(len(row), dtype=bool) & (row[:, None] == row)
    found = seen if dtype.kind == "b" else np.where(seen, 0, _least(dtype)).astype(dtype)
    return found[:, None] if rank == 4 else found


def _least(dtype: np.dtype) -> float:
    finfo: Any = ml_dtypes.finfo  # numpy's does not know bfloat16
    return float(finfo(dtype).min)
