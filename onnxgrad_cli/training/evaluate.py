"""The evaluation of weights: the loss and the metrics over a whole set of data, in inference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgrad_cli.execution.session import Buffer
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.class_metrics import Confusion
from onnxgrad_cli.training.data import Batches, Data
from onnxgrad_cli.training.eval_model import EvalResult, EvalSession
from onnxgrad_cli.training.metrics import YES_AND_NO, Metric, Named


@dataclass(frozen=True)
class Evaluator:
    """Evaluates weights on data that are not trained on.

    Attributes:
        session: runs the eval model.
        data: the validation data.
        batches: the validation data in batches, in their own order.
        metrics: what is measured besides the loss, each of the output and the label of its term.
        ema: weight -> the state with its moving average, which is evaluated in place of the weight.
    """

    session: EvalSession
    data: Data
    batches: Batches
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
            _update(named.begin(), named.term, result, first)

    def __call__(self, weights: Mapping[str, Buffer]) -> dict[str, float]:
        """Return the loss, as 'loss', and each metric by its name.

        The loss is that of all data as one batch, whatever the size of the batches: each loss is the mean over what
        counts in it, samples or labels. With the reduction 'sum' it is divided by the number of samples.
        """
        return self.measure(weights, ())

    def measure(
        self, weights: Mapping[str, Buffer], more: Sequence[tuple[Term, Confusion]], metrics: bool = True
    ) -> dict[str, float]:
        """The loss and the metrics, as a call gives them, and what else is to take all batches.

        Args:
            weights: those of a trainer.
            more: takes the output and the label of a term.
            metrics: whether metrics are measured.
        """
        begun = [(named, named.begin()) for named in self.metrics] if metrics else []
        weights = {**weights, **{name: weights[average] for name, average in self.ema.items()}}
        total = _Total(self.session.sums, self.session.weights)
        for part in self.batches:
            feeds = self.data.batch(part.indices)
            result = self.session(feeds, weights)
            total.add(result, len(part.indices))
            for named, found in begun:
                _update(found, named.term, result, feeds)
            for term, taken in more:
                _update(taken, term, result, feeds)
        return {"loss": total.value(), **{named.name: found.value() for named, found in begun}}


class _Total:
    """The loss of all batches as one.

    Attributes:
        sums: True if the losses of a batch are sums, False if they are means.
        weights: the weight of each loss.
    """

    def __init__(self, sums: bool, weights: Sequence[float]) -> None:
        self.sums, self.weights = sums, weights
        self._totals, self._counts = [0.0] * len(weights), [0.0] * len(weights)
        self._samples, self._penalty = 0, 0.0

    def add(self, result: EvalResult, samples: int) -> None:
        """Take a batch. A mean without labels that count is nan, and adds nothing."""
        self._samples += samples
        self._penalty = result.penalty
        for position, (value, divisor) in enumerate(zip(result.values, result.divisors, strict=True)):
            count = samples if divisor is None else divisor
            if self.sums or count:
                self._totals[position] += value if self.sums else value * count
                self._counts[position] += count

    def value(self) -> float:
        """Return the loss; nan if nothing counts in one of the losses."""
        if not self._samples or not (self.sums or all(self._counts)):
            return math.nan
        counts = [1.0] * len(self.weights) if self.sums else self._counts
        parts = zip(self.weights, self._totals, counts, strict=True)
        loss = sum(weight * total / count for weight, total, count in parts) + self._penalty
        return loss / self._samples if self.sums else loss


def _update(metric: Metric | Confusion, term: Term | None, result: EvalResult, feeds: Arrays) -> None:
    assert term is not None
    metric.update(result.outputs[term.output], feeds[term.label])


def confusions(terms: Sequence[Term], most: int) -> list[tuple[Term, Confusion]]:
    """What counts how often each class was taken for each, for each output of yes and no or of at most so many classes.

    Labels of the output's shape count one by one.
    """
    found: dict[str, tuple[Term, Confusion]] = {}
    for term in terms:
        if term.label and term.name != "causal-lm" and (term.name in YES_AND_NO or 0 < term.classes <= most):
            ignored = -100 if term.ignore_index is None else term.ignore_index
            threshold = YES_AND_NO.get(term.name, 0.5)
            each = Confusion(threshold=threshold, ignore_index=ignored, class_axis=term.class_axis)
            found.setdefault(term.output, (term, each))
    return list(found.values())
