"""The evaluation of weights: the loss and the metrics over a whole set of data, in inference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgrad_cli.execution.session import Buffer
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.data import Batches, Data
from onnxgrad_cli.training.eval_model import EvalSession
from onnxgrad_cli.training.metrics import Named


@dataclass(frozen=True)
class Evaluator:
    """Evaluates weights on data that are not trained on.

    Attributes:
        session: runs the eval model.
        data: the validation data.
        batches: the validation data in batches, in their own order.
        term: the loss whose output and label the metrics compare.
        metrics: what is measured besides the loss.
        ema: weight -> the state with its moving average, which is evaluated in place of the weight.
    """

    session: EvalSession
    data: Data
    batches: Batches
    term: Term
    metrics: Sequence[Named]
    ema: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """What is measured."""
        return ["loss", *(named.name for named in self.metrics)]

    def check(self, weights: Mapping[str, Buffer]) -> None:
        """Make sure, on one batch, that the metrics take what the model gives.

        Raises:
            UsageError: one does not.
        """
        first = self.data.batch(np.arange(min(self.batches.size, len(self.data))))
        result = self.session(first, weights)
        for named in self.metrics:
            named.begin().update(result.outputs[self.term.output], first[self.term.label])

    def __call__(self, weights: Mapping[str, Buffer]) -> dict[str, float]:
        """The loss, as 'loss', and each metric by its name.

        The loss is the mean over all that counts in it: labels that are not left out, or samples.
        """
        begun = {named.name: named.begin() for named in self.metrics}
        weights = {**weights, **{name: weights[average] for name, average in self.ema.items()}}
        total, count = 0.0, 0.0
        for part in self.batches:
            feeds = self.data.batch(part.indices)
            result = self.session(feeds, weights)
            weight = len(part.indices) if result.count is None else result.count
            total += result.loss * weight if weight else 0.0
            count += weight
            for metric in begun.values():
                metric.update(result.outputs[self.term.output], feeds[self.term.label])
        loss = total / count if count else math.nan
        return {"loss": loss, **{name: metric.value() for name, metric in begun.items()}}
