"""Compare the optimizer's step in a training model with a reference in numpy.

The nodes from the gradients to the next weights and state are cut out of the model and run alone, so gradients, weights
and state can be random. Large tensors are cut down to a few rows and columns, because a step treats all elements alike.
The gradients themselves are checked elsewhere: they are outputs of the model, and other checks compare them with finite
differences of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import OverLimit
from onnxgrad_cli.ir.node import ROLE, metadata_of
from onnxgrad_cli.ir.node_values import behind, reads, subgraphs, with_bodies
from onnxgrad_cli.ir.types import Arrays, dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.metadata import AVERAGE, Roles, StepSettings
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase, skipped
from onnxgrad_cli.verification.checks.reference_optimizers import REFERENCES, clip

CUT = 16
"""Axes with more elements than this are cut to this length."""

FEW_ELEMENTS = 512
"""If the weights have fewer elements than this in total, more random points are checked, to cover all magnitudes."""

PRECISION = {"float64": 1e-10}
SINGLE = 1e-5
"""Largest accepted difference of a weight or state, relative to the sum of its magnitudes before and after the step.

`PRECISION` is for float64, `SINGLE` for other types.
"""

ROUNDINGS = 10
"""Largest number of input rounding errors that may add up in a result of the step. Such a difference is accepted."""

LAST_DIGIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative rounding error of 16-bit weights, whose step is computed in float32."""

COUNT, POSITION, DIVISOR, SCALE, GOOD = "step", "accumulated", "counted", "loss_scale", "good_steps"
"""Kinds of states that exist once for the whole step, not per weight.

They are the number of steps, the number of runs since the last step, the number of labels counted since then, the loss
scale, and the number of steps since the loss scale changed.
"""

SUM = "acc"
"""Kind of state that accumulates the gradients of the runs since the last step."""

SHARE_OF_SCALE = 0.01
"""Largest relative change of a quantizer's scale in one step; the step clips larger changes."""

INTERVAL, LARGEST_SCALE = 2000, 2.0**127
"""As in torch.amp.GradScaler: finite steps after which the loss scale doubles, and the largest loss scale.

The largest scale is the largest power of two in float32.
"""

DECADES = 9.0
"""Number of powers of ten that random gradients span, so that some gradients are as small as usual values of eps."""

LARGEST_HALF = 1e3
"""Largest random gradient for float16 weights, so that no result becomes infinite."""

MIN_GRADIENT, MIN_HALF_GRADIENT = 1e-16, 1e-4
"""Smallest magnitude of random gradients in float32, and in float16.

The square of the first is not zero in float32. The second has three significant digits in float16.
"""


def agrees_with_reference(case: ProofCase) -> CheckOutcome:
    """Compare the new weights and states that the optimizer's step computes with the reference."""
    roles = case.roles
    if not roles.optimizer:
        return NOTHING
    if roles.step is None or roles.optimizer not in REFERENCES:
        return skipped(
            f"there is no reference implementation of '{roles.optimizer}', or the model does not contain its settings"
        )
    try:
        step = _StepModel(case.model, roles)
    except _Unlike as error:
        return skipped(f"the step can't be run separately: {error}")
    elements = sum(math.prod(step.shape(name)) for name in step.weights)
    points = list(_points(roles.step, step.kinds, repeats=math.ceil(FEW_ELEMENTS / max(elements, 1))))
    worst: dict[str, float] = {}
    try:
        for point in points:
            for name, difference in _differences(step, point, case.rng).items():
                worst[name] = max(worst.get(name, 0.0), difference)
    except (OverLimit, MemoryError):
        raise
    except Exception as error:  # the executors' exceptions share no base class
        return skipped(f"the separate step does not run: {str(error).strip()[:300]}")
    found = f"{_compared(step, len(points))}; largest relative difference {max(worst.values()):.1e}"
    wrong = sorted((name for name in worst if worst[name] > step.allowed(name)), key=lambda name: -worst[name])
    if wrong:
        return CheckOutcome("failed", f"{found}; wrong: {listed(wrong)}")
    return CheckOutcome("passed", found)


def _compared(step: _StepModel, runs: int) -> str:
    """Return a text that describes the optimizer and the number of tensors and runs that were compared."""
    settings = step.settings
    parts = (
        step.roles.optimizer,
        "" if settings.clip_norm is None else f"gradients clipped to norm {settings.clip_norm:g}",
        "" if settings.clip_value is None else f"gradients clipped to {settings.clip_value:g}",
        f"one step every {settings.accumulate} batches" if settings.accumulate > 1 else "",
        "dynamic loss scale" if SCALE in step.kinds else "",
        "" if settings.ema is None else f"moving average {settings.ema:g}",
        f"parameter groups: {len(settings.groups)}" if settings.groups else "",
    )
    compared = f"{len(step.weights)} weights, {len(step.roles.slots)} states, {runs} runs"
    return f"{', '.join(filter(None, parts))}; compared: {compared}"


class _Unlike(Exception):
    """The step can't be compared: it reads a value unknown to the reference, or lacks one that the reference needs."""


class _StepModel:
    """The optimizer's step, cut out of the training model as a model of its own on small tensors.

    Attributes:
        roles: the roles of the training model.
        settings, gradients, successors: as in `Roles` of the training model.
        weights: the names of the trained weights.
        kinds: kind of state -> the name of the state, for states of the whole step.
        slots: weight -> kind of state -> the name of the weight's state.
        divisor: the name of the value that counts the labels of a run; "" if the step reads no such value.
        digit: the machine epsilon of the precision in which the step is computed.
        inputs: the names of the values that the step reads.
        run: runs the step.
    """

    def __init__(self, model: ModelProto, roles: Roles) -> None:
        assert roles.step is not None
        self.roles, self.settings = roles, roles.step
        self.gradients, self.successors = roles.gradients, roles.successors
        self.weights = [name for name, role in roles.inputs.items() if role == "weight"]
        self.kinds = {slot.kind: name for name, slot in roles.slots.items() if not slot.of}
        self.divisor = ""
        self.slots: dict[str, dict[str, str]] = {name: {} for name in self.weights}
        for name, slot in roles.slots.items():
            self.slots.setdefault(slot.of, {})[slot.kind] = name
        self._types = {value.name: value.type for value in (*model.graph.input, *model.graph.output)}
        nodes = self._nodes(model)
        double = all(self.dtype(name) == np.float64 for name in self.weights)
        self.digit = float(np.finfo(np.float64 if double else np.float32).eps)
        part = self._model(model, nodes)
        self.inputs = {value.name for value in part.graph.input}
        self.run = Executor(part, fallback=False)

    def _nodes(self, model: ModelProto) -> list[NodeProto]:
        """Return the nodes of the step, and set `divisor`."""
        replaced = self.slots_and_weights
        if lacking := [name for name in replaced if name not in self.successors]:
            raise _Unlike(f"no output is the next value of {listed(lacking)}")
        if lacking := [name for name in self.weights if name not in self.gradients]:
            raise _Unlike(f"no output is the gradient of {listed(lacking)}")
        nodes, foreign = _behind(model, self.roles, [self.successors[name] for name in replaced])
        if DIVISOR in self.kinds and len(foreign) == 1 and _divides(model, self.roles.loss, foreign[0]):
            self.divisor = foreign.pop()
            self._types[self.divisor] = tensor_type(dtype_of(self._types[self.kinds[DIVISOR]]), [])
        if foreign:
            raise _Unlike(f"it reads {listed(foreign)}")
        if DIVISOR not in self.kinds and self._leaves_labels_out():
            raise _Unlike("all runs count equally, but the loss leaves out some labels")
        return nodes

    @property
    def slots_and_weights(self) -> list[str]:
        """Return the names of the weights and states to which the step gives new values."""
        return [*self.weights, *self.roles.slots]

    def _leaves_labels_out(self) -> bool:
        """Return True if a mean over several runs must weight runs by the number of labels that are not ignored."""
        roles = self.roles
        if self.settings.accumulate == 1 or roles.reduction != "mean" or len(roles.losses) > 1:
            return False
        label = roles.losses[0].label
        return roles.losses[0].ignore_index is not None and not is_float(self._types.get(label))

    def shape(self, name: str) -> list[int]:
        """Return the shape of a weight, gradient or state in the cut-out model; axes have at most `CUT` elements."""
        shape = shape_of(self._types[name]) or ()
        if not all(isinstance(dim, int) for dim in shape):
            raise _Unlike(f"the shape of '{name}' is unknown")
        return [min(int(dim), CUT) for dim in shape]

    def dtype(self, name: str) -> np.dtype:
        """Return the element type of an input or output."""
        return np.dtype(helper.tensor_dtype_to_np_dtype(dtype_of(self._types[name])))

    def allowed(self, name: str) -> float:
        """Return the largest difference of a weight or state that rounding can explain, relative to its magnitude."""
        kind = self.dtype(name).name
        return PRECISION.get(kind, SINGLE) + LAST_DIGIT.get(kind, 0.0)

    def _model(self, model: ModelProto, nodes: Sequence[NodeProto]) -> ModelProto:
        read = {name for node in nodes for name in reads(node)}
        weights = {self.gradients[name]: name for name in self.weights}
        part = ModelProto(ir_version=model.ir_version, graph=GraphProto(name="step", node=nodes))
        part.opset_import.extend(model.opset_import)
        for name in (*weights, *self.roles.inputs, self.divisor):
            if name in read:
                kind = tensor_type(dtype_of(self._types[name]), self.shape(weights.get(name, name)))
                part.graph.input.append(helper.make_value_info(name, kind))
        given = {value.name for value in part.graph.input}
        part.graph.initializer.extend(t for t in model.graph.initializer if t.name in read and t.name not in given)
        for node in with_bodies(part.graph.node):
            for body in subgraphs(node):
                for value in (*body.output, *body.value_info):  # shapes of the whole tensors
                    value.type.tensor_type.ClearField("shape")
        names = [self.successors[name] for name in self.slots_and_weights]
        for name in names:
            kind = self._types[name]
            of_any_shape = tensor_type(dtype_of(kind), [None] * len(shape_of(kind) or ()))
            part.graph.output.append(helper.make_value_info(name, of_any_shape))
        return part


def _behind(model: ModelProto, roles: Roles, results: Sequence[str]) -> tuple[list[NodeProto], list[str]]:
    """Find the nodes that compute new weights and state from gradients, weights and state.

    Args:
        model: the training model.
        roles: the roles of its inputs and outputs.
        results: the names of the new weights and state.

    Returns:
        The nodes in order, and the names of other values that they read, such as model inputs.
    """
    known = {name for name, role in roles.inputs.items() if role in ("weight", "state", "learning rate")}
    known.update(output for name, output in roles.gradients.items() if name in known)
    of_data, needed = _of_data(model, roles.sampled, known), set(results)
    found: list[NodeProto] = []
    for node in reversed(model.graph.node):
        ours = metadata_of(node, ROLE) == "optimizer"  # another pass may have made it a node of the model
        if not needed.isdisjoint(node.output) and (ours or of_data.isdisjoint(node.output)):
            found.append(node)
            needed.update(name for name in reads(node) if name not in known)
    needed.difference_update(name for node in found for name in node.output)
    return found[::-1], sorted(needed & {*of_data, *roles.inputs})


def _of_data(model: ModelProto, data: Collection[str], known: Collection[str]) -> set[str]:
    """Return the values that depend on data directly or through values other than those of `known`."""
    late = set(data)
    for node in model.graph.node:
        if not late.isdisjoint(reads(node)):
            late.update(name for name in node.output if name and name not in known)
    return late


def _divides(model: ModelProto, loss: str, value: str) -> bool:
    """Return True if the loss depends on a division by this value, or by a Where that replaces the value if it is 0."""
    before = behind(model.graph.node, [loss])
    makers = {name: node for node in before for name in node.output}
    divisors = [node.input[1] for node in before if node.op_type == "Div"]
    guards = {name: makers[name].input[2] for name in divisors if name in makers and makers[name].op_type == "Where"}
    return value in (guards.get(name, name) for name in divisors)


@dataclass(frozen=True)
class _Point:
    """The conditions under which a step is computed and compared.

    Attributes:
        count: the number of earlier steps. If it is 0, states have their initial values.
        position: the number of runs since the last step.
        loud: True if gradients exceed the bound at which they are clipped.
        finite: True if gradients are finite.
        good: the number of finite steps since the loss scale changed.
    """

    count: int
    position: int
    loud: bool = True
    finite: bool = True
    good: int = 5


def _points(settings: StepSettings, kinds: Collection[str], repeats: int) -> Iterator[_Point]:
    last = settings.accumulate - 1
    yield from (_Point(7 + 4 * at, last) for at in range(min(repeats, 8)))
    yield _Point(0, last, loud=False)
    for position in sorted({0, last - 1} if last else ()):
        yield _Point(3, position)
    if SCALE in kinds:
        yield _Point(3, last, finite=False)
        yield _Point(3, last, good=INTERVAL - 1)


def _differences(step: _StepModel, point: _Point, rng: np.random.Generator) -> dict[str, float]:
    """Compute the step once on random values, and compare the results with the reference.

    Returns:
        Weight or state -> the largest relative difference from the reference.
    """
    feeds = _drawn(step, point, rng)
    got = step.run({name: x for name, x in feeds.items() if name in step.inputs})
    after = {name: np.asarray(got[step.successors[name]], np.float64) for name in step.slots_and_weights}
    before = {name: np.asarray(x, np.float64) for name, x in feeds.items()}
    expected, rounded = (_expected(step, _rounded(step, before, times), after, times) for times in (0, 1))
    sizes = {name: np.abs(before[name]) for name in after}
    return {name: _difference(after[name], expected[name], rounded[name], sizes[name]) for name in after}


def _rounded(step: _StepModel, values: Arrays, times: int) -> Arrays:
    """Increase gradients by `times` machine epsilons, relatively, and decrease other floats by the same fraction."""
    digit = times * step.digit
    gradients = set(step.gradients.values())
    whole = {COUNT, POSITION, GOOD}
    kept = {name for kind, name in step.kinds.items() if kind in whole}
    return {
        name: x if name in kept else x * (1 + digit if name in gradients else 1 - digit) for name, x in values.items()
    }


def _difference(got: np.ndarray, expected: np.ndarray | float, rounded: np.ndarray | float, sizes: np.ndarray) -> float:
    """Return the largest difference beyond rounding, relative to the magnitudes before and after the step.

    Args:
        got: the results of the model.
        expected: the results of the reference; entries that are NaN are not compared.
        rounded: the results of the reference for inputs changed by one rounding error.
        sizes: the magnitudes before the step.
    """
    if np.shape(got) != np.shape(expected):
        return math.inf
    expected, rounded = np.asarray(expected), np.asarray(rounded)
    compared = ~np.isnan(expected) & ~np.isnan(rounded) & (got != expected)
    got, expected, rounded, sizes = got[compared], expected[compared], rounded[compared], sizes[compared]
    noise = ROUNDINGS * np.abs(rounded - expected)
    apart = np.maximum(np.abs(got - expected) - noise, 0) / (np.abs(expected) + sizes)
    return float(np.max(np.nan_to_num(apart, nan=math.inf), initial=0.0))


def _drawn(step: _StepModel, point: _Point, rng: np.random.Generator) -> Arrays:
    """Draw random values for all inputs of the step: gradients, weights, state and the learning rate."""
    roles = step.roles
    runs, divisor = max(point.position, 1), 3.0 if step.divisor else 1.0
    sizes = {name: _magnitudes(step.shape(name), rng) for name in step.weights}
    top = _largest(step, point, math.sqrt(sum(float(np.sum(x**2)) for x in sizes.values())))
    values: dict[str, np.ndarray | float] = {step.divisor: divisor}
    for name, size in sizes.items():
        gradient = step.gradients[name]
        half = step.dtype(gradient) == np.float16
        most = LARGEST_HALF if step.dtype(name) == np.float16 else None
        size = np.clip(size * top, MIN_HALF_GRADIENT if half else MIN_GRADIENT, most)
        sign = rng.choice([-1.0, 1.0], size.shape)

        def near(low: float, high: float, of: np.ndarray = size) -> np.ndarray:
            return of * rng.uniform(low, high, of.shape)

        values[gradient] = sign * near(0.5, 2)
        weight = near(0.5, 2, np.ones_like(size))
        values[name] = weight if name in roles.quantized.scales else weight * rng.choice([-1.0, 1.0], size.shape)
        other = rng.choice([-1.0, 1.0], size.shape)
        drawn = {
            "m": other * near(0.5, 2),
            "a": other * near(0.5, 1),
            "u": near(0.5, 2),
            "v": near(2, 4, size**2),  # above the square of `a`
            "vmax": near(1, 5, size**2),
            "d": near(0.5, 2, np.ones_like(size)),
            SUM: runs * divisor * sign * near(0.5, 2),
            AVERAGE: other * near(0.5, 2, np.ones_like(size)),
        }
        values |= {state: drawn[kind] for kind, state in step.slots[name].items()}
    if not point.finite:
        values[step.gradients[step.weights[-1]]] *= np.inf
    if point.count == 0:
        begun = {name: slot for name, slot in roles.slots.items() if slot.of and slot.kind != SUM}
        values |= {name: np.full(step.shape(name), slot.initial) for name, slot in begun.items()}
    whole = dict.fromkeys(step.settings.options, 0.7)  # the option that a schedule changes is state
    whole |= {COUNT: point.count, POSITION: point.position, DIVISOR: runs * divisor, SCALE: 1024.0, GOOD: point.good}
    values |= {name: whole[kind] for kind, name in step.kinds.items()}
    values |= {name: rng.uniform(0.3, 0.7) for name, role in roles.inputs.items() if role == "learning rate"}
    return {name: np.asarray(x, step.dtype(name)) for name, x in values.items() if name}


def _magnitudes(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Draw random magnitudes below 1 that are uniform on a logarithmic scale."""
    return np.asarray(10 ** rng.permutation(-DECADES * rng.random(math.prod(shape)))).reshape(shape)


def _largest(step: _StepModel, point: _Point, norm: float) -> float:
    """Return the factor for random gradients. It puts them above the clipping bound if `point.loud`, otherwise below.

    `norm` is the norm of the random gradients before the multiplication.
    """
    settings = step.settings
    runs = settings.accumulate if step.roles.reduction == "sum" else 1
    if settings.clip_norm is not None:
        return settings.clip_norm / (norm * runs) * (3 if point.loud else 0.3)
    if settings.clip_value is not None:
        return settings.clip_value / runs * (3 if point.loud else 0.3)
    return max(1.0, *(step.settings.of(name).get("eps", 0.0) for name in step.weights))


def _accumulated(step: _StepModel, before: Arrays, expected: dict[str, np.ndarray | float]) -> Arrays | None:
    """Return the gradients accumulated over all runs since the last step; None if the next step is not due yet.

    The accumulated gradients and the number of runs after this run are stored in `expected`.
    """
    gradients = {name: before[step.gradients[name]] for name in step.weights}
    if step.settings.accumulate == 1:
        return gradients
    kinds, position = step.kinds, int(before[step.kinds[POSITION]])
    count = weight = float(before[step.divisor]) if step.divisor else 1.0
    gradients = {name: weight * g for name, g in gradients.items()}
    if position:
        gradients = {name: before[step.slots[name][SUM]] + g for name, g in gradients.items()}
        count += float(before[kinds[DIVISOR]]) if DIVISOR in kinds else position
    due = position + 1 == step.settings.accumulate
    expected |= {step.slots[name][SUM]: g for name, g in gradients.items()}
    expected[kinds[POSITION]] = 0 if due else position + 1
    if DIVISOR in kinds:
        expected[kinds[DIVISOR]] = count
    if not due:
        return None
    return {name: g / count for name, g in gradients.items()} if step.roles.reduction == "mean" else gradients


def _rescaled(
    kinds: Mapping[str, str], before: Arrays, gradients: Arrays, expected: dict[str, np.ndarray | float]
) -> bool:
    """Return True if the weights change: with a dynamic loss scale, only if all gradients are finite.

    The next loss scale is stored in `expected`.
    """
    if SCALE not in kinds:
        return True
    finite = all(np.isfinite(g).all() for g in gradients.values())
    scale, good = float(before[kinds[SCALE]]), int(before[kinds[GOOD]]) + 1
    grows = finite and good == INTERVAL
    factor = (2 if grows else 1) if finite else 0.5
    expected[kinds[SCALE]] = min(scale * factor, LARGEST_SCALE)
    expected[kinds[GOOD]] = good if finite and not grows else 0
    return finite


def _expected(step: _StepModel, before: Arrays, after: Arrays, times: int) -> dict[str, np.ndarray | float]:
    """Return a map: weight or state -> the value that the reference implementation computes in one run of the step.

    Args:
        step: the step.
        before: the inputs of the step.
        after: the new weights and states that the model computes. The expected moving averages are computed
            from these weights.
        times: the number of machine epsilons by which the options are increased, relatively, to measure the effect of
            rounding.
    """
    settings, kinds, roles = step.settings, step.kinds, step.roles
    expected: dict[str, np.ndarray | float] = {name: before[name] for name in step.slots_and_weights}
    gradients = _accumulated(step, before, expected)
    if gradients is None or not _rescaled(kinds, before, gradients, expected):
        return expected
    t = int(before[kinds[COUNT]]) + 1
    expected[kinds[COUNT]] = t
    cycled = {kind: float(before[name]) for kind, name in kinds.items() if kind in settings.options}
    rate = float(before[next(name for name, role in roles.inputs.items() if role == "learning rate")])
    for name, gradient in clip(gradients, settings.clip_norm, settings.clip_value).items():
        options = {option: x * (1 + times * step.digit) for option, x in settings.of(name).items()} | cycled
        slots = {kind: before[state] for kind, state in step.slots[name].items()}
        old, own_rate = before[name], rate * options.get("lr", 1.0)
        new, changed = REFERENCES[roles.optimizer](old, gradient, slots, options, own_rate, t)
        if name in roles.quantized.scales:
            new = np.clip(new, old * (1 - SHARE_OF_SCALE), old * (1 + SHARE_OF_SCALE))
        expected[name] = new
        expected |= {step.slots[name][kind]: x for kind, x in changed.items()}
        if settings.ema is not None:
            share = settings.ema * (1 + times * step.digit) if t > 1 else 0.0
            expected[step.slots[name][AVERAGE]] = share * slots[AVERAGE] + (1 - share) * after[name]
    return expected
