"""A training step in two runs: the gradients of a batch, then the optimizer's step with them.

It takes the same steps as the whole in one run. What it is for comes between the two: here nothing, in a training by
several processes the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli import metadata
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.session import CPU, Buffer, feed, open_session, take_out
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.passes.optimizer.split import Halves, narrowed
from onnxgrad_cli.training.steps.base import RATE, TrainerBase, loosen, numpy_type

if TYPE_CHECKING:
    import onnxruntime


class SplitTrainer(TrainerBase):
    """The halves of a training model at work; used as `Trainer` is."""

    def __init__(
        self,
        halves: Halves,
        values: Mapping[str, np.ndarray] | None = None,
        *,
        also: Iterable[str] = (),
        path: Path | None = None,
        provider: str = CPU,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        """Open sessions on both models, which are not changed.

        Args:
            halves: what `split` has made of a training model.
            values: weights, state and what is frozen, where these are not stored in the models or are to be others.
            also: scalars that the gradient model gives besides, kept for those who come between.
            path: where the models were read from; external data are relative to it.
            provider, threads, seed: see `Trainer`.

        Raises:
            UsageError: a weight has no value, or the optimizer takes more than gradients and the loss.
            OnnxgradError: onnxruntime refuses a model.
        """
        gradients, steps = metadata.describe(halves.gradient), metadata.read(halves.optimizer)
        self._crossing = [name for name, role in steps.inputs.items() if name in gradients.outputs]
        odd = [name for name in self._crossing if gradients.outputs[name].role not in ("gradient", "loss")]
        if odd:
            raise UsageError(f"the optimizer takes '{odd[0]}' of the gradient model, which is no gradient")
        roles = _joined(gradients, steps)
        self._statistics = gradients.successors
        self._scalars = [gradients.loss, *also]
        wanted = {*self._scalars, *self._crossing, *self._statistics.values()}
        gradient, optimizer = narrowed(halves.gradient, wanted), narrowed(halves.optimizer, steps.outputs)
        types = {v.name: v.type for v in (*halves.optimizer.graph.input, *halves.gradient.graph.output)}
        types |= {value.name: value.type for value in halves.gradient.graph.input}
        given = dict(values or {})
        held = [name for name, role in roles.inputs.items() if role in ("weight", "state") or name in given]
        (gradient, stored), (optimizer, more) = (take_out(half, held, path) for half in (gradient, optimizer))
        stored |= more
        found = {name: given.get(name, stored.get(name)) for name in held}
        found |= roles.begun([name for name, array in found.items() if array is not None])
        missing = [name for name, array in found.items() if array is None]
        if missing:
            raise UsageError(f"'{missing[0]}' has no value", "give those of the checkpoint that belongs to the model")
        (rate,) = (name for name, role in steps.inputs.items() if role == "learning rate")
        inputs = {name: types[name] for name in gradients.fed}
        super().__init__(roles, inputs, {name: a for name, a in found.items() if a is not None}, provider)
        self._seed = loosen(gradient, seed)
        self._rate = Buffer(np.zeros((), numpy_type(types[rate])), provider)
        shapes = {name: self.buffers[role.of].array.shape for name, role in gradients.outputs.items() if role.of}
        self._between = {
            name: Buffer(np.zeros(shapes.get(name, ()), numpy_type(types[name])), provider)
            for name in dict.fromkeys([*self._scalars, *self._crossing])
        }
        sides = (self._sides, self._sides[::-1])
        self._gradient = open_session(gradient, path, provider, threads, alternating=True)
        self._optimizer = open_session(optimizer, path, provider, threads, alternating=True)
        crossing = {name: self._between[name] for name in self._crossing}
        self._forward = [self._bind(self._gradient, gradient, {}, self._between, *pair) for pair in sides]
        self._update = [
            self._bind(self._optimizer, optimizer, {rate: self._rate, **crossing}, {}, *pair) for pair in sides
        ]

    def _bind(
        self,
        session: onnxruntime.InferenceSession,
        model: ModelProto,
        read: Mapping[str, Buffer],
        written: Mapping[str, Buffer],
        before: Mapping[str, Buffer],
        after: Mapping[str, Buffer],
    ) -> onnxruntime.IOBinding:
        binding = session.io_binding()
        read = {**before, **read}
        written = {**{s: after[name] for name, s in self._successors.items()}, **written}
        for value in model.graph.input:
            if value.name in read:
                binding.bind_ortvalue_input(value.name, read[value.name].value)
        for value in model.graph.output:
            binding.bind_ortvalue_output(value.name, written[value.name].value)
        return binding

    def step(self, feeds: Mapping[str, np.ndarray], learning_rate: float = RATE) -> float:
        """Take a step on a batch; see `TrainerBase.step`."""
        self._check(feeds)
        self._rate.write(np.asarray(learning_rate))
        self._differentiate(feeds)
        loss = float(self._between[self.roles.loss].read())
        if np.isfinite(loss):
            self._optimizer.run_with_iobinding(self._update[self._now])
        return self._take(loss)

    def _differentiate(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Let `_between` hold loss and gradients, and the other side the next running statistics."""
        self._draw(self._seed)
        binding = self._forward[self._now]
        try:
            for name, array in feeds.items():
                feed(binding, name, array)
            self._gradient.run_with_iobinding(binding)
        except Exception as error:  # of many kinds, none of them public
            raise self._failed(feeds, error) from error


def _joined(gradients: Roles, steps: Roles) -> Roles:
    """The roles of the whole step."""
    crossing = set(gradients.outputs)
    inputs = {name: role for name, role in steps.inputs.items() if name not in crossing}
    return replace(
        gradients,
        inputs={**gradients.inputs, **inputs},
        outputs={**gradients.outputs, **steps.outputs},
        optimizer=steps.optimizer,
        slots={**gradients.slots, **steps.slots},
    )
