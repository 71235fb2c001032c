"""A step in one run of the training model as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.execution.session import BoundRuns, Buffer
from onnxgrad_cli.metadata import Roles

if TYPE_CHECKING:
    import onnxruntime


class WholeStep:
    """A session on a training model, alternating between two sides of weights and state.

    Attributes:
        session: the one session.
        runs: its runs, by the side that they read.
    """

    def __init__(
        self,
        model: ModelProto,
        roles: Roles,
        sides: Sequence[Mapping[str, Buffer]],
        scalars: Mapping[str, Buffer],
        start: Callable[[ModelProto], onnxruntime.InferenceSession],
        provider: str,
    ) -> None:
        """Open the session.

        Args:
            model: with a step's optimizer; of its outputs only the loss and what replaces weights and state stay.
            roles: what its inputs and outputs are for.
            sides: weights and state, read and written alternately.
            scalars: the loss, which is written, and the learning rate, by their names.
            start: opens a session.
            provider: the execution provider of the session.
        """
        outputs = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(outputs[name] for name in (roles.loss, *roles.successors.values()))
        self.session = start(model)
        self._loss = scalars[roles.loss]
        rates = {name: buffer for name, buffer in scalars.items() if name != roles.loss}
        self.runs = [
            BoundRuns(
                self.session,
                {**before, **rates},
                {roles.loss: self._loss, **{s: after[name] for name, s in roles.successors.items()}},
                provider,
            )
            for before, after in (sides, sides[::-1])
        ]

    @property
    def sessions(self) -> list[onnxruntime.InferenceSession]:
        """The one session."""
        return [self.session]

    def begin(self, feeds: Mapping[str, np.ndarray], now: int) -> float:
        """Write the side that is not `now`; returns the loss."""
        self.runs[now](feeds)
        return float(self._loss.read())

    def finish(self, now: int) -> None:
        """There is nothing left to do."""
