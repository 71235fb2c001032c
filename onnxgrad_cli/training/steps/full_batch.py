"""A trainer for optimizers outside of the training model that need the loss and the gradient of all samples.

All weights are concatenated into one float64 vector. The gradient of a mean over the samples is the weighted mean of
the gradients of its batches. The weight of a batch is its share of the number of elements in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

import numpy as np
from onnx import helper

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import OnnxgradError, conflict, wrong_type
from onnxgrad_cli.execution.session import CPU, BoundRuns, Buffer, open_session, take_out
from onnxgrad_cli.ir.modes import is_random
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.metadata import Roles, describe
from onnxgrad_cli.training.steps.base import UNEQUAL, NotFinite, TrainerBase, numpy_type

WHO = "`optimizer='lbfgs'`"
"""The subject of messages about models that can't be trained on all samples at once."""


class FullBatchTrainer(TrainerBase):
    """A trainer that computes the loss and the gradient of all samples. The caller changes the weights.

    Attributes:
        weights_vector: all weights in one vector, float64. Assign it to change the weights.
    """

    def __init__(self, built: TrainingModel, *, provider: str = CPU, threads: int | None = None) -> None:
        """Open a session on a training model without an optimizer.

        Args:
            built: the training model.
            provider: the full name of the execution provider, such as 'CPUExecutionProvider'.
            threads: the number of CPU threads; None for onnxruntime's default.

        Raises:
            UsageError: the loss is not a deterministic function of the weights and the data, the gradients are not its
                exact derivatives, or a weight has 16 bits.
            OnnxgradError: onnxruntime refuses the model.
        """
        roles, path = describe(built.model), built.graph.path
        _check_is_function(built, roles)
        weights = [name for name, role in roles.inputs.items() if role == "weight"]
        self._gradients = {name: roles.gradients[name] for name in weights}
        self._sum = roles.reduction == "sum"
        self._divisors = [built.training.divisors.get(position, "") for position in range(len(roles.losses))]
        outputs = dict.fromkeys([roles.loss, *self._gradients.values(), *filter(None, self._divisors)])
        copy, values = take_out(built.model, weights, path)
        declared = {value.name: value for value in copy.graph.output}
        del copy.graph.output[:]
        copy.graph.output.extend(
            declared.get(name) or helper.make_value_info(name, built.graph.types[name]) for name in outputs
        )
        types = {value.name: value.type for value in (*copy.graph.input, *copy.graph.output)}
        _check_types(values)
        shapes = {self._gradients[name]: array.shape for name, array in values.items()}
        ends = accumulate((values[name].size for name in weights), initial=0)
        self._slices = dict(zip(weights, (slice(*pair) for pair in pairwise(ends)), strict=True))
        super().__init__(roles, {name: types[name] for name in roles.sampled}, values, provider)
        self._results = {
            name: Buffer(np.zeros(shapes.get(name, ()), numpy_type(types[name])), provider) for name in outputs
        }
        self._run = BoundRuns(open_session(copy, path, provider, threads), self.buffers, self._results, provider)

    @property
    def weights_vector(self) -> np.ndarray:
        """All weights in one vector, float64."""
        return np.concatenate([self.buffers[name].read().reshape(-1).astype(np.float64) for name in self._slices])

    @weights_vector.setter
    def weights_vector(self, vector: np.ndarray) -> None:
        with np.errstate(over="ignore"):  # an infinite weight gives a loss that is not finite
            for name, where in self._slices.items():
                buffer = self.buffers[name]
                buffer.write(vector[where].reshape(buffer.array.shape))

    def loss_and_gradient(self, batches: Iterable[Mapping[str, np.ndarray]]) -> tuple[float, np.ndarray]:
        """Return the loss of all batches together, and its gradient with respect to `weights_vector`.

        Args:
            batches: the batches of all samples. Batches in which no label counts are skipped, so their loss may be nan.

        Raises:
            UsageError: an input is missing in a batch, or has a different type.
            NotFinite: the loss of a batch or the gradient is infinite or nan.
            OnnxgradError: there are several losses, and the share of a batch in their divisors differs.
        """
        loss, gradient = 0.0, np.zeros(sum(self.buffers[name].array.size for name in self._slices))
        divisors = []
        for feeds in batches:
            self._check(feeds)
            try:
                self._run(feeds)
            except Exception as error:  # onnxruntime's exception classes are not public
                raise self._failed(feeds, error) from error
            divisors.append([1.0] if self._sum else self._divisors_of(self._divisors, self._results, feeds))
            if not (weight := divisors[-1][0]):
                continue  # no label counts, so the loss is 0 / 0
            own = float(self._results[self.roles.loss].read())
            if not math.isfinite(own):
                raise NotFinite(f"the loss is {own}")
            loss += weight * own
            for name, where in self._slices.items():
                gradient[where] += weight * self._results[self._gradients[name]].read().reshape(-1).astype(np.float64)
        whole = 1.0 if self._sum else _whole(np.array(divisors))
        if not math.isfinite(loss) or not whole or not np.isfinite(gradient).all():
            raise NotFinite(f"the {'gradient' if whole and math.isfinite(loss) else 'loss'} is not finite")
        return loss / whole, gradient / whole


def _whole(divisors: np.ndarray) -> float:
    """Return the divisor of the first loss over all batches.

    Args:
        divisors: the divisors, of shape [batches, losses].

    Raises:
        OnnxgradError: a batch has different shares of the losses' divisors.
    """
    total = divisors.sum(0)
    if len(divisors) > 1 and np.ptp(divisors / np.where(total, total, 1), axis=1).max() > 1e-6:
        hint = "use a `batch_size` of all samples, or a single loss"
        raise OnnxgradError(
            f"{UNEQUAL}: the losses of the batches don't add up to the loss of all samples", hint, code="conflict"
        )
    return float(total[0])


def _check_is_function(built: TrainingModel, roles: Roles) -> None:
    """Check that the loss is a deterministic function of weights and data, and the gradients are its exact derivatives.

    Raises:
        UsageError: the model draws random numbers, updates statistics, or has estimated or partial gradients.
    """
    drawing = next((node for node in with_bodies(built.graph.nodes) if is_random(built.graph, node)), None)
    if drawing is not None:
        node = f"'{drawing.name or drawing.output[0]}' ({drawing.op_type})"
        message = f"{WHO} can't train with random numbers, which {node} draws: each run would have a different loss"
        raise conflict(message, "use `mode='eval'`, or another optimizer")
    if roles.successors:
        changed = next(iter(roles.successors))
        message = f"{WHO} can't train with BatchNormalization in training mode, which changes '{changed}' in each run"
        raise conflict(message, "use `mode='eval'`, or another optimizer")
    if roles.estimated:
        message = f"{WHO} requires gradients that are the slopes of the loss, but those of quantizers are estimates"
        raise conflict(message, "use another optimizer")
    held = [*roles.held, *(name for name in roles.partial if roles.inputs.get(name) == "weight")]
    if held:
        raise conflict(
            f"{WHO} requires gradients that are the slopes of the loss, but '{held[0]}' is treated as a constant, by "
            "`lora_dora` or by stop_gradient in a loss",
            "leave it out, or use another optimizer",
        )


def _check_types(values: Mapping[str, np.ndarray]) -> None:
    """Raise an error for weights of 16 bits, whose rounding would hide the differences that a line search compares."""
    short = next((name for name, array in values.items() if array.dtype not in (np.float32, np.float64)), None)
    if short is not None:
        message = f"{WHO} trains float32 and float64 weights, but '{short}' is {values[short].dtype}"
        raise wrong_type(message, "use another optimizer, or export the model in float32")
