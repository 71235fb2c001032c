"""A training model at work: each step takes a batch, and weights and state stay where onnxruntime has put them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.session import CPU, Buffer, open_session, take_out
from onnxgrad_cli.files import ModelSource, read_model
from onnxgrad_cli.files.start_values import lacking, values_beside
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.inference import Evaluated, Predictor, Setting, Source, evaluate
from onnxgrad_cli.training.run.interrupt import uninterrupted
from onnxgrad_cli.training.schedules import Schedule
from onnxgrad_cli.training.steps.base import RATE, NotFinite, TrainerBase, loosen, numpy_type
from onnxgrad_cli.training.steps.sliced import SlicedStep, parts_of
from onnxgrad_cli.training.steps.whole import WholeStep

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["NotFinite", "Trainer"]


class Trainer(TrainerBase):
    """A training model with an optimizer, its weights and its state.

    Attributes:
        roles: what the model's inputs and outputs are for.
        inputs: what a step must be fed: the model's inputs and the labels.
        steps: how many were taken.
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
        """Open a session on a training model; the model is not changed.

        Args:
            model: a model that `build` has made with an optimizer, or the file it is in, which takes less memory
                (then its weights are nowhere else), or the bytes of one.
            path: where a model or bytes were read from; external data are relative to it.
            provider: the execution provider, by its full name.
            threads: how many the processor uses; None is onnxruntime's choice.
            seed: of what the model draws at random (Dropout); each step has its own random numbers.

        Raises:
            UsageError: the model has no optimizer, or is no training model, or its weights are inputs whose values do
                not lie beside it.
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
            raise UsageError("the training model has no optimizer", "build it with `optimizer=NAME`")
        copy, values = take_out(model, roles.successors, path)
        if elsewhere := lacking(model, roles):
            values |= values_beside(path, elsewhere)
        del model  # so that the buffers may lie where it was
        values |= roles.begun(values)
        types = {value.name: value.type for value in (*copy.graph.input, *copy.graph.output)}
        inputs = {name: types[name] for name in roles.sampled}
        in_memory = provider == CPU  # else arrays don't lie where the weights do
        parts = parts_of(copy, values) if in_memory else None
        self._seed = loosen(copy if parts is None else parts.gradient, seed)
        super().__init__(roles, inputs, values, provider, parts.in_place if parts else ())
        scalars = {name: Buffer(np.zeros((), numpy_type(types[name])), provider) for name in (roles.loss, *rates)}
        self._rate = scalars[rates[0]]

        def start(part: ModelProto) -> onnxruntime.InferenceSession:
            return open_session(part, path, provider, threads, alternating=parts is not None)

        self._step: WholeStep | SlicedStep
        self._unbroken: Callable[[], AbstractContextManager[None]]
        if parts is None:
            self._step = WholeStep(copy, roles, self._sides, scalars, start, provider)
        else:
            self._step = SlicedStep(parts, self._sides, self._successors, scalars, start, threads)
        self._unbroken = nullcontext if parts is None else uninterrupted  # what is half updated is lost

    @property
    def sessions(self) -> list[onnxruntime.InferenceSession]:
        """Those that a step runs."""
        return self._step.sessions

    def step(
        self, feeds: Mapping[str, np.ndarray], learning_rate: float | Schedule = RATE, uncounted: bool = False
    ) -> float:
        """Take a step on a batch; see `TrainerBase.step`.

        Args:
            feeds, learning_rate: see there.
            uncounted: whether no label of the batch counts. Then the loss is nan and its gradient 0, and the step is
                taken with that.
        """
        self._check(feeds)
        self._rate.write(self._rate_now(learning_rate))
        self._draw(self._seed)
        try:
            loss = self._step.begin(feeds, self._now)
        except Exception as error:  # of many kinds, none of them public
            raise self._failed(feeds, error) from error
        with self._unbroken():
            expected = uncounted and math.isnan(loss)
            if math.isfinite(loss) or expected:
                self._finish()
            self._take(0.0 if expected else loss)
            return loss

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
        """Measure the present weights, as `run_evaluate` measures the model that `save` would write.

        Args:
            model: the inference model that the training model was built of.
            options: those that it was built with; by default those of the `TrainingModel` that was given.
            data, metrics, setting, keep_mode, tell: see `run_evaluate`.

        Raises:
            UsageError: the data, the options or the metrics don't fit, or there are no options.
            OnnxgradError: a file can't be read, or it is another model.
        """
        options = options or self._options
        if options is None:
            hint = "give the Options that it was built with, or the TrainingModel that was built"
            raise UsageError("a file of a training model does not say all that its losses take", hint)
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
        """What the present weights say of each sample, as `run_predict` has it of the model that `save` would write.

        Args:
            model: the inference model that the training model was built of.
            data, outputs, setting, tell: see `run_predict`.
            keep_mode: see `save`.

        Raises:
            UsageError: the data don't fit, or an output is not of samples.
            OnnxgradError: a file can't be read, or it is another model.
        """
        asked = checks.tuple_of("outputs", outputs, str, "such as outputs=('logits',)")
        merged, path = self.merged(model, keep_mode)
        return Predictor(merged, path, data, asked, setting or Setting(), tell).all()

    def _finish(self) -> None:
        try:
            self._step.finish(self._now)
        except Exception as error:
            hint = "go on from the last checkpoint: weights and state are neither those before nor after the step"
            raise OnnxgradError(f"the optimizer's step fails: {str(error).strip()}", hint) from error
