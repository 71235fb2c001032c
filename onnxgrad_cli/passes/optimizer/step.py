"""Append the optimizer: a training model then takes a whole step in one run.

The learning rate is fed; the count of steps and each weight's slots are state, which comes in and goes out as the
weights do: what replaces `<name>` is the output `<name>_next`. Where a step is not taken at each run, it stands in the
branch of an If, so that the other runs don't pay for it, unless the target has no If.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from onnxgrad_cli.emission.bodies import select, when
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import known_as
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.optimizers import OPTIMIZERS, Optimizer
from onnxgrad_cli.options import DYNAMIC, UpdateOptions
from onnxgrad_cli.passes.loss.append import fed_first
from onnxgrad_cli.passes.optimizer.accumulation import accumulate, cautions, check_accumulation, counted_by
from onnxgrad_cli.passes.optimizer.clipping import clipped
from onnxgrad_cli.passes.optimizer.dynamic_loss_scale import adapted, are_finite, scale_in
from onnxgrad_cli.passes.optimizer.ema import ema_after
from onnxgrad_cli.passes.optimizer.groups import described, settings
from onnxgrad_cli.passes.optimizer.state import OptimizerState
from onnxgrad_cli.passes.roles import embed
from onnxgrad_cli.record import StepRecord
from onnxgrad_cli.targets import find_target

LEARNING_RATE, STEP = "learning_rate", "step"

SHARE_OF_SCALE = 0.01
"""By how much of itself a step changes a quantizer's scale at most, which so stays above zero: scales are small, and an
adaptive optimizer takes steps as large as the learning rate."""


def append_step(graph: Graph, options: UpdateOptions, training: StepRecord) -> None:
    """Append the optimizer's step, and declare what replaces weights and state as outputs."""
    check_accumulation(options)
    if not training.trained:
        raise UsageError("`optimizer`: no weight is trained", "leave `optimizer` out, or train some weights")
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
    embed(graph, options, training)


class _Step:
    """A step of the optimizer on all weights."""

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
        self.divisor: Val | None = None  # what the gathered gradients are divided by; None: the number of runs

    def taken(self, op: Op, gradients: Mapping[str, Val]) -> dict[str, Val]:
        """Take the step, unless a gradient is not finite and a dynamic scale of the loss is there to mend that.

        Returns:
            weight or state -> what replaces it.
        """
        if self.options.loss_scale != DYNAMIC:
            return self._taken(op, gradients)
        op.scope = "optimizer/loss_scale"
        scale, good_steps = scale_in(op, self.state, self.training)
        good = are_finite(op, [op.val(gradient.name) for gradient in gradients.values()])
        after = self.when(op, good, lambda inner: self._taken(inner, gradients))
        return after | adapted(op, scale, good_steps, good)

    def _taken(self, op: Op, gradients: Mapping[str, Val]) -> dict[str, Val]:
        """Take the step on every weight; returns weight or state -> what replaces it."""
        weights: dict[str, Val] = {}
        states: dict[str, Val] = {}
        rate, count = op.val(self.rate), op.val(self.count)
        for name, gradient in clipped(op, self._mean(op, gradients), self.options).items():
            op.scope = f"optimizer/{name}"
            weight, chosen = op.val(name), self.settings[name]
            work = op.wide(weight)
            factor = op.cast(rate, work) if chosen.factor == 1 else op.cast(rate, work) * chosen.factor
            state = _Slots(op, self.state, self.optimizer, name, work, factor, count)
            stepped = self.optimizer.function(op, work, gradient, state, **chosen.options)
            if name in self.training.learned_scales:
                least, most = work * (1 - SHARE_OF_SCALE), work * (1 + SHARE_OF_SCALE)
                stepped = op.Min(op.Max(stepped, least), most)
            weights[name] = op.cast(stepped, weight)
            states |= state.stepped
            if self.options.ema is not None:
                states |= ema_after(op, self.state, name, op.wide(weights[name]), count, self.options.ema)
        return {**weights, self.count: count + 1, **states}

    def _mean(self, op: Op, gradients: Mapping[str, Val]) -> dict[str, Val]:
        """The gradients of one batch of all samples: of several runs, the mean where the loss is one."""
        given = {name: op.val(gradient.name) for name, gradient in gradients.items()}
        runs = self.options.accumulate
        if runs == 1 or self.options.reduction == "sum":
            return given
        op.scope = "optimizer/accumulation"
        if self.divisor is None:
            return {name: gradient / runs for name, gradient in given.items()}
        count = op.val(self.divisor.name)
        some = op.Where(op.Equal(count, op.const(0.0, count)), op.const(1.0, count), count)  # else gradients are 0
        return {name: gradient / op.cast(some, gradient) for name, gradient in given.items()}


def _learning_rate(op: Op, training: StepRecord, weights: list[Val]) -> Val:
    """The learning rate, a scalar: float64 where a weight is, else float32."""
    double = any(weight.dtype == TensorProto.DOUBLE for weight in weights)
    training.learning_rate = op.graph.fresh(LEARNING_RATE)
    op.graph.add_input(training.learning_rate, tensor_type(TensorProto.DOUBLE if double else TensorProto.FLOAT, []))
    return op.val(training.learning_rate)


class _Slots:
    """The slots of one weight; see `optimizers.State`."""

    def __init__(
        self, op: Op, state: OptimizerState, optimizer: Optimizer, weight: str, like: Val, rate: Val, count: Val
    ) -> None:
        self.rate = rate
        self._op, self._state, self._optimizer, self._weight = op, state, optimizer, weight
        self._like, self._count = like, count
        self._starts: dict[str, float] = {}
        self._names: dict[str, str] = {}
        self._now: dict[str, Val] = {}

    @property
    def count(self) -> Val:
        return self._op.cast(self._count, self._like)

    @property
    def stepped(self) -> dict[str, Val]:
        """What each slot becomes, by the name of its input."""
        return {name: self._now[slot] for slot, name in self._names.items()}

    def start(self, slot: str, value: float) -> None:
        self._starts[slot] = value

    def __getitem__(self, slot: str) -> Val:
        if slot not in self._names:
            if slot not in self._optimizer.slots:
                raise OnnxgradError(f"optimizer {self._optimizer.name} has declared no slot '{slot}'")
            start = self._starts.get(slot, 0.0)
            self._now[slot] = self._state.like_weight(self._op, self._weight, slot, start, self._like.dtype)
            self._names[slot] = self._now[slot].name
        return self._now[slot]

    def __setitem__(self, slot: str, value: Val) -> None:
        assert self[slot].type is not None  # a slot is stored even if it is not read
        self._now[slot] = value


def _hand_out(op: Op, training: StepRecord, updated: dict[str, Val]) -> None:
    """Declare what each weight and state becomes as outputs called after it."""
    graph = op.graph
    successors = {name: graph.fresh(f"{name}_next") for name in updated}
    op.rename_all({successors[name]: value for name, value in updated.items()})
    for name, successor in successors.items():
        graph.add_output(successor, graph.types[name])
    training.state.update(successors)
    graph.nodes.extend(op.nodes)
