"""A training model at work: each step takes a batch, and weights and state stay where onnxruntime has put them.

They lie in two sets of buffers. A step reads one and writes the other, so that no update overwrites what a node may
still read; then the two change places, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto, TypeProto, helper

from onnxgrad_cli.builder import Built
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.graph import dtype_of, in_words, with_bodies
from onnxgrad_cli.passes.describe import Roles, describe
from onnxgrad_cli.runtime.session import CPU, Buffer, open_session, take_out


class NotFinite(OnnxgradError):
    """The loss is no finite number; weights and state are what they were before the step."""


class Trainer:
    """A training model with an optimizer, its weights and its state.

    Attributes:
        roles: what the model's inputs and outputs are for.
        inputs: what a step must be fed: the model's inputs and the labels.
        steps: how many were taken.
    """

    def __init__(
        self,
        model: ModelProto | Built,
        *,
        path: Path | None = None,
        provider: str = CPU,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        """Open a session on a training model; the model is not changed.

        Args:
            model: a model that `build` has made with an optimizer.
            path: where it was read from; external data are relative to it.
            provider: the execution provider, by its full name.
            threads: how many the processor uses; None is onnxruntime's choice.
            seed: of what the model draws at random (Dropout); each step has its own random numbers.

        Raises:
            UsageError: the model has no optimizer, or is no training model.
            OnnxgradError: onnxruntime refuses the model.
        """
        if isinstance(model, Built):
            model, path = model.model, model.graph.path
        copy = ModelProto()
        copy.CopyFrom(model)
        self.roles: Roles = describe(copy)
        self._successors = {role.of: name for name, role in self.roles.outputs.items() if role.role == "next state"}
        rates = [name for name, role in self.roles.inputs.items() if role == "learning rate"]
        if not rates:
            raise UsageError("the training model has no optimizer", "build it with --optimizer NAME")
        types = {value.name: value.type for value in copy.graph.input}
        self.inputs = {name: types[name] for name in self.roles.fed if name not in rates}
        self.steps = 0
        self._seed = _loosen(copy, seed)
        wanted = [self.roles.loss, *self._successors.values()]
        outputs = {value.name: value for value in copy.graph.output}
        del copy.graph.output[:]
        copy.graph.output.extend(outputs[name] for name in wanted)
        values = take_out(copy, self._successors, path)
        self._session = open_session(copy, path, provider, threads)
        self._sides = [{name: Buffer(array.copy(), provider) for name, array in values.items()} for _ in range(2)]
        self._rate = Buffer(np.zeros((), _numpy_type(types[rates[0]])), provider)
        self._loss = Buffer(np.zeros((), _numpy_type(outputs[self.roles.loss].type)), provider)
        self._bindings = [self._bind(rates[0], *sides) for sides in (self._sides, self._sides[::-1])]
        self._now = 0

    def _bind(self, rate: str, before: Mapping[str, Buffer], after: Mapping[str, Buffer]) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        binding.bind_ortvalue_input(rate, self._rate.value)
        for name, buffer in before.items():
            binding.bind_ortvalue_input(name, buffer.value)
        binding.bind_ortvalue_output(self.roles.loss, self._loss.value)
        for name, buffer in after.items():
            binding.bind_ortvalue_output(self._successors[name], buffer.value)
        return binding

    def step(self, feeds: Mapping[str, np.ndarray], learning_rate: float) -> float:
        """Take a step on a batch.

        Args:
            feeds: an array for each of `inputs`, in its type.
            learning_rate: of this step.

        Returns:
            The loss before the step.

        Raises:
            UsageError: an input is missing or unknown, or does not fit.
            NotFinite: the loss is infinite or no number; then no step was taken.
        """
        if feeds.keys() != self.inputs.keys():
            self._refuse(feeds)
        binding = self._bindings[self._now]
        given = {name: Buffer(array) for name, array in feeds.items()}
        for name, buffer in given.items():
            binding.bind_ortvalue_input(name, buffer.value)
        self._rate.write(np.asarray(learning_rate))
        if self._seed is not None:
            onnxruntime.set_seed((self._seed + 1_000_003 * self.steps) % 2**31)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # of many kinds, none of them public
            raise OnnxgradError(f"the step fails: {str(error).strip()}", _shapes(feeds, self.inputs)) from error
        loss = float(self._loss.read())
        if not np.isfinite(loss):
            raise NotFinite(f"the loss is {loss}", "a smaller learning rate, or other data; the weights are as before")
        self._now = 1 - self._now
        self.steps += 1
        return loss

    def _refuse(self, feeds: Mapping[str, np.ndarray]) -> None:
        missing = [name for name in self.inputs if name not in feeds]
        if missing:
            raise UsageError(f"the batch has no '{missing[0]}'", f"a step is fed {', '.join(self.inputs)}")
        unknown = next(name for name in feeds if name not in self.inputs)
        raise UsageError(f"the training model has no input '{unknown}'", suggest(unknown, self.inputs, "inputs"))

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """The present weights and state where they lie; after the next step they lie elsewhere."""
        return self._sides[self._now]

    def weights(self) -> dict[str, np.ndarray]:
        """A copy of the trained weights."""
        return {name: buffer.read() for name, buffer in self.buffers.items() if self.roles.inputs[name] == "weight"}

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the rest that steps replace: the optimizer's slots, running statistics."""
        return {name: buffer.read() for name, buffer in self.buffers.items() if self.roles.inputs[name] != "weight"}

    def load(self, values: Mapping[str, np.ndarray], steps: int | None = None) -> None:
        """Go on from other weights and state.

        Args:
            values: by name, of the shapes and types they have; what is not there stays as it is.
            steps: how many were taken to get there.

        Raises:
            UsageError: a name is unknown, or a shape or type is another.
        """
        for name, array in values.items():
            if name not in self.buffers:
                raise UsageError(
                    f"the training model has no weight or state '{name}'", suggest(name, self.buffers, "weights")
                )
            here = self.buffers[name].array
            if np.shape(array) != here.shape or np.asarray(array).dtype != here.dtype:
                raise UsageError(
                    f"'{name}' is {np.asarray(array).dtype}{list(np.shape(array))}, "
                    f"the model has {here.dtype}{list(here.shape)}",
                    "it was trained as another model",
                )
        for name, array in values.items():
            self.buffers[name].write(array)
        self.steps = self.steps if steps is None else steps


def _loosen(model: ModelProto, seed: int) -> int | None:
    """Let what Dropouts draw depend on the seed of the run alone; None where the model draws nothing."""
    found = [node for node in with_bodies(model.graph.node) if node.op_type == "Dropout"]
    for node in found:
        for attribute in [a for a in node.attribute if a.name == "seed"]:
            node.attribute.remove(attribute)
    return seed if found else None


def _numpy_type(value_type: TypeProto) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(dtype_of(value_type))


def _shapes(feeds: Mapping[str, np.ndarray], inputs: Mapping[str, TypeProto]) -> str:
    given = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in feeds.items())
    wanted = ", ".join(f"{name} {in_words(value_type)}" for name, value_type in inputs.items())
    return f"it was fed {given}; it takes {wanted}"
