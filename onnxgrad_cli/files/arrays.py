"""Arrays in an .npz file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

OURS = b"written by onnxgrad"
"""The comment of an archive by which it is known as ours, so that the next one may take its place."""


def write_npz(arrays: Mapping[str, np.ndarray], stream: BinaryIO) -> None:
    """Write arrays as numpy.savez does, which can't take any name.

    Args:
        arrays: by their names; of no Python objects.
        stream: what they are written to.

    Raises:
        ValueError: an array holds Python objects.
    """
    with zipfile.ZipFile(stream, "w") as archive:
        archive.comment = OURS
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
