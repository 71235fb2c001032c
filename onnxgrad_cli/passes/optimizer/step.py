"""Append the optimizer, so that a training model takes a whole step in one run.

The learning rate is an input. The step count and each weight's slots are state, which is passed in and returned like
the weights: the output `<name>_next` replaces `<name>`. With accumulation, most runs take no step. The step is then in
a branch of an If, so that these runs do not compute it. For a target without If, every run computes the step, and a
Where discards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.common.settings import require
from onnxgrad_cli.emission.bodies import select, when
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import norm, total
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import OnnxgradError, conflict
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import known_as
from onnxgrad_cli.ir.types import dtype_of, tensor_type
from onnxgrad_cli.metadata import AVERAGE
from onnxgrad_cli.optimizers import OPTIMIZERS, Optimizer
from onnxgrad_cli.options import DYNAMIC, OptimizerOptions, StepOptions, UpdateOptions
from onnxgrad_cli.passes.loss.append import fed_first
from onnxgrad_cli.passes.optimizer.accumulation import accumulate, cautions, check_accumulation, counted_by
from onnxgrad_cli.passes.optimizer.groups import described, settings
from onnxgrad_cli.passes.optimizer.state import OptimizerState
from onnxgrad_cli.passes.tensor_roles import write_roles
from onnxgrad_cli.record import StepRecord
from onnxgrad_cli.targets import find_target

LEARNING_RATE, STEP = "learning_rate", "step"

SHARE_OF_SCALE = 0.01
"""Largest relative change of a quantizer's scale in one step. The limit keeps scales above zero.

Scales are small, and an adaptive optimizer takes steps as large as the learning rate.
"""


def append_step(graph: Graph, options: UpdateOptions, training: StepRecord) -> None:
    """Append the optimizer's step, and declare the new values of weights and state as outputs."""
    check_accumulation(options)
    if not training.trained:
        raise conflict(
            "`optimizer` requires a trained weight, but no weight is trained",
            "leave out `optimizer`, or train some weights",
        )
    training.cautions.extend(cautions(options, training))
    op = Op(graph)
    op.role = op.scope = "optimizer"
    step = _Step(op, options, training)
    gradients = {name: op.wide(op.val(training.gradients[name])) for name in training.trained}
    if options.accumulate > 1:
        counted = counted_by(options, training)
        weight = None if counted is None else op.val(counted)
        gathered = accumulate(op, step.state, gradients, options.accumulate, weight)
        step.divisor = gathered.count
        op.scope = "optimizer"
        after = step.when(op, gathered.due, lambda inner: step.taken(inner, gathered.totals)) | gathered.after
    else:
        after = step.taken(op, gradients)
    _hand_out(op, training, after)
    fed_first(graph)
    write_roles(graph, options, training)


class _Step:
    """The nodes of an optimizer's step on all weights."""

    def __init__(self, op: Op, options: UpdateOptions, training: StepRecord) -> None:
        self.when = when if find_target(options.target).branches else select
        self.options, self.training = options, training
        self.state = OptimizerState(op.graph, options, training)
        self.optimizer = OPTIMIZERS.lookup(options.optimizer)
        known = known_as(op.graph.nodes, training.trained) if options.group else None
        self.settings = settings(self.optimizer, options, training.trained, known)
        training.step = described(self.optimizer, options, training.trained, known)
        self.rate = _learning_rate(op, training, [op.val(name) for name in training.trained]).name
        self.count = self.state.scalar(op, STEP, 0, TensorProto.INT64).name
        self.momentum = self._momentum(op).name if options.cycle_momentum else ""
        self.divisor: Val | None = None  # divisor of the gathered gradients; None: the number of runs

    def _momentum(self, op: Op) -> Val:
        """Return the momentum (or beta1) as a scalar state, which a schedule changes. It starts at the option's value.

        Raises:
            UsageError: the optimizer has no momentum that can change, or a group sets it.
        """
        option = self.optimizer.cycled
        if not option:
            able = ", ".join(each.name for each in OPTIMIZERS if each.cycled)
            raise conflict(
                f"the optimizer '{self.optimizer.name}' has no momentum that a schedule can change",
                f"choose `optimizer=NAME`, one of {able}",
            )
        if any(option in group.options for group in self.options.group):
            raise conflict(
                f"the schedule changes {option} for all weights, but a `group` sets its own {option}",
                f"leave {option} out of `group`",
            )
        default = next(each.default for each in self.optimizer.options if each.name == option)
        start = self.optimizer.settings(self.options.optimizer_options).get(option, default)
        require(0 <= start < 1, f"{option} must be at least 0 and below 1")
        return self.state.scalar(op, option, start, dtype_of(op.graph.types[self.rate]))

    def taken(self, op: Op, gradients: Mapping[str, Val]) -> dict[str, Val]:
        """Write the step. With a dynamic loss scale, a run skips it if a gradient is not finite.

        Returns:
            A map from each weight or state to its new value.
        """
        if self.options.loss_scale != DYNAMIC:
            return self._taken(op, gradients)
        op.scope = "optimizer/loss_scale"
        scale, good_steps = scale_in(op, self.state, self.training)
        good = are_finite(op, [op.val(gradient.name) for gradient in gradients.values()])
        after = self.when(op, good, lambda inner: self._taken(inner, gradients))
        return after | adapted(op, scale, good_steps, good)

    def _taken(self, op: Op, gradients: Mapping[str, Val]) -> dict[str, Val]:
        """Write the step of every weight, and return a map from each weight or state to its new value."""
        weights: dict[str, Val] = {}
        states: dict[str, Val] = {}
        rate, count = op.val(self.rate), op.val(self.count)
        for name, gradient in clipped(op, self._mean(op, gradients), self.options).items():
            op.scope = f"optimizer/{name}"
            weight, chosen = op.val(name), self.settings[name]
            work = op.wide(weight)
            factor = op.cast(rate, work) if chosen.factor == 1 else op.cast(rate, work) * chosen.factor
            state = _Slots(op, self.state, self.optimizer, name, work, factor, count)
            momentum = {self.optimizer.cycled: op.cast(op.val(self.momentum), work)} if self.momentum else {}
            stepped = self.optimizer.function(op, work, gradient, state, **chosen.options | momentum)
            if name in self.training.learned_scales:
                least, most = work * (1 - SHARE_OF_SCALE), work * (1 + SHARE_OF_SCALE)
                stepped = op.Min(op.Max(stepped, least), most)
            weights[name] = op.cast(stepped, weight)
            states |= state.stepped
            if self.options.ema is not None:
                states |= ema_after(op, self.state, name, op.wide(weights[name]), count, self.options.ema)
        kept = {self.momentum: op.Identity(op.val(self.momentum))} if self.momentum else {}
        return {**weights, self.count: count + 1, **kept, **states}

    def _mean(self, op: Op, gradients: Mapping[str, Val]) -> dict[str, Val]:
        """Return the gradients over all samples of the accumulated runs: their mean, or their sum for a sum loss."""
        given = {name: op.val(gradient.name) for name, gradient in gradients.items()}
        runs = self.options.accumulate
        if runs == 1 or self.options.reduction == "sum":
            return given
        op.scope = "optimizer/accumulation"
        if self.divisor is None:
            return {name: gradient / runs for name, gradient in given.items()}
        count = op.val(self.divisor.name)
        some = op.Where(op.Equal(count, op.const(0.0, count)), op.const(1.0, count), count)  # avoids 0 / 0
        return {name: gradient / op.cast(some, gradient) for name, gradient in given.items()}


def _learning_rate(op: Op, training: StepRecord, weights: list[Val]) -> Val:
    """Return the learning rate, a scalar: float64 if a weight is float64, otherwise float32."""
    double = any(weight.dtype == TensorProto.DOUBLE for weight in weights)
    training.learning_rate = op.graph.fresh(LEARNING_RATE)
    op.graph.add_input(training.learning_rate, tensor_type(TensorProto.DOUBLE if double else TensorProto.FLOAT, []))
    return op.val(training.learning_rate)


class _Slots(dict[str, Val]):
    """The slots of one weight: name -> current value. Implements `optimizers.State`."""

    def __init__(
        self, op: Op, state: OptimizerState, optimizer: Optimizer, weight: str, like: Val, rate: Val, count: Val
    ) -> None:
        super().__init__()
        self.rate = rate
        self._op, self._state, self._optimizer, self._weight = op, state, optimizer, weight
        self._like, self._count = like, count
        self._starts: dict[str, float] = {}
        self._names: dict[str, str] = {}

    @property
    def count(self) -> Val:
        return self._op.cast(self._count, self._like)

    @property
    def stepped(self) -> dict[str, Val]:
        """Map from the name of each slot's input to the slot's new value."""
        return {name: self[slot] for slot, name in self._names.items()}

    def start(self, slot: str, value: float) -> None:
        self._starts[slot] = value

    def __missing__(self, slot: str) -> Val:
        if slot not in self._optimizer.slots:
            raise OnnxgradError(f"optimizer {self._optimizer.name} has declared no slot '{slot}'", code="unknown_name")
        start = self._starts.get(slot, 0.0)
        before = self._state.like_weight(self._op, self._weight, slot, start, self._like.dtype)
        self._names[slot] = before.name
        super().__setitem__(slot, before)
        return before

    def __setitem__(self, slot: str, value: Val) -> None:
        assert self[slot].type is not None  # a slot is stored even if it is not read
        super().__setitem__(slot, value)


def _hand_out(op: Op, training: StepRecord, updated: dict[str, Val]) -> None:
    """Declare the new value of each weight and state as an output, named `<name>_next`."""
    graph = op.graph
    successors = {name: graph.fresh(f"{name}_next") for name in updated}
    op.rename_all({successors[name]: value for name, value in updated.items()})
    for name, successor in successors.items():
        graph.add_output(successor, graph.types[name])
    training.state.update(successors)
    graph.nodes.extend(op.nodes)


# -- bounds of the gradients, and the average of the weights ----------------------------------------------------------


EPS = 1e-6
"""Added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_."""


def clipped(op: Op, gradients: Mapping[str, Val], options: OptimizerOptions) -> dict[str, Val]:
    """Return the clipped gradients.

    `clip_norm` multiplies all gradients by min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.
    `clip_value` clips each element, as torch.nn.utils.clip_grad_value_ does.
    """
    op.scope = "optimizer/clipping"
    if options.clip_value is not None:
        low, high = -options.clip_value, options.clip_value
        return {name: op.Clip(g, op.const(low, g), op.const(high, g)) for name, g in gradients.items()}
    if options.clip_norm is None:
        return dict(gradients)
    length = norm(op, *gradients.values())
    share = op.Min(options.clip_norm / (length + EPS), op.const(1.0, length))
    return {name: g * op.cast(share, g) for name, g in gradients.items()}


def ema_after(op: Op, state: OptimizerState, name: str, weight: Val, step: Val, decay: float) -> dict[str, Val]:
    """Return a map from the state with a weight's average to its new value, decay * average + (1 - decay) * weight.

    The first average is the weight itself, as in torch.optim.swa_utils.AveragedModel.

    Args:
        name: name of the weight before the step.
        weight: the weight after the step.
        step: number of earlier steps.
    """
    before = state.like_weight(op, name, AVERAGE, 0.0, weight.dtype)
    share = op.Where(op.Equal(step, op.const(0)), op.const(0.0, weight), op.const(decay, weight))
    return {before.name: share * before + (1 - share) * weight}


# -- a loss scale that adapts -----------------------------------------------------------------------------------------


SCALE, GOOD = "loss_scale", "good_steps"
FIRST, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
"""The constants of PyTorch's GradScaler.

FIRST is the scale of the first step. After INTERVAL steps in a row with finite gradients, the scale is multiplied by
GROWTH. After a step with a gradient that is not finite, it is multiplied by BACKOFF.
"""

MAX_POWER_OF_TWO = 2.0**127
"""The largest power of two in float32."""


def are_finite(op: Op, gradients: Iterable[Val]) -> Val:
    """Return a boolean value that is true if no element of any gradient is infinite or NaN."""
    return total(op, "ReduceL1", *gradients) < np.inf


def first_scale(op: Op, options: StepOptions, training: StepRecord) -> Val:
    """Add the state that holds the dynamic loss scale, and return it."""
    return OptimizerState(op.graph, options, training).scalar(op, SCALE, FIRST, TensorProto.FLOAT)


def scale_in(op: Op, state: OptimizerState, training: StepRecord) -> tuple[Val, Val]:
    """Return the state with the dynamic loss scale, and add a state that counts steps with finite gradients in a row.

    The count starts again at 0 when the scale changes.
    """
    scale = next(name for name, slot in training.slots.items() if slot.kind == SCALE and not slot.of)
    return op.val(scale), state.scalar(op, GOOD, 0, TensorProto.INT64)


def adapted(op: Op, scale: Val, good_steps: Val, good: Val) -> dict[str, Val]:
    """Return a map from the two states of the dynamic loss scale to their new values.

    Args:
        scale: the loss scale.
        good_steps: the number of steps with finite gradients since the scale changed.
        good: true if all gradients of this step are finite.
    """
    count = good_steps + 1
    full = op.Equal(count, op.const(INTERVAL))
    grown = op.Where(full, op.Min(scale * GROWTH, op.const(MAX_POWER_OF_TWO, scale)), scale)
    return {
        scale.name: op.Where(good, grown, scale * BACKOFF),
        good_steps.name: op.Where(op.And(good, op.Not(full)), count, op.const(0)),
    }
