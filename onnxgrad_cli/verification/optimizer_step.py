"""Compare the optimizer's step in a training model with a reference in numpy.

The nodes from the gradients to the next weights and state are cut out of the model and run alone, so gradients, weights
and state can be drawn. Large tensors are cut down to a few rows and columns: a step computes each element alike.
The gradients are outputs of the model, which the other checks compare with differences of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper

from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import OverLimit
from onnxgrad_cli.ir.node import ROLE, metadata_of
from onnxgrad_cli.ir.nodes import reads, subgraphs, with_bodies
from onnxgrad_cli.ir.types import Arrays, dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.metadata import AVERAGE, Roles, StepSettings
from onnxgrad_cli.verification.case import NOTHING, Case, Found
from onnxgrad_cli.verification.reference_optimizers import REFERENCES, clip

CUT = 16
"""The elements of a longer axis that are compared."""

FEW = 512
"""The elements of all weights below which the first point is drawn again, to meet all magnitudes."""

PRECISION = {"float64": 1e-10}
SINGLE = 1e-5
"""The largest difference, relative to a number before and after the step, in float64 and in other element types."""

ROUNDINGS = 10
"""The rounding errors of a number that add up in a step at most, in the last digit of the numbers before it."""

LAST_DIGIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The rounding error of weights of 16 bits, whose step is computed in float32."""

COUNT, POSITION, DIVISOR, SCALE, GOOD = "step", "accumulated", "counted", "loss_scale", "good_steps"
"""The kinds of the states of the whole step."""

SUM = "acc"
"""The kind of a state that holds the gradients of the runs since the last step."""

SHARE_OF_SCALE = 0.01
"""The share of itself by which a step changes the scale of a quantizer at most."""

INTERVAL, LARGEST_SCALE = 2000, 2.0**127
"""The good steps after which torch.amp.GradScaler doubles the scale, and the largest power of two in float32."""

DECADES = 9.0
"""The powers of ten that the magnitudes of gradients span, so that some are as small as usual values of eps."""

LARGEST_HALF = 1e3
"""The largest gradient that is drawn for weights in float16, so that none becomes infinite."""

SMALLEST, SMALLEST_HALF = 1e-16, 1e-4
"""The smallest gradients that are drawn: float32 holds the square of the first, float16 three digits of the second."""


def agrees_with_reference(case: Case) -> Found:
    """Compare the updated weights and states with the reference."""
    roles = case.roles
    if not roles.optimizer:
        return NOTHING
    if roles.step is None or roles.optimizer not in REFERENCES:
        return Found("skipped", f"there is no reference for '{roles.optimizer}', or the model lacks its settings")
    try:
        step = _Step(case.model, roles)
    except _Unlike as error:
        return Found("skipped", f"the step can't be run alone: {error}")
    elements = sum(math.prod(step.shape(name)) for name in step.weights)
    points = list(_points(roles.step, step.kinds, repeats=math.ceil(FEW / max(elements, 1))))
    worst: dict[str, float] = {}
    try:
        for point in points:
            for name, difference in _differences(step, point, case.rng).items():
                worst[name] = max(worst.get(name, 0.0), difference)
    except (OverLimit, MemoryError):
        raise
    except Exception as error:  # the executors' exceptions share no base class
        return Found("skipped", f"the step does not run alone: {str(error).strip()[:300]}")
    found = f"{_compared(step, len(points))}; largest relative difference {max(worst.values()):.1e}"
    wrong = sorted((name for name in worst if worst[name] > step.allowed(name)), key=lambda name: -worst[name])
    if wrong:
        return Found("failed", f"{found}; wrong: {listed(wrong)}")
    return Found("passed", found)


def _compared(step: _Step, runs: int) -> str:
    """Describe what was compared."""
    settings = step.settings
    parts = [step.roles.optimizer]
    if settings.clip_norm is not None:
        parts.append(f"gradients clipped to norm {settings.clip_norm:g}")
    if settings.clip_value is not None:
        parts.append(f"gradients clipped to {settings.clip_value:g}")
    if settings.accumulate > 1:
        parts.append(f"a step in {settings.accumulate} runs")
    if SCALE in step.kinds:
        parts.append("dynamic loss scale")
    if settings.ema is not None:
        parts.append(f"moving average {settings.ema:g}")
    if settings.groups:
        parts.append(f"parameter groups: {len(settings.groups)}")
    return f"{', '.join(parts)}; compared: {len(step.weights)} weights, {len(step.roles.slots)} states, {runs} runs"


class _Unlike(Exception):
    """The step reads or lacks something that the reference knows nothing of."""


class _Step:
    """The nodes of a step, as a model of their own on small tensors.

    Attributes:
        roles, settings, gradients, successors: of the training model.
        weights: the trained weights.
        kinds: kind -> the state of the whole step.
        slots: weight -> kind -> state.
        divisor: the value that counts the labels of a run; "" if there is none.
        digit: the last digit in which the step is computed, relative to a number.
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
        replaced = self.slots_and_weights
        if lacking := [name for name in replaced if name not in self.successors]:
            raise _Unlike(f"no output replaces {listed(lacking)}")
        if lacking := [name for name in self.weights if name not in self.gradients]:
            raise _Unlike(f"no output is the gradient of {listed(lacking)}")
        self._types = {value.name: value.type for value in (*model.graph.input, *model.graph.output)}
        nodes, foreign = _behind(model, roles, [self.successors[name] for name in replaced])
        if DIVISOR in self.kinds and len(foreign) == 1 and _divides(model, roles.loss, foreign[0]):
            self.divisor = foreign.pop()
            self._types[self.divisor] = tensor_type(dtype_of(self._types[self.kinds[DIVISOR]]), [])
        if foreign:
            raise _Unlike(f"it reads {listed(foreign)}")
        if DIVISOR not in self.kinds and self._leaves_labels_out():
            raise _Unlike("all runs count alike, and the loss leaves labels out")
        double = all(self.dtype(name) == np.float64 for name in self.weights)
        self.digit = float(np.finfo(np.float64 if double else np.float32).eps)
        part = self._model(model, nodes)
        self.inputs = {value.name for value in part.graph.input}
        self.run = Executor(part, fallback=False)

    @property
    def slots_and_weights(self) -> list[str]:
        """The names of the weights and states that the step replaces."""
        return [*self.weights, *self.roles.slots]

    def _leaves_labels_out(self) -> bool:
        """Return True if the mean of several runs needs the number of labels that count in each."""
        roles = self.roles
        if self.settings.accumulate == 1 or roles.reduction != "mean" or len(roles.losses) > 1:
            return False
        label = roles.losses[0].label
        return roles.losses[0].ignore_index is not None and not is_float(self._types.get(label))

    def shape(self, name: str) -> list[int]:
        """Return the shape of a weight, its gradient or a state as it is compared."""
        shape = shape_of(self._types[name]) or ()
        if not all(isinstance(dim, int) for dim in shape):
            raise _Unlike(f"the shape of '{name}' is not known")
        return [min(int(dim), CUT) for dim in shape]

    def dtype(self, name: str) -> np.dtype:
        """Return the element type of an input or output."""
        return np.dtype(helper.tensor_dtype_to_np_dtype(dtype_of(self._types[name])))

    def allowed(self, name: str) -> float:
        """Return the largest relative difference that rounding explains in a weight or state."""
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
        part.graph.output.extend(helper.make_value_info(name, _of_any_shape(self._types[name])) for name in names)
        return part


def _of_any_shape(kind: TypeProto) -> TypeProto:
    return tensor_type(dtype_of(kind), [None] * len(shape_of(kind) or ()))


def _behind(model: ModelProto, roles: Roles, results: Sequence[str]) -> tuple[list[NodeProto], list[str]]:
    """Find the nodes between gradients, weights and state, and what replaces these.

    Returns:
        The nodes in order, and the values of the model itself that they read besides.
    """
    known = {name for name, role in roles.inputs.items() if role in ("weight", "state", "learning rate")}
    known.update(output for name, output in roles.gradients.items() if name in known)
    makers = {name: at for at, node in enumerate(model.graph.node) for name in node.output if name}
    of_data: set[str] | None = None
    found, foreign, seen = set[int](), dict[str, None](), set[str]()
    queue = list(results)
    while queue:
        name = queue.pop()
        if name in seen or name in known:
            continue
        seen.add(name)
        if name in roles.inputs:
            foreign[name] = None
        if name not in makers or makers[name] in found:
            continue
        node = model.graph.node[makers[name]]
        if metadata_of(node, ROLE) != "optimizer":  # another pass may have made it a node of the model
            of_data = _of_data(model, roles.sampled, known) if of_data is None else of_data
            if name in of_data:
                foreign[name] = None
                continue
        found.add(makers[name])
        queue.extend(filter(None, reads(node)))
    return [model.graph.node[at] for at in sorted(found)], list(foreign)


def _of_data(model: ModelProto, data: Collection[str], known: Collection[str]) -> set[str]:
    """Return the values that depend on data, and not on known values alone."""
    late = set(data)
    for node in model.graph.node:
        if not late.isdisjoint(reads(node)):
            late.update(name for name in node.output if name and name not in known)
    return late


def _divides(model: ModelProto, loss: str, value: str) -> bool:
    """Return True if the loss comes from a quotient by a value, or by 1 where the value is 0."""
    makers = {name: node for node in model.graph.node for name in node.output}
    queue, seen = [loss], {loss}
    while queue:
        node = makers.get(queue.pop(0))
        if node is not None and node.op_type == "Div":
            divisor = node.input[1]
            if divisor in makers and makers[divisor].op_type == "Where":
                divisor = makers[divisor].input[2]
            if divisor == value:
                return True
        before = [name for name in (reads(node) if node is not None else ()) if name not in seen]
        seen.update(before)
        queue += before
    return False


@dataclass(frozen=True)
class _Point:
    """The point at which a step is taken.

    Attributes:
        count: the steps before it; at 0 states are as they begin.
        position: the runs since the last step.
        loud: whether gradients exceed their bound.
        finite: whether gradients are finite.
        good: the steps since the loss scale changed.
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


def _differences(step: _Step, point: _Point, rng: np.random.Generator) -> dict[str, float]:
    """Take the step at a point.

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


def _rounded(step: _Step, values: Arrays, times: int) -> Arrays:
    """Change gradients and other numbers by so many times the last digit, in opposite directions."""
    digit = times * step.digit
    gradients = set(step.gradients.values())
    whole = {COUNT, POSITION, GOOD}
    kept = {name for kind, name in step.kinds.items() if kind in whole}
    return {
        name: x if name in kept else x * (1 + digit if name in gradients else 1 - digit) for name, x in values.items()
    }


def _difference(got: np.ndarray, expected: np.ndarray | float, rounded: np.ndarray | float, sizes: np.ndarray) -> float:
    """Return the largest difference that rounding does not explain, relative to the numbers before and after.

    Args:
        got: the numbers of the model.
        expected: those of the reference; entries that are NaN are left open.
        rounded: those of the reference for numbers that differ in the last digit.
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


def _drawn(step: _Step, point: _Point, rng: np.random.Generator) -> Arrays:
    """Draw gradients, weights and state."""
    roles = step.roles
    runs, divisor = max(point.position, 1), 3.0 if step.divisor else 1.0
    sizes = {name: _magnitudes(step.shape(name), rng) for name in step.weights}
    top = _largest(step, point, math.sqrt(sum(float(np.sum(x**2)) for x in sizes.values())))
    values: dict[str, np.ndarray | float] = {step.divisor: divisor}
    for name, size in sizes.items():
        gradient = step.gradients[name]
        half = step.dtype(gradient) == np.float16
        most = LARGEST_HALF if step.dtype(name) == np.float16 else None
        size = np.clip(size * top, SMALLEST_HALF if half else SMALLEST, most)
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
    whole = {COUNT: point.count, POSITION: point.position, DIVISOR: runs * divisor, SCALE: 1024.0, GOOD: point.good}
    values |= {name: whole[kind] for kind, name in step.kinds.items()}
    values |= {name: rng.uniform(0.3, 0.7) for name, role in roles.inputs.items() if role == "learning rate"}
    return {name: np.asarray(x, step.dtype(name)) for name, x in values.items() if name}


def _magnitudes(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Draw magnitudes below 1, as many in each decade."""
    return np.asarray(10 ** rng.permutation(-DECADES * rng.random(math.prod(shape)))).reshape(shape)


def _largest(step: _Step, point: _Point, norm: float) -> float:
    """Return the factor by which the gradients exceed their bound, or do not."""
    settings = step.settings
    runs = settings.accumulate if step.roles.reduction == "sum" else 1
    if settings.clip_norm is not None:
        return settings.clip_norm / (norm * runs) * (3 if point.loud else 0.3)
    if settings.clip_value is not None:
        return settings.clip_value / runs * (3 if point.loud else 0.3)
    return max(1.0, *(step.settings.of(name).get("eps", 0.0) for name in step.weights))


def _expected(step: _Step, before: Arrays, after: Arrays, times: int) -> dict[str, np.ndarray | float]:
    """Compute the weights and states after a run.

    Args:
        step: the step.
        before: the inputs of the step.
        after: the outputs of the model. Its weights are the ones that the average takes in.
        times: by how many times the last digit the options differ from the settings.
    """
    settings, kinds, roles = step.settings, step.kinds, step.roles
    expected: dict[str, np.ndarray | float] = {name: before[name] for name in step.slots_and_weights}
    gradients = {name: before[step.gradients[name]] for name in step.weights}
    if settings.accumulate > 1:
        position = int(before[kinds[POSITION]])
        weight = float(before[step.divisor]) if step.divisor else 1.0
        count = weight
        gradients = {name: weight * g for name, g in gradients.items()}
        if position:
            gradients = {name: before[step.slots[name][SUM]] + g for name, g in gradients.items()}
            count += float(before[kinds[DIVISOR]]) if DIVISOR in kinds else position
        due = position + 1 == settings.accumulate
        expected |= {step.slots[name][SUM]: g for name, g in gradients.items()}
        expected[kinds[POSITION]] = 0 if due else position + 1
        if DIVISOR in kinds:
            expected[kinds[DIVISOR]] = count
        if not due:
            return expected
        if roles.reduction == "mean":
            gradients = {name: g / count for name, g in gradients.items()}
    if SCALE in kinds:
        finite = all(np.isfinite(g).all() for g in gradients.values())
        scale, good = float(before[kinds[SCALE]]), int(before[kinds[GOOD]]) + 1
        grows = finite and good == INTERVAL
        factor = (2 if grows else 1) if finite else 0.5
        expected[kinds[SCALE]] = min(scale * factor, LARGEST_SCALE)
        expected[kinds[GOOD]] = good if finite and not grows else 0
        if not finite:
            return expected
    t = int(before[kinds[COUNT]]) + 1
    expected[kinds[COUNT]] = t
    rate = float(before[next(name for name, role in roles.inputs.items() if role == "learning rate")])
    for name, gradient in clip(gradients, settings.clip_norm, settings.clip_value).items():
        options = {option: x * (1 + times * step.digit) for option, x in settings.of(name).items()}
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
