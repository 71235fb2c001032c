"""Two overlapping buffers for each tensor: the next values can follow the last ones in hardly more than their memory.

Tensors lie in a row, and the further buffer of each begins a little behind the nearer one. Who writes the row anew from
its beginning, slice by slice no longer than this little, overwrites only what has been read; and so on the way back,
from its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

ALIGNED = 64
"""Bytes; the address of each buffer is a multiple of this."""


def overlapping_buffers(
    tensors: Mapping[str, tuple[Sequence[int], np.dtype]], shift: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Allocate a row of tensors twice; the values are undefined.

    Args:
        tensors: shape and type of each by its name, in order.
        shift: the bytes between the two buffers of a tensor; rounded up to a multiple of `ALIGNED`.

    Returns:
        The further buffer of each tensor, and the nearer one.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    shift = _aligned(shift)
    row = np.empty(shift + sum(map(_aligned, sizes.values())) + ALIGNED, np.uint8)
    start = -row.ctypes.data % ALIGNED
    near: dict[str, np.ndarray] = {}
    far: dict[str, np.ndarray] = {}
    for name, (shape, dtype) in tensors.items():
        for buffers, first in ((near, start), (far, start + shift)):
            buffers[name] = row[first : first + sizes[name]].view(dtype).reshape(shape)
        start += _aligned(sizes[name])
    return far, near


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
