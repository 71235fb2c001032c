"""The loss of a training model as a function of its weights and inputs, in the most exact arithmetic there is for it.

float32 noise hides small faults, so the loss is computed in float64, on onnxruntime and, for operators of which it has
no such kernel, on onnx.reference. The gradients that are judged are those that onnxruntime gives in the model's own
precision: what is delivered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from onnxgrad_cli.common.memory import taken_memory
from onnxgrad_cli.execution.double import SHARED, Deferred, DoubleExecutor, is_wide, widened
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import MEMORY, at_once
from onnxgrad_cli.ir.skeleton import copied, without_initializers
from onnxgrad_cli.ir.types import HALVES, Arrays, dtype_of, is_float
from onnxgrad_cli.verification.claims import Direction, RandomTable, slices
from onnxgrad_cli.verification.feeds import DescribedModel, part
from onnxgrad_cli.verification.slopes import SINGLE_STEPS, Each, double_steps

FAITHFUL = {4: 1e-4, 2: 2e-2}
"""How far the losses in float64 and in the model's own precision may be apart, by the bytes of its narrowest floats."""

MUST_SHOW = {True: 0.01, False: 0.2}
"""The size of a fault, relative to a gradient, that must not hide: by slopes in float64, or in float32."""


LARGEST_OF_TWO = MEMORY // 64
"""Bytes that one run may take where two are computed at the same time."""


class ScalarFunction:
    """A function of tensors along lines through a point.

    Args:
        at: the function, of those tensors that are elsewhere than at the point, in float64; large ones are deferred
            where it says so.
        point: the tensors.
        exact: whether it is computed in float64; else in float32.
        run: what computes it.
        large: tensors that `at` takes deferred.

    Attributes:
        point, exact: as given.
        value: the function at the point.
        digits: the relative distance of neighbouring numbers in which it is computed.
        fault: the size of a fault, relative to a gradient, that must not hide.
        tolerance: how far a claimed slope may be off besides all that is measured: kernels approximate functions.
        name: what computes it, and in which precision.
        each: how it is computed at several steps.
    """

    def __init__(
        self,
        at: Callable[[Arrays], float],
        point: Arrays,
        exact: bool,
        run: DoubleExecutor | Executor,
        large: Collection[str] = (),
    ) -> None:
        self._at, self.point, self.exact, self._large = at, point, exact, large
        self.value = at({})
        self.digits = float(np.finfo(np.float64 if exact else np.float32).eps)
        self.fault = MUST_SHOW[exact]
        self.tolerance = 2e-6 if exact else 5e-2
        self.name = f"{run.name} in {'float64' if exact else 'float32'}"
        self.each: Each = map

    def steps(self, slope: float) -> Sequence[Sequence[float]]:
        """The steps that differences take where the slope is about so large, relative to the size of what moves."""
        return double_steps(self.value, slope) if self.exact else SINGLE_STEPS

    def moved(self, ways: Mapping[str, Direction], step: float) -> float:
        """The function `step` along a direction."""
        arrays: dict[str, Any] = {}
        for name, way in ways.items():
            fill = partial(way.move, step)
            arrays[name] = Deferred(way.shape, fill) if name in self._large else fill(np.empty(way.shape))
        return self._at(arrays)


class LossFunction(ScalarFunction):
    """The loss of a training model; where the gradient of the loss is an input, it counts that often.

    Args:
        described: the training model.
        feeds: data for its inputs.
        exact: in float64; else in the model's own precision.

    Raises:
        Exception: the model can't be computed so.
    """

    def __init__(self, described: DescribedModel, feeds: Mapping[str, np.ndarray], exact: bool) -> None:
        roles = described.roles
        forward = part(without_initializers(described.model, described.weights), roles.loss)
        types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in forward.graph.input}
        values = {**described.weights, **feeds}
        fixed = {name: x for name, x in values.items() if name in types}
        if roles.held:
            forward, held = _held(forward, roles.held, fixed, exact)
            types |= {name: x.dtype for name, x in held.items()}
            fixed |= held
        large = {name: 8 * x.size for name, x in fixed.items() if exact and is_wide(x) and 8 * x.size >= SHARED}
        run: DoubleExecutor | Executor = (
            DoubleExecutor(forward, beside=True, large=large) if exact else _single(forward)
        )
        factor = math.prod(float(feeds[name]) for name, role in roles.inputs.items() if role == "loss gradient")
        at_point: dict[str, Any] = dict(fixed)
        if exact:
            at_point = {n: Deferred.copy(x) if n in large else widened(x) for n, x in fixed.items()}

        def at(moved: Arrays) -> float:
            there = {**at_point, **{name: x for name, x in moved.items() if name in fixed}}
            if not exact:
                there = {name: np.asarray(x, types[name]) for name, x in there.items()}
            return factor * float(run(there)[roles.loss])

        before = taken_memory()
        super().__init__(at, {name: values[name] for name in roles.gradients}, exact, run, large)
        if exact and taken_memory() - before <= LARGEST_OF_TWO:  # in float32 one run takes all processors
            self.each = at_once


def _single(model: ModelProto) -> Executor:
    """Run a model in its own precision."""
    return Executor(model, fallback=False, threads=None)


def _held(
    forward: ModelProto, names: Sequence[str], feeds: Mapping[str, np.ndarray], exact: bool
) -> tuple[ModelProto, Arrays]:
    """A forward part with values that count as constants for inputs, and what they are on some feeds."""
    there = {name for node in forward.graph.node for name in node.output}.intersection(names)
    if not there:  # values of the backward part, of which the loss knows nothing
        return forward, {}
    made = copied(forward)
    del made.graph.output[:]
    made.graph.output.extend(ValueInfoProto(name=name) for name in sorted(there))
    made = part(made)
    types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in made.graph.input}
    fed = {name: dtype for name, dtype in types.items() if name in feeds}  # an optimizer's state has values
    run = DoubleExecutor(made) if exact else _single(made)
    found = run({n: widened(feeds[n]) if exact else np.asarray(feeds[n], dtype) for n, dtype in fed.items()})
    given = copied(forward)
    kept = [node for node in given.graph.node if there.isdisjoint(node.output)]
    del given.graph.node[:]
    given.graph.node.extend(kept)
    given.graph.input.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in found.items()
    )
    return part(given), found


def loss_function(
    described: DescribedModel, feeds: Mapping[str, np.ndarray], value: float, allowed: float
) -> LossFunction:
    """The loss in float64 where that can be had; one that is not the model's own is another function.

    Args:
        described, feeds: see `LossFunction`.
        value: the loss that the model itself gives.
        allowed: how far the loss in float64 may be from it.
    """
    try:
        exact = LossFunction(described, feeds, exact=True)
        if abs(exact.value - value) <= allowed:
            return exact
    except Exception:  # an operator has no float64 form on either
        pass
    return LossFunction(described, feeds, exact=False)


def nearby(described: DescribedModel, feeds: Mapping[str, np.ndarray], rng: np.random.Generator) -> Arrays:
    """Feeds that differ from some in the last digits of their floats, weights included."""
    types = {value.name: value.type for value in described.model.graph.input}
    values = {**described.weights, **feeds}
    return {**feeds, **{name: in_last_digits(x, rng) for name, x in values.items() if is_float(types[name])}}


def in_last_digits(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An array of floats that differs from another by what its precision hardly tells."""
    finfo: Any = ml_dtypes.finfo  # numpy's does not know bfloat16
    return moved(x, rng, float(finfo(x.dtype).eps))


def moved(x: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """An array whose entries differ from those of another by up to a share of each."""
    table = RandomTable(rng, x.size)
    place = int(rng.integers(table.period))
    result = np.empty(x.size, x.dtype)
    for where, entries in slices(np.ravel(x)):
        entries *= 1 + share * table.at(place + where.start, entries.size)
        result[where] = entries
    return result.reshape(x.shape)


def narrowest(model: ModelProto) -> int:
    """2 where a weight or an input has 16 bits, else 4."""
    types = [*(tensor.data_type for tensor in model.graph.initializer), *(dtype_of(v.type) for v in model.graph.input)]
    return 2 if any(dtype in HALVES for dtype in types) else 4
