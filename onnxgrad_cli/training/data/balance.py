"""How often samples are drawn, so that all classes are seen alike often.

As PyTorch's WeightedRandomSampler with one over the size of its class for each sample: drawn with replacement, as many
as there are samples. So in an epoch some samples come several times and others never; the loss is as it was.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data.dataset import Data


def balance(data: Data, label: str, tell: Tell) -> np.ndarray:
    """The share of each sample, float64 (N,), which are 1 in all.

    Args:
        data: the training data.
        label: the number of a class for each sample, or yes and no as 1 and 0.
        tell: takes the sizes of the largest and the smallest class.

    Raises:
        UsageError: the label is none.
    """
    labels = _classes(data, label)
    if labels is None:
        raise UsageError(
            f"`balance`: the label '{label or 'of the loss'}' is no number of a class for each sample", "leave it out"
        )
    classes, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) > 1:
        tell(f"{len(classes)} classes of {counts.min():,} to {counts.max():,} samples are drawn alike often", 0)
    else:
        tell("caution: all samples are of one class: there is nothing to balance", 0)
    return (1.0 / counts / len(classes))[places]


def _classes(data: Data, label: str) -> np.ndarray | None:
    """The class of each sample, (N,): whole numbers, or yes and no as 1 and 0; None where labels are none."""
    column = data.arrays.get(label)
    if not isinstance(column, np.ndarray) or column.ndim not in (1, 2) or column[:1].size > 1:
        return None
    labels = np.asarray(column[data.rows(np.arange(len(data)))]).reshape(-1)
    whole = data.dtypes[label].kind in "iu"
    return labels if whole or bool(np.isin(labels, (0, 1)).all()) else None
