"""What a run tells as it goes: each step, each judgement, and how fast it gets on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stepped:
    """A step was taken.

    Attributes:
        step, steps: how many were taken, of how many there are to be.
        epoch, epochs: in which epoch, counted from 1, of how many.
        loss, rate: of this step.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    rate: float


@dataclass(frozen=True)
class Judged:
    """The weights were judged, at the end of an epoch or within one.

    Attributes:
        step, steps, epoch, epochs: see `Stepped`.
        rate: of the last step.
        results: what was found: 'loss', the mean over the epoch's samples, where it is over; 'val_loss' and
            'val_<metric>' with validation data.
        speed: samples a second, of the steps alone; nan before the first step.
        left: the seconds until the end of the run, if it goes on as fast.
        ends: whether the epoch is over.
        best: whether it is the best one so far.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    rate: float
    results: Mapping[str, float]
    speed: float
    left: float
    ends: bool
    best: bool


Watch = Callable[[Stepped | Judged], None]
"""Takes what a run tells."""


def unwatched(event: Stepped | Judged) -> None:
    """Tell nobody."""


@dataclass
class Pace:
    """How fast a run gets on, since this process has begun it.

    Attributes:
        samples, seconds: of the steps of this epoch.
        steps: of all epochs.
    """

    samples: int = 0
    seconds: float = 0.0
    steps: int = 0
    _begun: float = field(default_factory=time.perf_counter)

    def add(self, samples: int, seconds: float) -> None:
        """Count a step."""
        self.samples, self.seconds, self.steps = self.samples + samples, self.seconds + seconds, self.steps + 1

    def lap(self) -> None:
        """Begin an epoch."""
        self.samples, self.seconds = 0, 0.0

    @property
    def speed(self) -> float:
        """Samples a second in the steps of this epoch; nan before the first."""
        return self.samples / self.seconds if self.seconds else float("nan")

    def left(self, steps: int) -> float:
        """How many seconds so many steps will take, with all that lies between them."""
        return (time.perf_counter() - self._begun) / self.steps * steps if self.steps else float("nan")
