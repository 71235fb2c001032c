"""Train with a training model.

Each step takes a batch; weights and state stay in buffers that onnxruntime reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, missing_value
from onnxgrad_cli.execution.session import CPU, BoundRuns, Buffer, open_session, take_out
from onnxgrad_cli.files import ModelSource, read_model
from onnxgrad_cli.files.start_values import lacking, values_beside
from onnxgrad_cli.metadata import Roles, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.inference import Evaluated, Predictor, Setting, Source, evaluate
from onnxgrad_cli.training.run.interrupt import uninterrupted
from onnxgrad_cli.training.steps.base import NotFinite, TrainerBase, loosen, numpy_type
from onnxgrad_cli.training.steps.sliced import SlicedStep, parts_of

if TYPE_CHECKING:
    import onnxruntime


class WholeStep:
    """A step that runs the whole training model in one session.

    There are two sets of weights and state, called sides. A step reads one side and writes the other; then they swap.

    Attributes:
        sessions: a list with the only session.
        runs: two bindings of the session to buffers: for steps that read side 0, and for steps that read side 1.
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
            model: a training model with an optimizer. All outputs are removed from it except the loss and the next
                weights and state.
            roles: the roles of the model's inputs and outputs.
            sides: two sets of weights and state, read and written alternately.
            scalars: the buffers of the loss, which is written, and of the learning rate, by name.
            start: opens a session.
            provider: the execution provider of the session.
        """
        outputs = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(outputs[name] for name in (roles.loss, *roles.successors.values()))
        self.sessions = [start(model)]
        self._loss = scalars[roles.loss]
        rates = {name: buffer for name, buffer in scalars.items() if name != roles.loss}
        self.runs = []
        for before, after in (sides, sides[::-1]):
            written = {roles.loss: self._loss, **{s: after[name] for name, s in roles.successors.items()}}
            self.runs.append(BoundRuns(self.sessions[0], {**before, **rates}, written, provider))

    def begin(self, feeds: Mapping[str, np.ndarray], now: int) -> float:
        """Run the step, write the side other than `now`, and return the loss."""
        self.runs[now](feeds)
        return float(self._loss.read())

    def finish(self, now: int) -> None:
        """Do nothing: `begin` has written everything."""


__all__ = ["NotFinite", "Trainer"]


class Trainer(TrainerBase):
    """A trainer for a training model with an optimizer. It keeps the weights and the state.

    Attributes:
        roles: the roles of the model's inputs and outputs.
        inputs: name -> type of each array in a batch: the model's inputs and the labels.
        steps: the number of steps taken so far.
    """

    def __init__(
        self,
        model: ModelSource | TrainingModel,
        *,
        path: Path | None = None,
        provider: str = CPU,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        """Open a session on a training model. The model is not changed.

        Args:
            model: a training model with an optimizer, as `build` returns it; or its file; or the bytes of the file. A
                file takes less memory, because the weights are stored only once.
            path: the file that a model or bytes were read from; external data are relative to it.
            provider: the full name of the execution provider, such as 'CPUExecutionProvider'.
            threads: the number of CPU threads; None for onnxruntime's default.
            seed: the seed of random operators such as Dropout; each step has different random numbers.

        Raises:
            UsageError: the model is not a training model or has no optimizer; or its weights are inputs, and no file
                beside the model has their values.
            OnnxgradError: onnxruntime refuses the model, or the file can't be read.
        """
        self._options = model.options if isinstance(model, TrainingModel) else None
        if isinstance(model, TrainingModel):
            model, path = model.model, model.graph.path
        else:
            model, path = read_model(model, path)
        roles = describe(model)
        rates = [name for name, role in roles.inputs.items() if role == "learning rate"]
        if not rates:
            raise missing_value("the training model has no optimizer", "build it with `optimizer=NAME`")
        copy, values = take_out(model, roles.successors, path)
        if elsewhere := lacking(model, roles):
            values |= values_beside(path, elsewhere)
        del model  # frees its memory for the buffers
        values |= roles.begun(values)
        types = {value.name: value.type for value in (*copy.graph.input, *copy.graph.output)}
        inputs = {name: types[name] for name in roles.sampled}
        parts = parts_of(copy, values) if provider == CPU else None  # numpy can't access the weights of others
        self._seed = loosen(copy if parts is None else parts.gradient, seed)
        super().__init__(roles, inputs, values, provider, parts.in_place if parts else ())
        scalars = {name: Buffer(np.zeros((), numpy_type(types[name])), provider) for name in (roles.loss, *rates)}
        self._rate = scalars[rates[0]]

        def start(part: ModelProto) -> onnxruntime.InferenceSession:
            return open_session(part, path, provider, threads, alternating=parts is not None)

        self._step: WholeStep | SlicedStep
        if parts is None:
            self._step = WholeStep(copy, roles, self._sides, scalars, start, provider)
        else:
            self._step = SlicedStep(parts, self._sides, self._successors, scalars, start, threads)
            self._unbroken = uninterrupted  # an in-place update must not stop halfway

    @property
    def sessions(self) -> list[onnxruntime.InferenceSession]:
        """The sessions that a step runs."""
        return self._step.sessions

    def _begin(self, feeds: Mapping[str, np.ndarray]) -> float:
        return self._step.begin(feeds, self._now)

    def _finish(self) -> None:
        try:
            self._step.finish(self._now)
        except Exception as error:
            hint = "continue from the last checkpoint: weights and state were changed only in part"
            raise OnnxgradError(f"the optimizer's step fails: {str(error).strip()}", hint) from error

    def evaluate(
        self,
        model: ModelSource,
        data: Source,
        options: Options | None = None,
        *,
        metrics: Sequence[str] = (),
        setting: Setting | None = None,
        keep_mode: bool = False,
        tell: Tell = silent,
    ) -> Evaluated:
        """Evaluate the current weights. The result equals that of `run_evaluate` on the model that `save` would write.

        The arguments that are not described here are those of `run_evaluate`.

        Args:
            model: the inference model that the training model was built from.
            options: the options of the build; by default the options of the `TrainingModel` that was passed.

        Raises:
            UsageError: the data, the options or the metrics don't fit, or the options are missing.
            OnnxgradError: a file can't be read, or the training model was not built from `model`.
        """
        options = options or self._options
        if options is None:
            hint = "pass the Options that it was built with, or the TrainingModel that was built"
            raise missing_value("a file of a training model does not store all options of its losses", hint)
        asked = checks.tuple_of("metrics", metrics, str, "such as metrics=('accuracy',)")
        merged, path = self.merged(model, keep_mode)
        return evaluate(merged, path, data, options, asked, setting or Setting(), keep_mode, tell)

    def predict(
        self,
        model: ModelSource,
        data: Source,
        *,
        outputs: Sequence[str] = (),
        setting: Setting | None = None,
        keep_mode: bool = False,
        tell: Tell = silent,
    ) -> dict[str, np.ndarray]:
        """Compute the model's outputs for each sample, with the current weights.

        The result equals that of `run_predict` on the model that `save` would write.

        The arguments that are not described here are those of `run_predict`.

        Args:
            model: the inference model that the training model was built from.
            keep_mode: leave BatchNormalization and Dropout in the mode that they have in `model`. By default they run
                in inference mode.

        Returns:
            Output -> array, with samples along the first axis; see `Predictor.all`.

        Raises:
            UsageError: the data don't fit, or the first axis of an output is not the number of samples.
            OnnxgradError: a file can't be read, or the training model was not built from `model`.
        """
        asked = checks.tuple_of("outputs", outputs, str, "such as outputs=('logits',)")
        merged, path = self.merged(model, keep_mode)
        return Predictor(merged, path, data, asked, setting or Setting(), tell).all()
