"""The steps of a quantizer: one for all, for each index along an axis, or for each block along it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(values: np.ndarray, shape: Sequence[int], axis: int = 1, block_size: int = 0) -> np.ndarray:
    """Scales, or zero points, so that they broadcast with what they are of, of a given shape."""
    if values.size == 1:
        return values.reshape(())
    if block_size:
        return np.repeat(values, block_size, axis).take(range(shape[axis]), axis)
    return values.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
