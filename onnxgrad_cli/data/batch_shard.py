"""The part of a training batch that one of several processes gets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class BatchShard(NamedTuple):
    """The samples of a batch that one process gets. If there is only one process, it gets the whole batch.

    Attributes:
        indices: the indices of the samples, int64 (n,). In a short last batch a process may get none.
        whole: the number of samples in the whole batch. In a mean over the batch, this part has the weight n / whole.
        epoch: the index of the epoch, from 0. Random changes to samples depend on it and on `first`.
        first: the position of this part's first sample in the epoch.
        batch: the indices of all samples of the whole batch, int64. Sequences are padded to the longest sample of the
            whole batch. None if they are equal to `indices`.
    """

    indices: np.ndarray
    whole: int
    epoch: int = 0
    first: int = 0
    batch: np.ndarray | None = None
