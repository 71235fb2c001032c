"""A step in one run of the training model as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.execution.session import Buffer, feed
from onnxgrad_cli.metadata import Roles

if TYPE_CHECKING:
    import onnxruntime


class WholeStep:
    """A session on a training model, alternating between two sides of weights and state."""

    def __init__(
        self,
        model: ModelProto,
        roles: Roles,
        sides: Sequence[Mapping[str, Buffer]],
        scalars: Mapping[str, Buffer],
        start: Callable[[ModelProto], onnxruntime.InferenceSession],
    ) -> None:
        """Open the session.

        Args:
            model: with a step's optimizer; of its outputs only the loss and what replaces weights and state stay.
            roles: what its inputs and outputs are for.
            sides: weights and state, read and written alternately.
            scalars: the loss, which is written, and the learning rate, by their names.
            start: opens a session.
        """
        outputs = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(outputs[name] for name in (roles.loss, *roles.successors.values()))
        self.session = start(model)
        self._loss = scalars[roles.loss]
        self._bindings = [self._bind(roles, scalars, *both) for both in (sides, sides[::-1])]

    def _bind(
        self, roles: Roles, scalars: Mapping[str, Buffer], before: Mapping[str, Buffer], after: Mapping[str, Buffer]
    ) -> onnxruntime.IOBinding:
        binding = self.session.io_binding()
        for name, buffer in {**before, **scalars}.items():
            if name != roles.loss:
                binding.bind_ortvalue_input(name, buffer.value)
        binding.bind_ortvalue_output(roles.loss, self._loss.value)
        for name, successor in roles.successors.items():
            binding.bind_ortvalue_output(successor, after[name].value)
        return binding

    @property
    def sessions(self) -> list[onnxruntime.InferenceSession]:
        """The one session."""
        return [self.session]

    def begin(self, feeds: Mapping[str, np.ndarray], now: int) -> float:
        """Write the side that is not `now`; returns the loss."""
        binding = self._bindings[now]
        for name, array in feeds.items():
            feed(binding, name, array)
        self.session.run_with_iobinding(binding)
        return float(self._loss.read())

    def finish(self, now: int) -> None:
        """There is nothing left to do."""
