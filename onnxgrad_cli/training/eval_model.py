"""The eval model: the loss and the outputs of a model in inference, on the present weights of a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TypeProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.choices import Mode
from onnxgrad_cli.execution.session import CPU, Buffer, feed, of_samples, open_session
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import give_own_statistics
from onnxgrad_cli.ir.skeleton import copied, without_initializers
from onnxgrad_cli.metadata import describe, has_derivatives
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.roles import embed
from onnxgrad_cli.training.data.pasts import with_sizes_of_pasts


@dataclass(frozen=True)
class EvalTerm:
    """A loss of the eval model: its value, what its mean divides by ("": the number of samples), and its weight."""

    value: str
    divisor: str
    weight: float


@dataclass(frozen=True)
class EvalResult:
    """The results of a batch.

    Attributes:
        outputs: name -> an output that is compared with labels.
        values: the value of each loss, before its weight.
        divisors: what the mean of each loss divides by; None: the number of samples.
        penalty: the sum of the penalties on weights.
    """

    outputs: Mapping[str, np.ndarray]
    values: Sequence[float]
    divisors: Sequence[float | None]
    penalty: float


@dataclass(frozen=True)
class EvalModel:
    """The inference model with its loss; BatchNormalization and Dropout are in inference mode unless they were kept.

    Attributes:
        model: takes the model's inputs and the labels, and `weights` as inputs with a value; describes itself.
        loss: the output with the loss.
        outputs: the outputs that the losses compare with labels, and those asked for besides.
        weights: what of the weights it has.
        terms: the outputs with each loss and its divisor, if they were asked for.
        penalties: the outputs with the penalties on weights, if they were asked for.
        types: of what it is fed; empty pasts have the sizes that their other axes must have.
    """

    model: ModelProto
    loss: str
    outputs: list[str]
    weights: list[str]
    terms: Sequence[EvalTerm] = ()
    penalties: Sequence[str] = ()
    types: Mapping[str, TypeProto] = field(default_factory=dict)


def make_eval_model(
    model: ModelProto,
    options: Options,
    weights: Iterable[str],
    path: Path | None = None,
    outputs: Iterable[str] = (),
    keep_mode: bool = False,
    counted: bool = False,
) -> EvalModel:
    """Make the eval model of an inference model.

    Args:
        model: the inference model; not changed.
        options: those of the training model: its losses, and the outputs they take.
        weights: the names of a trainer's weights and state.
        path: where the model was read from; external data are relative to it.
        outputs: outputs of the model that are wanted besides those that the losses take.
        keep_mode: leave BatchNormalization and Dropout in the mode in which the model came.
        counted: output each loss, what its mean divides by, and the penalties.
    """
    copy, weights = copied(model), list(weights)
    give_own_statistics(copy, weights)
    mode: Mode = "keep" if keep_mode or has_derivatives(model) else "eval"
    whole = replace(options, mode=mode, lora_dropout=0.0, optimizer="", optimizer_options={}, loss_chunks=1)
    built = TrainingModel(Graph(copy, path), whole)
    built.training.may_be_none = True
    built.run(stop_after="loss")
    graph, training = built.graph, built.training
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
    embed(graph, built.options, training)
    types = with_sizes_of_pasts({value.name: value.type for value in graph.proto.graph.input}, graph)
    return EvalModel(graph.commit(), training.loss, compared, bound, terms, penalties, types)


class EvalSession:
    """A session on the inference model with its loss; see `make_eval_model`.

    Attributes:
        inputs: what it is fed: the model's inputs and the labels, names.
        weights: the weight of each loss.
        sums: True if losses are sums over the batch, False if they are means.
    """

    def __init__(
        self,
        model: ModelProto,
        options: Options,
        weights: Mapping[str, object],
        *,
        path: Path | None = None,
        provider: str = CPU,
        threads: int | None = None,
        keep_mode: bool = False,
    ) -> None:
        """Open a session on a model, which is not changed.

        Args:
            model: the inference model.
            options: those of the training model: its losses, and the outputs they take.
            weights: the names of a trainer's weights and state.
            path: where the model was read from; external data are relative to it.
            provider, threads: see `Trainer`.
            keep_mode: see `make_eval_model`.
        """
        found = make_eval_model(model, options, weights, path, keep_mode=keep_mode, counted=True)
        self._open(found, path, provider, threads)

    @classmethod
    def of(cls, found: EvalModel, path: Path | None, provider: str, threads: int | None) -> EvalSession:
        """A session on an eval model that was made with `counted`; see `__init__`."""
        session = cls.__new__(cls)
        session._open(found, path, provider, threads)
        return session

    def _open(self, found: EvalModel, path: Path | None, provider: str, threads: int | None) -> None:
        self._outputs, self._bound = found.outputs, found.weights
        self._terms, self._penalties = found.terms, found.penalties
        self.weights = [term.weight for term in found.terms]
        self.sums = describe(found.model).reduction == "sum"
        bare = without_initializers(found.model, self._bound)
        fed = set(self._bound) | {tensor.name for tensor in bare.graph.initializer}
        self.inputs = [value.name for value in bare.graph.input if value.name not in fed]
        self._session = open_session(bare, path, provider, threads)
        self._device = provider

    def __call__(self, feeds: Mapping[str, np.ndarray], weights: Mapping[str, Buffer]) -> EvalResult:
        """Return the losses and the outputs of a batch.

        Args:
            feeds: an array for each of `inputs`; what else is there is left out.
            weights: weights and state of a trainer: `Trainer.buffers`.

        Raises:
            OnnxgradError: onnxruntime fails on the batch.
        """
        binding = self._session.io_binding()
        for name in self.inputs:
            feed(binding, name, feeds[name])
        for name in self._bound:
            binding.bind_ortvalue_input(name, weights[name].value)
        parts = [name for term in self._terms for name in (term.value, term.divisor) if name]
        names = list(dict.fromkeys([*self._outputs, *parts, *self._penalties]))
        for name in names:
            binding.bind_output(name)
        with of_samples():
            self._session.run_with_iobinding(binding)
        found = dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))
        return EvalResult(
            {name: found[name] for name in self._outputs},
            [float(found[term.value]) for term in self._terms],
            [float(found[term.divisor]) if term.divisor else None for term in self._terms],
            sum(float(found[name]) for name in self._penalties),
        )
