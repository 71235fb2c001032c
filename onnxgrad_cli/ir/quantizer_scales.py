"""Broadcast the scales of a quantizer: one scale in all, one per index along an axis, or one per block of an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(values: np.ndarray, shape: Sequence[int], axis: int = 1, block_size: int = 0) -> np.ndarray:
    """Reshape or repeat scales or zero points so that they broadcast with the quantized tensor.

    Args:
        values: the scales or zero points.
        shape: the shape of the quantized tensor.
        axis: the axis along which the values vary.
        block_size: the number of consecutive indices that share a value; 0 if each index has its own.
    """
    if values.size == 1:
        return values.reshape(())
    if block_size:
        return np.repeat(values, block_size, axis).take(range(shape[axis]), axis)
    return values.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
