"""Data in an .npz file, whose keys are the names of the inputs.

Only the arrays that are inputs are read, and these into memory: a zip archive can't be mapped. Data larger than memory
are better kept as a folder of .npy files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxgrad_cli.runtime.data.ports import Ports
from onnxgrad_cli.runtime.data.reading import Found, reading


def read(path: Path, ports: Ports) -> Found:
    """The arrays of an .npz file.

    Raises:
        UsageError: it can't be read.
    """
    with reading(path, "an .npz file", "write one with numpy.savez(FILE, name=array, ...)"):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, without a name")
        with archive:
            arrays = {name: archive[name] for name in archive.files if name in ports}
            return Found(arrays, [name for name in archive.files if name not in ports])
