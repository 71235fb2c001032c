"""The events that a run reports, steps and evaluations, and its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stepped:
    """The event that a step was taken.

    Attributes:
        step, steps: the number of steps so far, and the total number.
        epoch, epochs: the current epoch, counted from 1, and the total number of epochs.
        loss, rate: the loss and the learning rate of this step. The rate is nan if the optimizer has none.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    rate: float


@dataclass(frozen=True)
class Judged:
    """The event that the weights were evaluated, at the end of an epoch or within one.

    Attributes:
        step, steps: the number of steps so far, and the total number.
        epoch, epochs: the current epoch, counted from 1, and the total number of epochs.
        rate: the learning rate of the last step.
        results: name -> value. At the end of an epoch, 'loss' is the mean training loss of its samples. With validation
            data there are also 'val_loss' and 'val_<metric>'.
        speed: samples per second, not counting the time between steps; nan before the first step.
        left: the estimated seconds until the end of the run.
        ends: True at the end of an epoch.
        best: True if the epoch is the best one so far.
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
"""A function that receives the events of a run."""


def unwatched(event: Stepped | Judged) -> None:
    """Ignore an event."""


@dataclass
class Pace:
    """The speed of a run, measured since this process started or resumed it.

    Attributes:
        samples, seconds: the number of samples of this epoch's steps so far, and the time that these steps took.
        steps: the number of steps of all epochs so far.
    """

    samples: int = 0
    seconds: float = 0.0
    steps: int = 0
    _begun: float = field(default_factory=time.perf_counter)

    def add(self, samples: int, seconds: float) -> None:
        """Count a step."""
        self.samples, self.seconds, self.steps = self.samples + samples, self.seconds + seconds, self.steps + 1

    def lap(self) -> None:
        """Reset the counts of the epoch."""
        self.samples, self.seconds = 0, 0.0

    @property
    def speed(self) -> float:
        """Samples per second in the steps of this epoch; nan before the first step."""
        return self.samples / self.seconds if self.seconds else float("nan")

    def left(self, steps: int) -> float:
        """Return the estimated seconds that `steps` more steps take, including the time between steps."""
        return (time.perf_counter() - self._begun) / self.steps * steps if self.steps else float("nan")
