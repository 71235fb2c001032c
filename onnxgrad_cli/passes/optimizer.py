"""Append the optimizer: a training model then takes a whole step in one run.

The learning rate is fed; the count of steps and each weight's slots are state, which comes in and goes out as the
weights do: `<name>` as an overridable initializer, its successor as the output `<name>_next`.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from onnxgrad_cli.emit import Op, Val
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.graph import Graph, tensor_type
from onnxgrad_cli.optimizers import OPTIMIZERS, Optimizer
from onnxgrad_cli.passes.describe import embed
from onnxgrad_cli.passes.loss import fed_first
from onnxgrad_cli.pipeline import Options, Pass, Training

LEARNING_RATE, STEP = "learning_rate", "step"


def _run(graph: Graph, options: Options, training: Training) -> bool:
    if not options.optimizer:
        if options.optimizer_options:
            raise UsageError("--optimizer-option: there is no optimizer", "choose one with --optimizer NAME")
        return False
    found = OPTIMIZERS.lookup(options.optimizer)
    settings = found.settings(options.optimizer_options)
    if not training.trained:
        raise UsageError("--optimizer: no weight is trained", "choose weights with --train GLOB")
    op = Op(graph)
    op.role = op.scope = "optimizer"
    weights = [op.val(name) for name in training.trained]
    rate = _learning_rate(op, training, weights)
    step = _store(op, STEP, np.zeros((), np.int64))
    stepped = {step.name: step + 1}
    updated: dict[str, Val] = {}
    for weight in weights:
        op.scope = f"optimizer/{weight.name}"
        work, gradient = op.wide(weight), op.wide(op.val(training.gradients[weight.name]))
        state = _State(op, found, weight.name, work, rate, step)
        updated[weight.name] = op.cast(found.function(op, work, gradient, state, **settings), weight)
        stepped.update(state.stepped)
    training.slots = list(stepped)
    _hand_out(op, training, {**updated, **stepped})
    fed_first(graph)
    embed(graph, options, training)
    return True


def _learning_rate(op: Op, training: Training, weights: list[Val]) -> Val:
    """The learning rate, a scalar: float64 where a weight is, else float32."""
    double = any(weight.dtype == TensorProto.DOUBLE for weight in weights)
    training.learning_rate = op.graph.fresh(LEARNING_RATE)
    op.graph.add_input(training.learning_rate, tensor_type(TensorProto.DOUBLE if double else TensorProto.FLOAT, []))
    return op.val(training.learning_rate)


def _store(op: Op, stem: str, value: np.ndarray) -> Val:
    """An overridable initializer."""
    name = op.graph.fresh(stem)
    op.graph.add_initializer(name, value)
    op.graph.add_input(name, op.graph.types[name])
    return op.val(name)


class _State:
    """The slots of one weight; see `optimizers.State`."""

    def __init__(self, op: Op, optimizer: Optimizer, weight: str, like: Val, rate: Val, step: Val) -> None:
        self.rate, self.count = op.cast(rate, like), op.cast(step, like)
        self._op, self._optimizer, self._weight, self._like = op, optimizer, weight, like
        self._starts: dict[str, float] = {}
        self._names: dict[str, str] = {}
        self._now: dict[str, Val] = {}

    @property
    def stepped(self) -> dict[str, Val]:
        """What each slot becomes, by the name of its initializer."""
        return {name: self._now[slot] for slot, name in self._names.items()}

    def start(self, slot: str, value: float) -> None:
        self._starts[slot] = value

    def __getitem__(self, slot: str) -> Val:
        if slot not in self._names:
            if slot not in self._optimizer.slots:
                raise OnnxgradError(f"optimizer {self._optimizer.name} has declared no slot '{slot}'")
            graph, dtype = self._op.graph, helper.tensor_dtype_to_np_dtype(self._like.dtype)
            value = np.full(graph.initializers[self._weight].dims, self._starts.get(slot, 0.0), dtype)
            self._now[slot] = _store(self._op, f"{self._weight}_{slot}", value)
            self._names[slot] = self._now[slot].name
        return self._now[slot]

    def __setitem__(self, slot: str, value: Val) -> None:
        assert self[slot].type is not None  # a slot is stored even if it is not read
        self._now[slot] = value


def _hand_out(op: Op, training: Training, updated: dict[str, Val]) -> None:
    """Declare what each weight and state becomes as outputs called after it."""
    graph = op.graph
    successors = {name: graph.fresh(f"{name}_next") for name in updated}
    op.rename_all({successors[name]: value for name, value in updated.items()})
    for name, successor in successors.items():
        graph.add_output(successor, graph.types[name])
    training.state.update(successors)
    graph.nodes.extend(op.nodes)


OPTIMIZER = Pass("optimizer", "the optimizer's step, if one is asked for", _run, ("outputs",))
