"""Data for validation that are kept back from those that are trained on.

Which samples these are follows from the seed and their number alone, so that a run that goes on is evaluated on the
same ones. Both parts share the arrays: a part is the numbers of its samples.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data.dataset import Data


def held_out(data: Data, fraction: float, seed: int = 0) -> tuple[Data, Data]:
    """Keep a random part of data back for validation.

    Args:
        data: what is cut in two.
        fraction: the share that is kept back, between 0 and 1. The number of samples is rounded; for a model that
            takes batches of one size, to whole batches.
        seed: of the choice; it is independent of the order in which samples are seen.

    Returns:
        What is left to train on, and what is kept back; each in the order of the data.

    Raises:
        UsageError: one of the two would be empty.
    """
    unit = data.batch_size or 1
    count = round(fraction * len(data) / unit) * unit
    if not unit <= count <= len(data) - unit:
        least = "a sample" if unit == 1 else f"a batch of {unit}"
        raise UsageError(
            f"'{data.source}' has {len(data)} samples: {fraction:g} of them held out for validation would be {count}",
            f"that part and the rest need {least} each: choose another share, or add samples",
        )
    stream = np.random.SeedSequence(seed).spawn(1)[0]
    order = np.random.Generator(np.random.PCG64(stream)).permutation(len(data))
    training, validation = (_part(data, numbers) for numbers in (order[count:], order[:count]))
    return training, validation


def _part(data: Data, numbers: np.ndarray) -> Data:
    return replace(data, size=len(numbers), samples=np.sort(data.rows(numbers)))


def fraction_of(text: str | Path | float) -> float | None:
    """The share of the data that is asked for in place of other data; None where a file or folder is.

    Raises:
        UsageError: it is a number, but no share, and no file is called so.
    """
    try:
        found = float(str(text))
    except ValueError:
        return None
    if math.isnan(found) or Path(str(text)).exists():
        return None
    if not 0 < found < 1:
        raise UsageError(
            f"{text} of the data can't be held out for validation", "a share lies between 0 and 1, such as 0.2"
        )
    return found
