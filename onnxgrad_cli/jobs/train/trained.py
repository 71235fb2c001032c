"""What came of a run of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trained:
    """What came of a run.

    Attributes:
        reason: why it ended: 'done', 'max steps', 'no better' or 'stopped'; then nothing was written but the
            checkpoint.
        epochs: what each epoch has come to: 'loss', and 'val_loss' and 'val_<metric>' with validation data.
        best: the epoch whose weights were taken, counted from 1.
        by: what says which epoch is best, a name in `epochs`; "" where the last one is taken, as nothing says so.
        steps: how many were taken in all.
        seconds: how long this call took.
        files: what was written: the model, then the folder of the run, in which its report is too. Empty if the run
            was interrupted, or was finished before.
    """

    reason: str
    epochs: list[dict[str, float]]
    best: int
    by: str
    steps: int
    seconds: float
    files: list[Path]
