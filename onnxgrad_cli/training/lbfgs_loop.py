"""The training loop with L-BFGS, in which scipy computes the steps. An epoch is one iteration on all samples."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.data import BatchShard
from onnxgrad_cli.training.loop import TrainingLoop
from onnxgrad_cli.training.run.folder import Log
from onnxgrad_cli.training.steps.base import NotFinite
from onnxgrad_cli.training.steps.full_batch import FullBatchTrainer

SAVED = 1.0
"""Seconds between checkpoints. An iteration on a small network takes 3 ms, and writing a checkpoint takes 13 ms."""


@dataclass
class LbfgsLoop(TrainingLoop):
    """The training loop with L-BFGS.

    The loss of an epoch is the loss after its iteration. A checkpoint is written after each epoch that is the best so
    far, at the end, and otherwise at most once per second. A resumed run starts without L-BFGS's history of steps.

    Attributes:
        trainer: the trainer that computes the loss and its gradient.
        solver: the options of scipy's solver.
        tell: the function that prints the reason for an early end.
    """

    trainer: FullBatchTrainer
    solver: Mapping[str, Any] = field(default_factory=dict)
    tell: Tell = silent
    SHORTER: ClassVar[str] = "continue with `resume`, which begins with a short step"
    _begun: float = 0.0
    _saved: float = 0.0

    @property
    def _steps_per_epoch(self) -> int:
        return 1

    @property
    def _dealt(self) -> int:
        return self.batches.epoch

    def _train(self, log: Log) -> bool:
        """Run the remaining iterations. Return False if `stop` ended the run early."""
        from scipy.optimize import minimize

        self._begun, accepted = time.perf_counter(), self.trainer.weights_vector

        def iterated(intermediate_result: Any) -> None:
            """End an epoch with the weights after an iteration. Raise StopIteration if the run ends."""
            nonlocal accepted
            accepted = intermediate_result.x.copy()
            self._end_iteration(accepted, float(intermediate_result.fun), log)
            if self.finished or self.stop():
                raise StopIteration

        options = {**self.solver, "maxiter": self.epochs, "maxfun": math.inf}  # `finished` ends the run earlier
        found = minimize(
            self._loss_and_gradient, accepted, jac=True, method="L-BFGS-B", callback=iterated, options=options
        )
        self.trainer.weights_vector = accepted  # a line search that fails leaves the weights of its last trial
        if not self.finished:
            if self.stop():
                return False
            if not self.progress.epochs:  # the loss can't be lowered
                self._count(float(found.fun), self._samples)
                self._end_epoch(log)
            self.progress.ended = "converged" if found.success else "no lower loss"
            self.tell(self._reason(found), 0)
        self._save(log)
        return True

    def _end_iteration(self, weights: np.ndarray, loss: float, log: Log) -> None:
        """Pass the weights after an iteration to the trainer, and end the epoch."""
        self.trainer.weights_vector = weights
        self.trainer.steps += 1
        self.batches.epoch += 1
        now = time.perf_counter()
        self._record(loss, self._samples, now - self._begun, log)
        due = now - self._saved >= SAVED or bool(self.save_every and self.trainer.steps % self.save_every == 0)
        self._end_epoch(log, save=due)
        self._pace.lap()
        self._begun = time.perf_counter()
        self._saved = self._begun if due else self._saved

    @property
    def _samples(self) -> int:
        """The number of samples of an epoch."""
        batches = self.batches
        return len(batches) * batches.size if batches.drop_last else batches.samples

    def _reason(self, found: Any) -> str:
        """Return a message with the reason why scipy ended the run."""
        ftol, gtol = self.solver["ftol"], self.solver["gtol"]
        if not found.success:
            why = "its line search found no lower loss, perhaps because of rounding errors"
        elif np.abs(found.jac).max() <= gtol:
            why = f"it has converged, because no element of the gradient exceeds gtol={gtol:g}"
        elif ftol:
            why = f"it has converged, because the last iteration lowered the loss by no more than ftol={ftol:g} allows"
        else:
            why = "it has converged, because the last iteration did not lower the loss"
        return f"L-BFGS ended after iteration {self.trainer.steps}: {why}"

    def _loss_and_gradient(self, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss of all samples, and its gradient."""
        self.trainer.weights_vector = weights
        shown: list[tuple[BatchShard, Mapping[str, np.ndarray]]] = []
        try:
            return self.trainer.loss_and_gradient(self._feeds(shown))
        except NotFinite as error:
            raise self._not_finite(*shown[0], error) from None

    def _feeds(self, shown: list[tuple[BatchShard, Mapping[str, np.ndarray]]]) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield the arrays of each batch, and store the current batch in `shown` for error messages."""
        batches = copy.copy(self.batches)  # the position of the original stays at the start of an epoch
        for part in batches:
            shown[:] = [(part, self.data.batch(part.indices, part))]
            yield shown[0][1]
