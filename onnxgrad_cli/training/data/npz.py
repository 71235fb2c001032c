"""Data in an .npz file, whose keys are the names of the inputs.

Only the arrays that are inputs are read, and these into memory: a zip archive can't be mapped. Data larger than memory
are better kept as a folder of .npy files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.reading import Found, reading


def read(path: Path, inputs: InputTypes | None = None) -> Found:
    """The arrays of an .npz file that are inputs, or without `inputs` all of them.

    Raises:
        UsageError: it can't be read.
    """
    hint = "write one with numpy.savez(FILE, name=array, ...)"
    with reading(path, "an .npz file", hint):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, without a name")
    arrays, others = {}, []
    with archive:
        for name in archive.files:
            if inputs is not None and name not in inputs:
                others.append(name)
                continue
            with reading(path, f"an .npz file with an array '{name}'", hint):
                arrays[name] = archive[name]
    return Found(arrays, others)
