"""Verify the gradient of one operator on examples, in the two ways that the guide of the standard accepts.

- By mathematics: the gradient is compared with the Jacobian of the node times the cotangent of its outputs. The
  Jacobian is measured by finite differences.
- By PyTorch: the gradient is compared with the backward function of the PyTorch expression for the operator.

Neither way shares code with the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import ModelProto, printer
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.shape_inference import infer_shapes

from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UnsupportedError, UsageError, suggest
from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.ir.types import Arrays, dtype_of, is_float
from onnxgrad_cli.verification.coverage import Coverage, coverage
from tools.verify_op.examples import LARGEST, Example, made_examples, published_examples
from tools.verify_op.jacobian import Jacobian, jacobian, rounded
from tools.verify_op.torch_twins import Twin, expression_of


@dataclass(frozen=True)
class Measure:
    """The executor and precision for a node, and the step and tolerance of the comparison.

    Attributes:
        executor: 'onnxruntime' or 'reference'.
        double: True for float64, False for float32.
        step: the step of differences.
        bent: see `jacobian`.
        tolerance: the largest accepted difference, relative to the larger gradient or to `FLOOR`.
    """

    executor: str
    double: bool
    step: float = 2.0**-20
    bent: float = 1e-2
    tolerance: float = 1e-6


MEASURES = (
    Measure("onnxruntime", True),
    Measure("reference", True),
    Measure("reference", True, 2.0**-7, 0.3, 1e-2),  # onnx.reference computes some operators in float32 regardless
    Measure("onnxruntime", False, 2.0**-7, 0.3, 1e-2),
)
"""The ways to compute a node, the most exact first."""

FLOOR = 1e-3
"""Smallest size of a gradient in relative differences, as a share of the sum of |y| · |dy|.

The difference of smaller gradients is divided by this size instead of their own, because it is a rounding error of the
sum.
"""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one input, from onnxgrad and from the other source.

    Attributes:
        operand: the name of the input in the node.
        state: 'gradient', 'zero' (both gradients are zero everywhere) or 'refused'.
        ours: onnxgrad's gradient in the shape of the input; None if it is refused.
        other: the other gradient in the shape of the input; None if it is refused.
        jacobian: the measured Jacobian; None if the other gradient is from PyTorch.
        difference: the largest relative difference, without the elements at a kink.
        reason: the reason why onnxgrad refuses to compute the gradient; "" if it doesn't.
    """

    operand: str
    state: str
    ours: np.ndarray | None = None
    other: np.ndarray | None = None
    jacobian: Jacobian | None = None
    difference: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Trial:
    """The result of one example.

    Attributes:
        number: the number of the published example; None for a made example.
        example: the node and the point, in the precision of the executor.
        executor: the executor that computed the outputs, and its precision.
        tolerance: the largest relative difference at which gradients agree.
        outputs: the values of the outputs.
        cotangents: the cotangents of the differentiated float outputs, rounded so that they are easy to read.
        gradients: the gradients of the float inputs.
        backward: the nodes that compute onnxgrad's gradients, as text.
        twin: the example in PyTorch; None if PyTorch was not used.
    """

    number: int | None
    example: Example
    executor: str
    tolerance: float
    outputs: Arrays
    cotangents: Arrays
    gradients: tuple[Gradient, ...]
    backward: tuple[str, ...]
    twin: Twin | None = None

    @property
    def difference(self) -> float:
        """The largest relative difference of all gradients."""
        return max(gradient.difference for gradient in self.gradients)

    @property
    def node(self) -> str:
        """The node, as text."""
        return printer.to_text(self.example.node).strip()


@dataclass(frozen=True)
class Verification:
    """The results of all examples of an operator.

    Attributes:
        covered: the operator, with the state of its derivative.
        against: 'math' or 'torch'.
        trials: the results of the examples.
        published: the number of published examples.
        left_out: the numbers of examples that could not be used, with the reasons.
    """

    covered: Coverage
    against: str
    trials: tuple[Trial, ...]
    published: int = 0
    left_out: tuple[tuple[int, str], ...] = ()

    @property
    def passed(self) -> bool:
        """True if every gradient agrees in every example."""
        return all(trial.difference <= trial.tolerance for trial in self.trials)

    @property
    def states(self) -> dict[str, str]:
        """The state of each operand, by its name in the schema.

        An operand with a gradient in any example has the state 'gradient'. An output with a cotangent has the state
        'gradient' if any input has.
        """
        found: dict[str, str] = {}
        for trial in self.trials:
            node, covered = trial.example.node, self.covered
            states = {gradient.operand: gradient.state for gradient in trial.gradients}
            through = "gradient" if "gradient" in states.values() else "zero"
            states |= dict.fromkeys(trial.cotangents, through)
            for names, operands in ((node.input, covered.operands), (node.output, covered.outputs)):
                for i, name in enumerate(names if operands else ()):
                    operand = operands[min(i, len(operands) - 1)].name
                    if name in states and found.get(operand) != "gradient":
                        found[operand] = states[name]
        return found


@dataclass(frozen=True)
class Request:
    """The inputs and attributes of a made example; see `examples.made_examples`."""

    inputs: Sequence[tuple[int, ...] | np.ndarray | None] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)


def run_verify_op(
    op_type: str, *, against: str = "math", case: int | None = None, request: Request | None = None, seed: int = 0
) -> Verification:
    """Verify the gradient of an operator on two examples.

    Args:
        op_type: the operator, of any supported domain.
        against: 'math' (its Jacobian by central differences) or 'torch' (PyTorch's backward).
        case: the number of a published example. The default is the two examples with the smallest Jacobians.
        request: the inputs and attributes of made examples, used instead of published ones.
        seed: the seed of the cotangents and of the numbers in made examples.

    Raises:
        UsageError: the operator or the example doesn't exist.
        UnsupportedError: the operator can't be differentiated, or can't be compared in this way.
    """
    covered = _covered(op_type)
    if against == "torch":
        expression_of(covered.op_type, covered.domain)
    rng = np.random.default_rng(seed)
    if request and request.inputs:
        made = made_examples(covered.op_type, covered.domain, request.inputs, request.attributes, seed)
        return Verification(covered, against, tuple(_trial(None, each, against, rng) for each in made))
    if request and request.attributes:
        raise UsageError("--attribute requires --input: published examples have attributes of their own", "add --input")
    examples = published_examples(covered.op_type, covered.domain)
    if not examples:
        raise UsageError(
            f"onnx publishes no example of {op_type} with a float input and a float output",
            "give the shapes of its inputs with --input",
        )
    if case is not None and not 1 <= case <= len(examples):
        listed = ", ".join(f"{number}: {example.name}" for number, example in enumerate(examples, 1))
        raise UsageError(f"--case: there is no example {case}", f"examples: {listed}")
    numbered = list(enumerate(examples, 1))[slice(case and case - 1, case)]
    trials, left_out = _two(numbered, against, rng)
    return Verification(covered, against, trials, len(examples), left_out)


def _two(
    numbered: Sequence[tuple[int, Example]], against: str, rng: np.random.Generator
) -> tuple[tuple[Trial, ...], tuple[tuple[int, str], ...]]:
    """Return the results of the two examples with the smallest Jacobians, and the examples that could not be used.

    If only one example can be used, the second one is the same node at another point.
    """
    small = sorted((each for each in numbered if each[1].entries <= LARGEST), key=lambda each: each[1].entries)
    if not small:
        raise UsageError("its published examples are too large for a Jacobian", "give a smaller one with --input SHAPE")
    trials: list[Trial] = []
    failures: list[tuple[int, UnsupportedError]] = []
    for number, example in small:
        if len(trials) < 2:
            try:
                trials.append(_trial(number, example, against, rng))
            except UnsupportedError as error:  # other examples may be supported
                failures.append((number, error))
    if not trials:
        raise failures[0][1]
    if len(trials) == 1:
        trials += [_trial(n, each.elsewhere(), against, rng) for n, each in small if n == trials[0].number]
    return tuple(trials), tuple((number, str(error).splitlines()[-1].strip()) for number, error in failures)


def _covered(op_type: str) -> Coverage:
    every = {each.op_type: each for each in sorted(coverage(), key=lambda c: c.domain, reverse=True)}
    if op_type not in every:
        raise UsageError(f"there is no operator '{op_type}'", suggest(op_type, every, "operators"))
    covered = every[op_type]
    floats = [{o.state for o in side} - {"no float"} for side in (covered.operands, covered.outputs) if side]
    if covered.kind == "no float" or not all(floats):
        raise UnsupportedError(f"{op_type} takes or gives no floating-point value: there is nothing to differentiate")
    return covered


def _trial(number: int | None, example: Example, against: str, rng: np.random.Generator) -> Trial:
    """Compare the gradients of one example with PyTorch's, or with finite differences."""
    seeded = [v.name for v in example.model.graph.output if is_float(v.type)]
    backward, refused = _backward(example, seeded)
    forward, run, measure = _forward(example, seeded)
    example = replace(example, model=forward, point=_fitting(example.point, forward))
    outputs = run(example.point)
    twin = Twin(example, outputs) if against == "torch" else None
    known = seeded if twin is None else twin.outputs
    cotangents = {name: _cotangent(rng, outputs[name]) for name in seeded if name in known}
    zeros = {name: np.zeros(outputs[name].shape) for name in seeded}
    ours = _gradients(backward, example, {**zeros, **cotangents}, measure)
    scale = _scale(outputs, cotangents)
    if twin is not None:
        others = twin.backward(cotangents)
        found = [_compare(name, ours[name], others[name], None, scale) for name in ours]
    else:
        jacobians = {name: _jacobian(run, example, name, cotangents, measure) for name in ours}
        found = [
            _compare(name, ours[name], _times(measured, cotangents, example.point[name]), measured, scale)
            for name, measured in jacobians.items()
        ]
    found += [Gradient(name, "refused", reason=reason) for name, reason in refused.items()]
    nodes = tuple(printer.to_text(node).strip() for node in backward.graph.node)
    executor = f"{run.name.split()[0]} in {'float64' if measure.double else 'float32'}"
    return Trial(number, example, executor, measure.tolerance, outputs, cotangents, tuple(found), nodes, twin)


def _widened(model: ModelProto) -> ModelProto:
    """Return the model in float64, except for outputs whose type doesn't depend on the inputs."""
    double = to_double(model)
    bare = to_double(model)
    for value in bare.graph.output:
        value.ClearField("type")
    found = {value.name: value.type for value in infer_shapes(bare).graph.output}
    for value in double.graph.output:
        if dtype_of(found[value.name]):
            value.type.CopyFrom(found[value.name])
    return double


def _fitting(point: Arrays, model: ModelProto) -> Arrays:
    """Return the point in the types of a model's inputs."""
    return {v.name: np.asarray(point[v.name], tensor_dtype_to_np_dtype(dtype_of(v.type))) for v in model.graph.input}


def _forward(example: Example, seeded: Sequence[str]) -> tuple[ModelProto, Executor, Measure]:
    """Choose the most exact way to compute the node that reproduces the published outputs.

    Returns:
        The model, its executor, and the precision and step of the comparison.

    Raises:
        UnsupportedError: no executor reproduces the published outputs.
    """
    reason = ""
    for measure in MEASURES:
        model = _widened(example.model) if measure.double else example.model
        try:
            run = Executor(model, measure.executor, fallback=False)
            point = _fitting(example.point, model)
            outputs = run(point)
            noisy = measure.step < 1e-5 and rounded(_only(run, seeded), point, point, 1e-6)
        except Exception as error:  # the executors' exceptions share no base class
            reason = reason or (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        floats = {name: x for name, x in example.expected.items() if x.dtype.kind == "f"}
        if not all(np.allclose(outputs[name], x, 1e-3, 1e-4, equal_nan=True) for name, x in floats.items()):
            reason = f"{run.name} computes other outputs than those published"
        elif not noisy:
            return model, run, measure
    raise UnsupportedError(f"{example.name} can't be computed: {reason}", hint="use another one with --case")


def _only(run: Executor, names: Sequence[str]) -> Callable[[Arrays], Arrays]:
    def function(point: Arrays) -> Arrays:
        outputs = run(point)
        return {name: outputs[name] for name in names}

    return function


def _backward(example: Example, seeded: Sequence[str]) -> tuple[ModelProto, dict[str, str]]:
    """Return the model of onnxgrad's gradients, and the refused inputs with the reasons."""
    names = list(example.point)
    try:
        return derive(example.model, of=seeded, wrt=names), {}
    except UnsupportedError as error:
        if len(names) == 1:
            raise
        whole = error
    refused: dict[str, str] = {}
    for name in names:
        try:
            derive(example.model, of=seeded, wrt=[name])
        except UnsupportedError as error:
            refused[name] = error.refusals[0].reason if error.refusals else error.message
    known = [name for name in names if name not in refused]
    if not known:
        raise whole
    return derive(example.model, of=seeded, wrt=known), refused


def _cotangent(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """Return random numbers of both signs with two decimals, and zeros where the output is infinite or NaN."""
    drawn = np.round(rng.uniform(0.1, 1.0, np.shape(y)) * rng.choice([-1, 1], np.shape(y)), 2)
    return np.where(np.isfinite(y), drawn, 0.0)


def _scale(outputs: Arrays, cotangents: Arrays) -> float:
    """Return the sum of |y| · |dy| over all outputs."""
    return sum(float(np.sum(np.abs(np.where(c != 0, outputs[n] * c, 0.0)))) for n, c in cotangents.items())


def _gradients(backward: ModelProto, example: Example, cotangents: Arrays, measure: Measure) -> Arrays:
    model = to_double(backward) if measure.double else backward
    fed = {value.name for value in model.graph.input}
    given = {f"{name}{end}": seed for name, seed in cotangents.items() for end in ("_grad", "_grad_external")}
    feeds = _fitting({name: x for name, x in {**example.point, **given}.items() if name in fed}, model)
    try:
        outputs = Executor(model)(feeds)
    except Exception:  # a kernel may be missing at run time only
        outputs = Executor(model, "reference")(feeds)
    return {name: outputs[f"{name}_grad"] for name in example.point if f"{name}_grad" in outputs}


def _jacobian(run: Executor, example: Example, name: str, cotangents: Arrays, measure: Measure) -> Jacobian:
    def function(x: np.ndarray) -> np.ndarray:
        outputs = run({**example.point, name: x})
        return np.concatenate([np.ravel(np.where(np.isfinite(outputs[n]), outputs[n], 0.0)) for n in cotangents])

    return jacobian(function, example.point[name], measure.step, measure.bent)


def _times(measured: Jacobian, cotangents: Arrays, x: np.ndarray) -> np.ndarray:
    """Return the product of a Jacobian and the cotangents in the shape of the input."""
    return (measured.entries @ np.concatenate([np.ravel(c) for c in cotangents.values()])).reshape(x.shape)


def _compare(name: str, ours: np.ndarray, other: np.ndarray, measured: Jacobian | None, scale: float) -> Gradient:
    """Compare two gradients of an input, without the elements at measured kinks."""
    if ours.shape != other.shape:
        return Gradient(name, "gradient", ours, other, measured, math.inf)
    kept = np.ones(ours.shape, bool) if measured is None else ~measured.kinks.reshape(ours.shape)
    size = max(float(np.max(np.abs(x[kept]), initial=0.0, where=np.isfinite(x[kept]))) for x in (ours, other))
    off = float(np.max(np.abs(np.where(ours == other, 0.0, ours - other))[kept], initial=0.0))  # ±inf are equal
    difference = off / max(size, FLOOR * scale, 1e-30)
    flat = not np.any(ours) and not np.any(other if measured is None else measured.entries)
    return Gradient(
        name,
        "zero" if flat else "gradient",
        ours,
        other,
        measured,
        difference if math.isfinite(difference) else math.inf,
    )
