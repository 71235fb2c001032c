"""Differences of a training model's loss, in the most exact arithmetic that can be had for it.

float32 noise hides small faults, so float64 comes first: on onnxruntime, or for small models on onnx.reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import HALVES, Arrays, dtype_of
from onnxgrad_cli.verification.differences import Difference, directional
from onnxgrad_cli.verification.feeds import DescribedModel

QUICK = 0.01
"""Seconds. A model whose step takes less on onnxruntime can be measured on onnx.reference, in float64."""

FAITHFUL = {4: 1e-4, 2: 2e-2}
"""How far the losses in float64 and in the model's own precision may be apart, by the bytes of its narrowest floats."""

DIRECTIONS = 3
TOLERANCE = {"double": 1e-4, "single": 5e-2}
Scale = Callable[[np.ndarray], np.ndarray | float]


class Measure:
    """Differences of the loss on one executor: gradients, and the loss as a function of weights and inputs.

    Where the gradient of the loss is an input, the loss counts that often. It is the model itself that is measured on
    `run`, which runs it; without, the model in float64 on the executor that is preferred.
    """

    def __init__(
        self,
        described: DescribedModel,
        feeds: Mapping[str, np.ndarray],
        scale: Scale,
        run: Executor | None = None,
        prefer: str = "onnxruntime",
    ) -> None:
        double = run is None
        model = to_double(described.model) if double else described.model
        run = run or Executor(model, prefer, fallback=False)
        self._model, self._prefer = model, prefer
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        types = {value.name: value.type for value in model.graph.input}
        point = {
            name: np.asarray(x, helper.tensor_dtype_to_np_dtype(dtype_of(types[name]))) for name, x in feeds.items()
        }
        gradients = described.roles.gradients
        point.update({name: numpy_helper.to_array(stored[name]) for name in gradients if name not in point})
        outputs = run(point)
        self._whole = run
        self._point = point
        self._outputs = gradients
        self._gradients = {name: outputs[out] for name, out in gradients.items()}
        self._output = described.roles.loss
        fed = [name for name, role in described.roles.inputs.items() if role == "loss gradient"]
        self._factor = math.prod(float(point[name]) for name in fed)
        self.value = abs(self._factor * float(outputs[self._output]))
        self.double = double
        self._scale = scale
        self.tolerance = TOLERANCE["double" if double else "single"]
        self.name = f"{run.name} in {'float64' if double else 'float32'}"

    @cached_property
    def _forward(self) -> Executor:
        return Executor(part(self._model, self._output), self._prefer, fallback=False)

    def _loss(self, point: Arrays) -> float:
        return self._factor * float(self._forward(point)[self._output])

    def error(self, rng: np.random.Generator, names: list[str]) -> float:
        """The relative error of the claimed gradients of `names`: the median over some directions.

        A wrong gradient is wrong in every direction, while a kink between the two ends spoils only one.
        """
        return float(np.median([self._direction(rng, names).error for _ in range(DIRECTIONS)]))

    def steady(self, rng: np.random.Generator) -> bool:
        """Whether the gradients stay much the same where everything is moved by a millionth of its size.

        Where they don't, they are what rounding left of sums that cancel, and no difference can confirm them.
        """
        moved = {
            name: np.asarray(x * (1 + 1e-6 * rng.standard_normal(x.shape)), x.dtype) if x.dtype.kind == "f" else x
            for name, x in self._point.items()
        }
        outputs = self._whole(moved)
        change = sum(
            float(np.sum(np.square(np.float64(outputs[out]) - self._gradients[name])))
            for name, out in self._outputs.items()
        )
        size = sum(float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in self._gradients.values())
        return change <= 0.25 * size

    def _direction(self, rng: np.random.Generator, names: list[str]) -> Difference:
        gradients = {name: self._gradients[name] for name in names}
        if self.double:
            floor = 1e-4 * self.value + 1e-12
            return directional(self._loss, self._point, gradients, rng, 1e-6, floor, self._scale)
        return _steadiest(self._loss, self._point, gradients, rng, self.value, self._scale)


def _steadiest(
    function: Callable[[Arrays], float],
    point: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    value: float,
    scale: Scale,
) -> Difference:
    """In float32 no one step suits all: of several, the one whose measure agrees best with its neighbour's.

    The choice looks at the measures only, never at the claim. What the neighbours disagree by is the noise.
    """
    state = rng.bit_generator.state
    found = []
    for step in (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
        rng.bit_generator.state = state
        found.append(directional(function, point, gradients, rng, step, scale=scale))
    gaps = [abs(a.measured - b.measured) for a, b in pairwise(found)]
    best = int(np.argmin(gaps))
    chosen = found[best + 1]
    size = max(abs(chosen.claimed), abs(chosen.measured), 1e-3 * value, 1e-30)
    error = max(0.0, abs(chosen.claimed - chosen.measured) - 2 * gaps[best]) / size
    return Difference(chosen.claimed, chosen.measured, error)


def measure(
    described: DescribedModel, run: Executor, feeds: Mapping[str, np.ndarray], quick: bool, scale: Scale
) -> Measure:
    """The most exact measure there is: float64 on onnxruntime, or for a quick model on onnx.reference; else `run`.

    One whose loss is not that of the model itself computes something else, and is passed over.
    """
    plain = Measure(described, feeds, scale, run)
    for prefer in ("onnxruntime", "reference")[: 1 + quick]:
        try:
            exact = Measure(described, feeds, scale, prefer=prefer)
        except Exception:  # one of the operators has no double kernel there
            continue
        if abs(exact.value - plain.value) <= FAITHFUL[_width(described.model)] * max(plain.value, 1e-6):
            return exact
    return plain


def _width(model: ModelProto) -> int:
    """2 where a weight or an input has 16 bits, else 4."""
    types = [*(tensor.data_type for tensor in model.graph.initializer), *(dtype_of(v.type) for v in model.graph.input)]
    return 2 if any(dtype in HALVES for dtype in types) else 4


def part(model: ModelProto, output: str | None = None) -> ModelProto:
    """The part of a model that computes one output (None: its outputs)."""
    part = copied(model)
    kept = [value for value in part.graph.output if output in (None, value.name)]
    del part.graph.output[:]
    part.graph.output.extend(kept)
    graph = Graph(part)
    graph.remove_unused()
    return graph.commit()
