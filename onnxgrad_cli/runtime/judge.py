"""How good the weights are at the moment: the loss and the metrics over a whole set of data, in inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnxgrad_cli.passes.describe import Term
from onnxgrad_cli.runtime.data import Batches, Data
from onnxgrad_cli.runtime.evaluation import Evaluator
from onnxgrad_cli.runtime.metrics import Named
from onnxgrad_cli.runtime.session import Buffer


@dataclass(frozen=True)
class Judge:
    """Judges weights on data that are not trained on.

    Attributes:
        evaluator: the model in inference.
        data: what it is judged on.
        size: of a batch.
        term: the loss whose output and label the metrics compare.
        metrics: what is measured besides the loss.
        averages: weight -> the state that is judged in its place.
    """

    evaluator: Evaluator
    data: Data
    size: int
    term: Term
    metrics: Sequence[Named]
    averages: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, weights: Mapping[str, Buffer]) -> dict[str, float]:
        """The loss, as 'loss', and each metric by its name. The loss is the mean over batches, by their sizes."""
        begun = {named.name: named.begin() for named in self.metrics}
        weights = {**weights, **{name: weights[average] for name, average in self.averages.items()}}
        total = 0.0
        for part in Batches(self.data, self.size, shuffle=False):
            feeds = self.data.batch(part.indices)
            judged = self.evaluator(feeds, weights)
            total += judged.loss * len(part.indices)
            for metric in begun.values():
                metric.update(judged.outputs[self.term.output], feeds[self.term.label])
        return {"loss": total / len(self.data), **{name: metric.value() for name, metric in begun.items()}}
