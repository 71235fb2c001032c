"""A training model at work: each step takes a batch, and weights and state stay where onnxruntime has put them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import load_model
from onnxgrad_cli.passes.describe import describe
from onnxgrad_cli.runtime.held import RATE, Held, NotFinite, loosen, numpy_type
from onnxgrad_cli.runtime.session import CPU, Buffer, feed, open_session, take_out

__all__ = ["NotFinite", "Trainer"]


class Trainer(Held):
    """A training model with an optimizer, its weights and its state.

    Attributes:
        roles: what the model's inputs and outputs are for.
        inputs: what a step must be fed: the model's inputs and the labels.
        steps: how many were taken.
    """

    def __init__(
        self,
        model: ModelProto | TrainingModel | str | Path,
        *,
        path: Path | None = None,
        provider: str = CPU,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        """Open a session on a training model; the model is not changed.

        Args:
            model: a model that `build` has made with an optimizer, or the file it is in, which takes less memory:
                then its weights are nowhere else.
            path: where a model was read from; external data are relative to it.
            provider: the execution provider, by its full name.
            threads: how many the processor uses; None is onnxruntime's choice.
            seed: of what the model draws at random (Dropout); each step has its own random numbers.

        Raises:
            UsageError: the model has no optimizer, or is no training model.
            OnnxgradError: onnxruntime refuses the model, or the file can't be read.
        """
        if isinstance(model, TrainingModel):
            model, path = model.model, model.graph.path
        elif isinstance(model, (str, Path)):
            model, path = load_model(model)
        roles = describe(model)
        rates = [name for name, role in roles.inputs.items() if role == "learning rate"]
        if not rates:
            raise UsageError("the training model has no optimizer", "build it with --optimizer NAME")
        copy, values = take_out(model, roles.successors, path)
        del model  # so that the buffers may lie where it was
        types = {value.name: value.type for value in copy.graph.input}
        self._seed = loosen(copy, seed)
        outputs = {value.name: value for value in copy.graph.output}
        del copy.graph.output[:]
        copy.graph.output.extend(outputs[name] for name in (roles.loss, *roles.successors.values()))
        inputs = {name: types[name] for name in roles.sampled}
        super().__init__(roles, inputs, values | roles.begun(values), provider)
        self._session = open_session(copy, path, provider, threads)
        self._rate = Buffer(np.zeros((), numpy_type(types[rates[0]])), provider)
        self._loss = Buffer(np.zeros((), numpy_type(outputs[roles.loss].type)), provider)
        self._bindings = [self._bind(rates[0], *sides) for sides in (self._sides, self._sides[::-1])]

    def _bind(self, rate: str, before: Mapping[str, Buffer], after: Mapping[str, Buffer]) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        binding.bind_ortvalue_input(rate, self._rate.value)
        for name, buffer in before.items():
            binding.bind_ortvalue_input(name, buffer.value)
        binding.bind_ortvalue_output(self.roles.loss, self._loss.value)
        for name, buffer in after.items():
            binding.bind_ortvalue_output(self._successors[name], buffer.value)
        return binding

    def step(self, feeds: Mapping[str, np.ndarray], learning_rate: float = RATE) -> float:
        """Take a step on a batch; see `Held.step`."""
        self._check(feeds)
        binding = self._bindings[self._now]
        self._rate.write(np.asarray(learning_rate))
        self._draw(self._seed)
        try:
            for name, array in feeds.items():
                feed(binding, name, array)
            self._session.run_with_iobinding(binding)
        except Exception as error:  # of many kinds, none of them public
            raise self._failed(feeds, error) from error
        return self._take(float(self._loss.read()))
