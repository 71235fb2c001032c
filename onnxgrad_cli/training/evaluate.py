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
        """The loss, as 'loss', and each metric by its name.

        The loss is the mean over all that counts in it: labels that are not left out, or samples; where it is a sum, it
        is the sum over all.
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
        total, count, sums = 0.0, 0.0, False
        for part in self.batches:
            feeds = self.data.batch(part.indices)
            result = self.session(feeds, weights)
            weight = len(part.indices) if result.count is None else result.count
            sums = result.sums
            if weight:
                total += result.loss if sums else result.loss * weight
            count += weight
            for named, found in begun:
                _update(found, named.term, result, feeds)
            for term, taken in more:
                _update(taken, term, result, feeds)
        loss = math.nan if not count else total if sums else total / count
        return {"loss": loss, **{named.name: found.value() for named, found in begun}}


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
