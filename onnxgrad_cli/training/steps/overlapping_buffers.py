"""Two places for each tensor that overlap: one set of tensors can follow the other in hardly more than its own memory.

Tensors lie in a row, in one place each a little further back than in the other. Who writes the row anew from its
beginning, slice by slice no longer than this little, overwrites only what has been read; and so on the way back, from
its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

ALIGNED = 64
"""Bytes that a tensor's place is a multiple of."""


def overlapping(
    tensors: Mapping[str, tuple[Sequence[int], np.dtype]], shift: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows of tensors, in both places; what they hold is undefined.

    Args:
        tensors: shape and type of each by its name, in order.
        shift: the bytes between the two places of a tensor; made a multiple of `ALIGNED`.

    Returns:
        The further place of each, and the nearer one.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    shift = _aligned(shift)
    row = np.empty(shift + sum(map(_aligned, sizes.values())) + ALIGNED, np.uint8)
    start = -row.ctypes.data % ALIGNED
    near: dict[str, np.ndarray] = {}
    far: dict[str, np.ndarray] = {}
    for name, (shape, dtype) in tensors.items():
        for places, begin in ((near, start), (far, start + shift)):
            places[name] = row[begin : begin + sizes[name]].view(dtype).reshape(shape)
        start += _aligned(sizes[name])
    return far, near


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
