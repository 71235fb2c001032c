"""The loss of a training model as a function of its weights and inputs, computed as exactly as possible.

Rounding noise in float32 would hide small errors of gradients. So the loss is computed in float64: on onnxruntime and,
for operators without a float64 kernel there, on onnx.reference. The gradients to be checked are computed by onnxruntime
in the model's own precision, because that is what users run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, helper

from onnxgrad_cli.common.memory import taken_memory
from onnxgrad_cli.execution.double import Deferred, DoubleExecutor, large_sizes, widened
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import MEMORY, at_once
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.types import HALVES, Arrays, dtype_of, is_float
from onnxgrad_cli.ir.weightless_copy import copied, without_initializers
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.verification.feeds import DescribedModel, loss_part, part
from onnxgrad_cli.verification.gradients.directions import Direction, RandomTable, slices
from onnxgrad_cli.verification.gradients.slopes import SINGLE_STEPS, Each, double_steps

FAITHFUL = {4: 1e-4, 2: 2e-2}
"""Bytes of the model's narrowest float -> largest accepted relative difference of its loss from the loss in float64."""

MUST_SHOW = {True: 0.01, False: 0.2}
"""The smallest relative error of a gradient that must be detected, with slopes in float64 (True) or float32 (False)."""


LARGEST_OF_TWO = MEMORY // 64
"""If a run takes at most this many bytes, two runs may take place at the same time."""


class ScalarFunction:
    """A scalar function of tensors, evaluated at a point and along lines through it.

    Args:
        at: computes the function. It takes only the tensors that differ from `point`, in float64. Those named in
            `large` are passed as `Deferred`.
        point: tensor -> its value at the point.
        exact: True if the function is computed in float64, False if in float32.
        run: the executor that computes it.
        large: the names of the tensors that `at` takes as `Deferred`.

    Attributes:
        point, exact: as given.
        value: the value of the function at the point.
        digits: the machine epsilon of the precision in which the function is computed.
        fault: the smallest error, relative to a gradient, that a check must detect.
        tolerance: accepted relative error of a slope in addition to the measured uncertainty, because kernels
            approximate functions.
        name: the name of the executor, and its precision.
        each: computes the function for several steps along a line.
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
        """Return groups of steps for finite differences, relative to the size of the moved tensors.

        Args:
            slope: an estimate of the slope.
        """
        return double_steps(self.value, slope) if self.exact else SINGLE_STEPS

    def moved(self, ways: Mapping[str, Direction], step: float) -> float:
        """Return the value of the function after a step along the direction that `ways` gives for each tensor."""
        arrays: dict[str, Any] = {}
        for name, way in ways.items():
            fill = partial(way.move, step)
            arrays[name] = Deferred(way.shape, fill) if name in self._large else fill(np.empty(way.shape))
        return self._at(arrays)


class LossFunction(ScalarFunction):
    """The loss of a training model as a function of its weights.

    If the model takes the gradient of the loss as an input, the loss is multiplied by it.

    Args:
        described: the training model.
        feeds: data for its inputs.
        exact: True computes the loss in float64, False in the model's own precision.

    Raises:
        Exception: the model can't be computed in this precision.
    """

    def __init__(self, described: DescribedModel, feeds: Mapping[str, np.ndarray], exact: bool) -> None:
        roles = described.roles
        forward = loss_part(without_initializers(described.model, described.weights), roles.loss)
        types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in forward.graph.input}
        values = {**described.weights, **feeds}
        fixed = {name: x for name, x in values.items() if name in types}
        if roles.held:
            forward, held = _held(forward, roles.held, fixed, exact)
            types |= {name: x.dtype for name, x in held.items()}
            fixed |= held
        large = large_sizes(fixed) if exact else {}
        run: DoubleExecutor | Executor = (
            DoubleExecutor(forward, beside=True, large=large) if exact else _single(forward)
        )
        factor = loss_factor(roles, feeds)
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


def loss_factor(roles: Roles, feeds: Mapping[str, np.ndarray]) -> float:
    """Return the product of the model's inputs that are gradients of the loss; 1 if it has no such input."""
    return math.prod(float(feeds[name]) for name, role in roles.inputs.items() if role == "loss gradient")


def _single(model: ModelProto) -> Executor:
    """Return an executor of a model in its own precision, on onnxruntime alone."""
    return Executor(model, fallback=False, threads=None)


def _held(
    forward: ModelProto, names: Sequence[str], feeds: Mapping[str, np.ndarray], exact: bool
) -> tuple[ModelProto, Arrays]:
    """Turn values that the gradients treat as constants into inputs of the forward part; return it with their values.

    Only values that the loss reads are turned into inputs. Their values are computed from `feeds`.
    """
    there = {name for node in forward.graph.node for name in node.output}.intersection(names)
    if not there:  # the loss does not read them
        return forward, {}
    made = part(forward, sorted(there))
    types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in made.graph.input}
    fed = {name: dtype for name, dtype in types.items() if name in feeds}  # other inputs, such as state, have values
    run = DoubleExecutor(made) if exact else _single(made)
    found = run({n: widened(feeds[n]) if exact else np.asarray(feeds[n], dtype) for n, dtype in fed.items()})
    given = copied(forward)
    refill(given.graph.node, (node for node in given.graph.node if there.isdisjoint(node.output)))
    given.graph.input.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in found.items()
    )
    return part(given, given.graph.output), found


def loss_function(
    described: DescribedModel, feeds: Mapping[str, np.ndarray], value: float, allowed: float
) -> LossFunction:
    """Return the loss in float64 if possible, otherwise in the model's own precision.

    If the loss in float64 differs much from the model's own loss, it counts as a different function and is not used.

    Args:
        described, feeds: see `LossFunction`.
        value: the loss that the model itself computes.
        allowed: the largest accepted difference of the loss in float64 from `value`.
    """
    try:
        exact = LossFunction(described, feeds, exact=True)
        if abs(exact.value - value) <= allowed:
            return exact
    except Exception:  # neither executor has a float64 kernel
        pass
    return LossFunction(described, feeds, exact=False)


def nearby(described: DescribedModel, feeds: Mapping[str, np.ndarray], rng: np.random.Generator) -> Arrays:
    """Return the feeds and the stored weights, with their floats changed at random by up to one machine epsilon."""
    values = {**described.weights, **feeds}
    return {**feeds, **{name: in_last_digits(x, rng) for name, x in values.items() if is_float(described.types[name])}}


def in_last_digits(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an array of floats whose entries are changed at random by up to one machine epsilon, relative to each."""
    finfo: Any = ml_dtypes.finfo  # numpy's lacks bfloat16
    return moved(x, rng, float(finfo(x.dtype).eps))


def moved(x: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Return an array whose entries are changed at random by up to the fraction `share` of each entry."""
    table = RandomTable(rng, x.size)
    place = int(rng.integers(table.period))
    result = np.empty(x.size, x.dtype)
    for where, entries in slices(np.ravel(x)):
        entries *= 1 + share * table.at(place + where.start, entries.size)
        result[where] = entries
    return result.reshape(x.shape)


def narrowest(model: ModelProto) -> int:
    """Return 2 if a weight or an input has 16-bit floats, otherwise 4."""
    types = [*(tensor.data_type for tensor in model.graph.initializer), *(dtype_of(v.type) for v in model.graph.input)]
    return 2 if any(dtype in HALVES for dtype in types) else 4
