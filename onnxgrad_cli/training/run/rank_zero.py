"""The duties of rank zero, for all processes that train together: it writes the folder of the run, and evaluates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.execution.session import Buffer
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.class_metrics import Confusion
from onnxgrad_cli.training.distributed.communicator import Alone, Communicator
from onnxgrad_cli.training.evaluate import Evaluator
from onnxgrad_cli.training.run.folder import Log, RunFolder, run_folder


class _Unwritten(Log):
    """The log of a process that writes none."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Forget a line."""

    def write(self) -> None:
        """Write nothing."""


class RankZeroFolder(RunFolder):
    """The folder of a run of several processes: the first one writes to it, all hear what it reads there."""

    def __init__(self, path: Path, communicator: Communicator) -> None:
        super().__init__(path)
        self._communicator = communicator

    def save(self, values: Mapping[str, np.ndarray], progress: Mapping[str, Any], best: bool = False) -> None:
        """See `RunFolder.save`."""
        if self._communicator.rank == 0:
            super().save(values, progress, best)

    def load(self, best: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """See `RunFolder.load`; all processes call it at the same time."""
        return self._communicator.broadcast(super().load(best) if self._communicator.rank == 0 else None)

    @contextmanager
    def log(self, steps: int, forms: Sequence[LogForm] = (), results: Sequence[str] = ()) -> Iterator[Log]:
        """See `RunFolder.log`."""
        if self._communicator.rank:
            yield _Unwritten(self.path)
        else:
            with super().log(steps, forms, results) as log:
                yield log


@contextmanager
def rank_zero_folder(path: Path, communicator: Communicator) -> Iterator[RunFolder]:
    """Hold a folder as long as the block runs, one process for all; see `run_folder`."""
    if communicator.rank:
        yield RankZeroFolder(path, communicator)
        return
    with run_folder(path) as folder:
        yield folder if communicator.world == 1 else RankZeroFolder(path, communicator)


@dataclass(frozen=True)
class RankZeroEvaluator(Evaluator):
    """An evaluator that works in the process of rank 0, and whose results all processes get.

    Attributes:
        communicator: connects them.
    """

    communicator: Communicator = Alone()  # noqa: RUF009

    def measure(
        self, weights: Mapping[str, Buffer], more: Sequence[tuple[Term, Confusion]], metrics: bool = True
    ) -> dict[str, float]:
        """See `Evaluator`; all processes call it at the same time."""
        first = self.communicator.rank == 0
        return self.communicator.broadcast(super().measure(weights, more, metrics) if first else None)
