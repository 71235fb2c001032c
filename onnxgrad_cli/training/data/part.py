"""What is dealt out of the samples for a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """What a rank sees of a batch: the numbers of its samples, int64 (n,), and how many the whole batch has.

    Without ranks the two agree. In a last short batch a part may be empty. Its share in a mean is n / whole. The epoch
    and the place in it of the first sample are what random changes of samples follow from. `batch` has the numbers of
    all samples of the batch, to whose longest one sequences are padded; None if they are those of the part.
    """

    indices: np.ndarray
    whole: int
    epoch: int = 0
    first: int = 0
    batch: np.ndarray | None = None
