"""The model as it is judged: its loss and its outputs in inference, on the weights that a trainer holds now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.builder import Built
from onnxgrad_cli.graph import Graph
from onnxgrad_cli.pipeline import Options
from onnxgrad_cli.runtime.session import CPU, Buffer, open_session, take_out


@dataclass(frozen=True)
class Judged:
    """What came of a batch: the loss, and the outputs that the losses judge, by name."""

    loss: float
    outputs: Mapping[str, np.ndarray]


class Evaluator:
    """A session on the inference model with its loss; BatchNormalization and Dropout are in inference mode.

    Attributes:
        inputs: what it is fed: the model's inputs and the labels, names.
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
    ) -> None:
        """Open a session on a model, which is not changed.

        Args:
            model: the inference model.
            options: what was built of it: its losses, and what they judge.
            weights: the names of what a trainer holds.
            path: where the model was read from; external data are relative to it.
            provider, threads: see `Trainer`.
        """
        copy = ModelProto()
        copy.CopyFrom(model)
        mode = "eval" if options.mode == "train" else options.mode
        built = Built(Graph(copy, path), replace(options, mode=mode))
        built.run(stop_after="loss")
        graph, training = built.graph, built.training
        self._loss, self._outputs = training.loss, list(dict.fromkeys(training.predictions))
        del graph.proto.graph.output[:]
        for name in (self._loss, *self._outputs):
            graph.add_output(name)
        graph.remove_unused()
        self._bound = [name for name in weights if name in graph.initializers]
        for name in self._bound:
            if name not in graph.input_names:
                graph.add_input(name, graph.types[name])
        final = graph.commit()
        take_out(final, self._bound, path)
        self.inputs = [value.name for value in final.graph.input if value.name not in graph.initializers]
        self._session = open_session(final, path, provider, threads)
        self._device = provider

    def __call__(self, feeds: Mapping[str, np.ndarray], weights: Mapping[str, Buffer]) -> Judged:
        """The loss and the outputs of a batch.

        Args:
            feeds: an array for each of `inputs`; what else is there is left out.
            weights: what a trainer holds: `Trainer.buffers`.
        """
        binding = self._session.io_binding()
        given = {name: Buffer(feeds[name]) for name in self.inputs}
        for name, buffer in {**given, **{name: weights[name] for name in self._bound}}.items():
            binding.bind_ortvalue_input(name, buffer.value)
        for name in (self._loss, *self._outputs):
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        loss, *outputs = binding.copy_outputs_to_cpu()
        return Judged(float(loss), dict(zip(self._outputs, outputs, strict=True)))
