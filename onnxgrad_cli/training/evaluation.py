"""Evaluate weights: compute the loss and the metrics over a data set, with the inference model and its loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TypeProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.choices import Mode
from onnxgrad_cli.data import Batches, Data
from onnxgrad_cli.data.empty_kv_cache import with_sizes_of_pasts
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.session import Buffer, feed, of_samples, open_session
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import give_own_statistics
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.ir.weightless_copy import copied, without_initializers
from onnxgrad_cli.metadata import Term, describe, has_derivatives
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.tensor_roles import write_roles
from onnxgrad_cli.training.class_metrics import Confusion
from onnxgrad_cli.training.distributed.communicator import Alone, Communicator
from onnxgrad_cli.training.metrics import YES_AND_NO, Metric, RequestedMetric


@dataclass(frozen=True)
class EvalTerm:
    """The outputs of the eval model that belong to one loss.

    Attributes:
        value: the name of the output with the loss, not multiplied by the loss's weight.
        divisor: the name of the output with the number by which the loss divides its sum to get the mean; "" if that is
            the number of samples.
        weight: the loss's weight: its factor in the sum of all losses.
    """

    value: str
    divisor: str
    weight: float


@dataclass(frozen=True)
class EvalResult:
    """The results of one batch.

    Attributes:
        outputs: name -> array of each of `EvalModel.outputs`.
        values: the value of each loss, not multiplied by the loss's weight.
        divisors: for each loss, the number by which it divides its sum to get the mean; None if that is the number of
            samples.
        penalty: the sum of the penalties on weights.
    """

    outputs: Mapping[str, np.ndarray]
    values: Sequence[float]
    divisors: Sequence[float | None]
    penalty: float


@dataclass(frozen=True)
class EvalModel:
    """The inference model with its loss.

    BatchNormalization and Dropout run in inference mode, or in their original mode.

    Attributes:
        model: the model. Its inputs are the inputs of the inference model, the labels, and `weights`. Inputs in
            `weights` also have stored values as defaults. Its metadata describe its inputs and outputs.
        outputs: the outputs that the losses compare with labels, and further requested outputs.
        weights: the names of the trainer's weights and state, as far as the model has them.
        terms: the outputs of each loss; empty if they were not requested.
        penalties: the names of the outputs with the penalties on weights; empty if they were not requested.
        types: input -> its type. In the type of a KV cache input, the axes other than the length have the sizes that an
            empty cache must have.
        cautions: the cautions about the losses.
    """

    model: ModelProto
    outputs: list[str]
    weights: list[str]
    terms: Sequence[EvalTerm] = ()
    penalties: Sequence[str] = ()
    types: Mapping[str, TypeProto] = field(default_factory=dict)
    cautions: Sequence[Caution] = ()


def make_eval_model(
    model: ModelProto,
    options: Options,
    weights: Iterable[str],
    path: Path | None = None,
    outputs: Iterable[str] = (),
    keep_mode: bool = False,
    counted: bool = False,
) -> EvalModel:
    """Make the eval model: an inference model with its loss. Schedules of loss weights are ignored.

    Args:
        model: the inference model; not changed.
        options: the options of the training model, with its losses and their outputs.
        weights: the names of a trainer's weights and state, which become inputs if the model has them.
        path: where the model was read from; external data are relative to it.
        outputs: further outputs of the model to keep, in addition to the outputs of the losses.
        keep_mode: leave BatchNormalization and Dropout in the mode that they have in the model.
        counted: add the outputs that `EvalModel.terms` and `EvalModel.penalties` list.
    """
    copy, weights = copied(model), list(weights)
    give_own_statistics(copy, weights)
    mode: Mode = "keep" if keep_mode or has_derivatives(model) else "eval"
    losses = tuple(replace(spec, schedule="") if spec.schedule else spec for spec in options.losses)
    whole = replace(
        options, mode=mode, losses=losses, lora_dropout=0.0, optimizer="", optimizer_options={}, loss_chunks=1
    )
    built = TrainingModel(Graph(copy, path), whole)
    built.training.may_be_none = True
    graph, training = built.graph, built.training
    before = 0  # the number of cautions that are not about the losses
    for step, _ in built.steps("loss"):
        before = before if step.name == "loss" else len(training.cautions)
    compared = list(dict.fromkeys([*training.predictions, *outputs]))
    terms = [
        EvalTerm(name, training.divisors.get(position, ""), spec.weight)
        for position, (name, spec) in enumerate(zip(training.terms, options.losses, strict=True))
        if counted
    ]
    penalties = training.penalties if counted else []
    parts = [name for term in terms for name in (term.value, term.divisor) if name]
    del graph.proto.graph.output[:]
    for name in dict.fromkeys((training.loss, *compared, *parts, *penalties)):
        graph.add_output(name)
    graph.remove_unused()
    bound = [name for name in weights if name in graph.initializers]
    for name in bound:
        if name not in graph.input_names:
            graph.add_input(name, graph.types[name])
    write_roles(graph, built.options, training)
    types = with_sizes_of_pasts({value.name: value.type for value in graph.proto.graph.input}, graph)
    cautions = training.cautions[before:]
    return EvalModel(graph.commit(), compared, bound, terms, penalties, types, cautions)


class EvalSession:
    """A session that runs an eval model, which is the inference model with its loss.

    Attributes:
        inputs: the names of the model's inputs and the labels.
        weights: the weight of each loss.
        sums: True if losses are sums over the batch, False if they are means.
    """

    def __init__(self, found: EvalModel, path: Path | None, provider: str, threads: int | None) -> None:
        """Open a session on an eval model, which is not changed.

        Args:
            found: the result of `make_eval_model` with `counted=True`.
            path: where the inference model was read from; external data are relative to it.
            provider: the full name of the execution provider, such as 'CPUExecutionProvider'.
            threads: the number of CPU threads; None for onnxruntime's default.
        """
        self._outputs, self._bound = found.outputs, found.weights
        self._terms, self._penalties = found.terms, found.penalties
        self.weights = [term.weight for term in found.terms]
        self.sums = describe(found.model).reduction == "sum"
        bare = without_initializers(found.model, self._bound)
        fed = set(self._bound) | {tensor.name for tensor in bare.graph.initializer}
        self.inputs = [value.name for value in bare.graph.input if value.name not in fed]
        self._names = [value.name for value in bare.graph.output]
        self._session = open_session(bare, path, provider, threads)

    def __call__(self, feeds: Mapping[str, np.ndarray], weights: Mapping[str, Buffer]) -> EvalResult:
        """Return the losses and the outputs of a batch.

        Args:
            feeds: an array for each of `inputs`; other arrays are ignored.
            weights: weights and state of a trainer: `Trainer.buffers`.

        Raises:
            OnnxgradError: onnxruntime fails on the batch.
        """
        binding = self._session.io_binding()
        for name in self.inputs:
            feed(binding, name, feeds[name])
        for name in self._bound:
            binding.bind_ortvalue_input(name, weights[name].value)
        for name in self._names:
            binding.bind_output(name)
        with of_samples():
            self._session.run_with_iobinding(binding)
        found = dict(zip(self._names, binding.copy_outputs_to_cpu(), strict=True))
        return EvalResult(
            {name: found[name] for name in self._outputs},
            [float(found[term.value]) for term in self._terms],
            [float(found[term.divisor]) if term.divisor else None for term in self._terms],
            sum(float(found[name]) for name in self._penalties),
        )


@dataclass(frozen=True)
class Evaluator:
    """Evaluate weights on data that are not trained on.

    Attributes:
        session: runs the eval model.
        data: the validation data.
        batches: the validation data in batches, not shuffled.
        metrics: the metrics to compute, each from the output and the label of its term.
        ema: weight -> the name of the state with the moving average of the weight. The average is evaluated instead.
        communicator: connects the processes that train together. Rank 0 evaluates, and all get the results.
        terms: the losses.
        inputs: array of the data -> the input of the eval model that takes the array, where the names differ.
    """

    session: EvalSession
    data: Data
    batches: Batches
    metrics: Sequence[RequestedMetric]
    ema: Mapping[str, str] = field(default_factory=dict)
    communicator: Communicator = Alone()  # noqa: RUF009
    terms: Sequence[Term] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the results: 'loss' and the metrics."""
        return ["loss", *(named.name for named in self.metrics)]

    def check(self, weights: Mapping[str, Buffer]) -> None:
        """Compute the metrics on the first batch, to detect metrics that don't fit the model's outputs and labels.

        Raises:
            UsageError: a metric does not fit.
        """
        first = self._batch(np.arange(min(self.batches.size, len(self.data))))
        result = self.session(first, weights)
        for named in self.metrics:
            _update(named.begin(), named.term, result, first)

    def _batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {self.inputs.get(name, name): array for name, array in self.data.batch(indices).items()}

    def __call__(self, weights: Mapping[str, Buffer]) -> dict[str, float]:
        """Return the loss, as 'loss', and each metric by its name.

        The loss is computed as if all data were one batch, so it does not depend on the batch size. Each loss is the
        mean over the samples or labels that it does not ignore. With the reduction 'sum', the sum over all data is
        divided by the number of samples. If several processes train together, all must call this at the same time.
        """
        return self.communicator.broadcast(self.measure(weights, ()) if self.communicator.rank == 0 else None)

    def measure(
        self, weights: Mapping[str, Buffer], more: Sequence[tuple[Term, Confusion]], metrics: bool = True
    ) -> dict[str, float]:
        """Return the loss and the metrics, as `__call__` does, but in this process alone.

        Also update confusion matrices.

        Args:
            weights: the weights and state of a trainer.
            more: confusion matrices to update with every batch, each with the term that names its output and its label.
            metrics: compute the metrics; if False, return the loss alone.
        """
        begun = [(named, named.begin()) for named in self.metrics] if metrics else []
        weights = {**weights, **{name: weights[average] for name, average in self.ema.items()}}
        total = _Total(self.session.sums, self.session.weights)
        for part in self.batches:
            feeds = self._batch(part.indices)
            result = self.session(feeds, weights)
            total.add(result, len(part.indices))
            for named, found in begun:
                _update(found, named.term, result, feeds)
            for term, taken in more:
                _update(taken, term, result, feeds)
        return {"loss": total.value(), **{named.name: found.value() for named, found in begun}}


class _Total:
    """The loss of all batches together, as if they were one batch.

    Attributes:
        sums: True if the losses of a batch are sums, False if they are means.
        weights: the weight of each loss.
    """

    def __init__(self, sums: bool, weights: Sequence[float]) -> None:
        self.sums, self.weights = sums, weights
        self._totals, self._counts = [0.0] * len(weights), [0.0] * len(weights)
        self._samples, self._penalty = 0, 0.0

    def add(self, result: EvalResult, samples: int) -> None:
        """Add a batch.

        A loss that ignores all labels of the batch is skipped: it is a mean over no labels, which is nan.
        """
        self._samples += samples
        self._penalty = result.penalty
        for position, (value, divisor) in enumerate(zip(result.values, result.divisors, strict=True)):
            count = samples if divisor is None else divisor
            if self.sums or count:
                self._totals[position] += value if self.sums else value * count
                self._counts[position] += count

    def value(self) -> float:
        """Return the loss; nan if there were no samples, or a loss ignored all labels."""
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
    """Return an empty confusion matrix for each output of a binary loss or of a loss with at most `most` classes.

    An output with the loss causal-lm gets no matrix. If labels have the same shape as the output, each element counts
    as one sample.
    """
    found: dict[str, tuple[Term, Confusion]] = {}
    for term in terms:
        if term.label and term.name != "causal-lm" and (term.name in YES_AND_NO or 0 < term.classes <= most):
            ignored = -100 if term.ignore_index is None else term.ignore_index
            threshold = YES_AND_NO.get(term.name, 0.5)
            each = Confusion(threshold=threshold, ignore_index=ignored, class_axis=term.class_axis)
            found.setdefault(term.output, (term, each))
    return list(found.values())
