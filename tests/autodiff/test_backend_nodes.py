"""The node tests that the onnx package publishes, differentiated: models, inputs and outputs that are not ours.

Every float output of every published one-node model is differentiated with respect to every float input, as the
model stands, with its other inputs as constants, and with symbolic axes. The measure is an executor that reproduces
the published outputs. `python -m tests.autodiff.test_backend_nodes [-v] [--slow] [FILE...]` prints what comes of them.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import iter_modules
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.case import node as published

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError
from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import RANDOM
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import HALVES, Arrays, dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.passes.prepare.mode import set_mode, write_batch_statistics
from onnxgrad_cli.passes.rematerialization import rewrite
from onnxgrad_cli.passes.rematerialization.plan import Plan
from onnxgrad_cli.record import Training
from onnxgrad_cli.targets import PORTABLE, STANDARD, blocked_channels
from onnxgrad_cli.targets.blocked_channels import DENSE
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.harness import changes, fed, with_gradient
from tools.verify_op.examples import published_cases
from tools.verify_op.jacobian import rounded

FILES = sorted(module.name for module in iter_modules(published.__path__) if not module.ispkg)

RIGHT, BESIDE, REFUSED, NOT, WRONG = "right", "right beside a kink", "refused", "not evaluable", "WRONG"
KINDS = (RIGHT, BESIDE, NOT, REFUSED, WRONG)
"""The better before the worse."""

PUBLISHED = "as published"

LACKED = (
    "OpenVINO does not support",
    "OpenVINO requires",
    "its output Indices",
    "onnxruntime-web",
    "JavaScript does not support",
)
"""How refusals begin that name what a runtime of the portable target lacks."""


@dataclass(frozen=True)
class Subject:
    """One model with a value for every input; the outputs `seeded` are differentiated with respect to `wanted`.

    `options` are those of `with_gradient`.
    """

    case: str
    form: str
    op: str
    model: onnx.ModelProto
    feeds: Arrays
    expected: Arrays
    wanted: tuple[str, ...]
    seeded: tuple[str, ...]
    options: Options = field(default_factory=Options)

    def __str__(self) -> str:
        return f"{self.case} ({self.form})"


@dataclass(frozen=True)
class Verdict:
    """What came of one subject, and how or why; and whether its options made another model of it."""

    subject: Subject
    kind: str
    why: str
    changed: bool = False


class NotEvaluableError(Exception):
    """There is nothing right to compare with; the message says why."""


# -- the published models --------------------------------------------------------------------------------


def subjects(case: Any, op: str, options: Options) -> Iterator[Subject]:
    """The case as it stands, with every input but the floats as a constant, and with symbolic axes."""
    model = _copy(case.model)
    inputs, results = case.data_sets[0]
    feeds = {value.name: _array(x) for value, x in zip(model.graph.input, inputs, strict=True)}
    expected = {value.name: _array(x) for value, x in zip(model.graph.output, results, strict=True)}
    wanted = tuple(value.name for value in model.graph.input if is_float(value.type))
    seeded = tuple(value.name for value in model.graph.output if is_float(value.type))
    if not wanted or not seeded:
        return
    subject = Subject(case.name, "", op, model, feeds, expected, wanted, seeded, options)
    yield replace(subject, form=PUBLISHED)
    fixed = subject
    if len(wanted) < len(feeds):
        fixed = replace(subject, model=_with_constants(model, feeds, wanted), form="constants")
        yield fixed
    if any(np.ndim(feeds[name]) for name in wanted):
        yield replace(fixed, model=_symbolic(fixed.model), form="symbolic axes")
    if options.target != STANDARD and op in ("Conv", "ConvTranspose"):
        yield _wide(subject)


def parts(subject: Subject) -> Iterator[Subject]:
    """Each output through each input by itself, the other inputs constants."""
    for wanted in subject.wanted:
        for seeded in subject.seeded:
            model = _with_constants(subject.model, subject.feeds, (wanted,))
            form = f"{subject.form}, {seeded} by {wanted} alone"
            yield replace(subject, model=model, wanted=(wanted,), seeded=(seeded,), form=form)


WIDE = 2 * blocked_channels.BLOCK
"""How many times its channels a published convolution gets: a target may have operators for blocks of them alone."""


def _wide(subject: Subject) -> Subject:
    """A convolution of `WIDE` times its channels, whose outputs follow from the published ones.

    Of each channel there are multiples, and so there are of each weight, by a number for what it reads and one for what
    it makes.
    """
    rng = np.random.default_rng(0)
    read, made, values = (rng.uniform(0.5, 1.5, WIDE).astype(np.float32) for _ in range(3))

    def times(x: np.ndarray, axis: int, factors: np.ndarray) -> np.ndarray:
        channels = np.tile(factors, x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        return np.repeat(x, WIDE, axis) * channels

    model, (x, w), (y,) = _copy(subject.model), subject.wanted, subject.seeded
    reads = 0 if subject.op == "ConvTranspose" else 1
    feeds = {x: times(subject.feeds[x], 1, values), w: times(times(subject.feeds[w], reads, read), 1 - reads, made)}
    expected = {y: times(subject.expected[y], 1, made) * (read @ values)}
    for value in (*model.graph.input, *model.graph.output):
        value.type.CopyFrom(tensor_type(dtype_of(value.type), np.shape({**feeds, **expected}[value.name])))
    return replace(subject, model=model, feeds=feeds, expected=expected, form=f"{WIDE} times the channels")


def _array(x: Any) -> Any:
    return numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _with_constants(model: onnx.ModelProto, feeds: Arrays, kept: Sequence[str]) -> onnx.ModelProto:
    result = _copy(model)
    del result.graph.input[:]
    for value in model.graph.input:
        if value.name in kept or not value.type.HasField("tensor_type"):
            result.graph.input.append(value)
        else:
            result.graph.initializer.append(numpy_helper.from_array(np.asarray(feeds[value.name]), value.name))
    return result


def _symbolic(model: onnx.ModelProto) -> onnx.ModelProto:
    result = _copy(model)
    for value in result.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    return result


def lowered(model: onnx.ModelProto) -> bool:
    """Call an opset beyond the newest by the newest's name; False, and unchanged, where that is more than a name."""
    before = _copy(model)
    for entry in model.opset_import:
        if not entry.domain:
            entry.version = min(entry.version, NEWEST_OPSET)
    model.ir_version = max(8, min(model.ir_version, 10))
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        model.CopyFrom(before)
        return False
    return True


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as the pass `prepare` leaves it, at the newest opset at most."""
    declared = {value.name: value.type for value in model.graph.output}
    low = lowered(model)
    for value in model.graph.output:
        value.ClearField("type")
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    changed = set_mode(graph, Options(), Training())
    if write_batch_statistics(graph, Options(), Training()) or changed:
        infer_types(graph)
    model = graph.commit()
    for name, known in graph.observed.items():  # ranks that a run has told, which inference finds no more
        sizes = [f"{name}_{axis}" for axis in range(len(shape_of(known) or ()))]
        if name not in declared:
            model.graph.value_info.append(helper.make_value_info(name, tensor_type(dtype_of(known), sizes)))
    for value in model.graph.output:
        found, said = graph.types.get(value.name), declared[value.name]
        if shape_of(found) is None:
            dims = [f"{value.name}_{axis}" for axis in range(len(shape_of(said) or ()))]
            found = tensor_type(dtype_of(found) or dtype_of(said), dims)
        value.type.CopyFrom(found)
    if not low and not lowered(model):
        raise UnsupportedError(f"needs an opset beyond {NEWEST_OPSET}")
    return model


# -- the measure -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """An executor, the step of its differences, and what a directional derivative may be off by."""

    executor: str
    double: bool
    step: float = 1e-6
    tolerance: float = 1e-6
    floor: float = 1e-3


MEASURES = (
    Measure("onnxruntime", True),
    Measure("reference", True),
    Measure("reference", True, 3e-3, 1e-2, 1e-2),  # where onnx.reference computes in float32 whatever it gets
    Measure("onnxruntime", False, 3e-3, 1e-2, 1e-2),
)


CANCELLING = {
    "RNN": "where tanh saturates, float32 knows y to 6e-8, and so its slope 1 - y²",
    "SoftmaxCrossEntropyLoss": "the derivative in the class weights is the difference of two means over thousands",
}
"""Operators whose gradient, small against what it is made of, float32 has to fewer digits; float64 is held to all."""


class Bench:
    """What judges the subjects of a case, and does once what several options have in common.

    What comes of a subject is settled by the models that are run. Where options leave them as they are, to the byte,
    so is the verdict.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[str, bool], onnx.ModelProto] = {}
        self._backward: dict[tuple[str, bool, str], onnx.ModelProto] = {}
        self._judged: dict[tuple[str, str], tuple[str, str]] = {}
        self._measured: dict[tuple[Any, ...], tuple[str, str] | NotEvaluableError] = {}

    def judge(self, subject: Subject) -> Iterator[Verdict]:
        """What comes of a subject; one refused for some of its inputs or outputs is judged one by one."""
        kind, why = self._as_without_options(subject, *self._judge(subject))
        known = "there is no" not in why
        if kind == REFUSED and known and len(subject.wanted) * len(subject.seeded) > 1:
            for part in parts(subject):
                yield from self.judge(part)
        else:
            yield Verdict(subject, kind, why, kind in (RIGHT, BESIDE) and self._changed(subject))

    def prepared(self, subject: Subject, double: bool) -> onnx.ModelProto:
        """The subject's model, in float64 or as it was published, as it is differentiated."""
        key = (str(subject), double)
        if key not in self._prepared:
            self._prepared[key] = prepared(to_double(subject.model) if double else _copy(subject.model))
        return self._prepared[key]

    def backward(self, subject: Subject, double: bool) -> onnx.ModelProto:
        """That model with its gradients, written as the subject's options ask for."""
        key = (str(subject), double, repr(subject.options))
        if key not in self._backward:
            model = self.prepared(subject, double)
            self._backward[key] = with_gradient(model, subject.wanted, subject.seeded, "g_", subject.options)
        return self._backward[key]

    def _as_without_options(self, subject: Subject, kind: str, why: str) -> tuple[str, str]:
        """The verdict, wrong where it is a worse one than without the options.

        What a runtime of the portable target lacks is to be refused, by its name. Of parts that are judged for that
        reason, some can't be by differences, such as whole numbers alone: with and without options alike.
        """
        if kind == RIGHT or subject.options == Options():
            return kind, why
        if kind == REFUSED and subject.options.target == PORTABLE and why.strip().startswith(LACKED):
            return kind, why
        plain, _ = self._judge(_plain(subject))
        if kind == plain == WRONG:
            return NOT, why
        worse = KINDS.index(kind) > KINDS.index(plain)
        return (WRONG, f"{kind}, and {plain} without the options: {why}") if worse else (kind, why)

    def _changed(self, subject: Subject) -> bool:
        if subject.options == Options():
            return False
        types = {dtype_of(value.type) for value in subject.model.graph.input if value.name in subject.wanted}
        double = types != {onnx.TensorProto.FLOAT}
        try:
            written = self.backward(subject, double)
        except UnsupportedError:  # it was judged in float64 alone: a target has not the types that it was published in
            return False
        return changes(written, self.backward(_plain(subject), double)) > 0

    def _judge(self, subject: Subject) -> tuple[str, str]:
        key = (str(subject), repr(subject.options))
        if key not in self._judged:
            self._judged[key] = self._judge_anew(subject)
        return self._judged[key]

    def _judge_anew(self, subject: Subject) -> tuple[str, str]:
        if {node.op_type for node in subject.model.graph.node} & RANDOM - {"Dropout"}:
            return NOT, "draws at random"  # once in 300 runs it draws what was published; the next draw is another
        missing: list[str] = []
        try:
            for measure in MEASURES:
                found = self._measure(subject, measure)
                if not isinstance(found, NotEvaluableError):
                    return found
                missing.append(f"{measure.executor} {found}")
        except UnsupportedError as error:
            return REFUSED, str(error.refusals[0].reason if error.refusals else error.message)
        except OnnxgradError as error:
            return REFUSED, error.message
        except Exception as error:
            return WRONG, f"raises {type(error).__name__}: {_line(error)}"
        return NOT, "; ".join(dict.fromkeys(missing))

    def _measure(self, subject: Subject, measure: Measure) -> tuple[str, str] | NotEvaluableError:
        """What a measure says, or why it says nothing, of what the options made of a subject."""
        models = self.backward(subject, measure.double), self._narrow_backward(subject) if measure.double else None
        written = tuple(model and model.SerializeToString(deterministic=True) for model in models)
        key = (str(subject), measure, *written)
        if key not in self._measured:
            try:
                self._measured[key] = _by_differences(self, subject, measure)
            except NotEvaluableError as reason:
                self._measured[key] = reason
        return self._measured[key]

    def _narrow_backward(self, subject: Subject) -> onnx.ModelProto | None:
        return self.backward(subject, False) if _all_float32(subject, self.prepared(subject, False)) else None


def _plain(subject: Subject) -> Subject:
    return replace(subject, options=Options())


def _all_float32(subject: Subject, model: onnx.ModelProto) -> bool:
    types = {value.name: dtype_of(value.type) for value in (*model.graph.input, *model.graph.output)}
    return {types[name] for name in (*subject.wanted, *subject.seeded)} == {onnx.TensorProto.FLOAT}


def _by_differences(bench: Bench, subject: Subject, measure: Measure) -> tuple[str, str]:
    original = to_double(subject.model) if measure.double else _copy(subject.model)
    types = {value.name: dtype_of(value.type) for value in original.graph.input}
    feeds = {name: _as(x, types.get(name)) for name, x in subject.feeds.items()}
    lowered(original)
    forward = _executor(original, measure.executor)
    values = _run(forward, original, feeds)
    graph = subject.model.graph
    half = any(dtype_of(value.type) in HALVES for value in (*graph.input, *graph.output))
    for name, expected in subject.expected.items():
        got = np.asarray(values[name])
        if got.shape != np.shape(expected) or (
            name in subject.seeded
            and not np.allclose(got.astype(float), np.asarray(expected, float), 1e-2 if half else 1e-3, 1e-4, True)
        ):
            raise NotEvaluableError("does not compute the published outputs")
    rng = np.random.default_rng(zlib.crc32(str(subject).encode()))
    why = ""
    for kind, point in ((RIGHT, feeds), *((BESIDE, _beside(subject, feeds, rng)) for _ in range(5))):
        error = _error(bench, subject, measure, original, forward, point, rng)
        if error is None:
            return kind, f"{forward.name} {why}"
        why = why or error
    if measure.step < 1e-5 and _noisy(subject, original, forward, point, measure.step):
        raise NotEvaluableError("computes in float32")
    return WRONG, why


def _noisy(subject: Subject, model: onnx.ModelProto, forward: Executor, point: Arrays, step: float) -> bool:
    """Whether second differences show the rounding of float32."""

    def function(moved: Arrays) -> Arrays:
        outputs = _run(forward, model, moved)
        return {name: outputs[name] for name in subject.seeded}

    return rounded(function, point, subject.wanted, step)


def _executor(model: onnx.ModelProto, prefer: str) -> Executor:
    try:
        return Executor(model, prefer, fallback=False)
    except Exception as error:  # the executors' exceptions share no base class
        raise NotEvaluableError(f"has no kernel: {_line(error)}") from error


def _run(run: Executor, model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    try:
        return run(fed(model, feeds))
    except Exception as error:
        raise NotEvaluableError(f"does not run: {_line(error)}") from error


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def _as(x: Any, dtype: int | None) -> Any:
    return x if dtype is None or isinstance(x, list) else np.asarray(x, onnx.helper.tensor_dtype_to_np_dtype(dtype))


def _beside(subject: Subject, feeds: Arrays, rng: np.random.Generator) -> Arrays:
    """The point moved a little, off kinks, finite, of the same signs, in the precision of the published model."""
    moved = dict(feeds)
    for name in subject.wanted:
        x = np.nan_to_num(np.asarray(feeds[name], np.float64), nan=0.5, posinf=5.0, neginf=-5.0)
        away = x + 0.01 * rng.standard_normal(x.shape) * (1 + np.abs(x))
        moved[name] = (
            np.where(x < 0, away, np.abs(away))
            .astype(np.asarray(subject.feeds[name]).dtype)
            .astype(np.asarray(feeds[name]).dtype)
        )
    return moved


def _error(
    bench: Bench,
    subject: Subject,
    measure: Measure,
    model: onnx.ModelProto,
    forward: Executor,
    point: Arrays,
    rng: np.random.Generator,
) -> str | None:
    """What is wrong with the gradient at a point; None if it is right."""
    if not all(np.isfinite(np.asarray(point[name], float)).all() for name in subject.wanted):
        return "not finite"
    values = _run(forward, model, point)
    types = {value.name: dtype_of(value.type) for value in model.graph.output}
    seeds = {name: _as(rng.standard_normal(np.shape(values[name])), types[name]) for name in subject.seeded}
    finite = {name: np.isfinite(np.asarray(values[name], float)) for name in subject.seeded}
    seeds = {name: np.where(finite[name], seed, np.zeros_like(seed)) for name, seed in seeds.items()}
    gradients = _gradients(subject, measure, bench.backward(subject, measure.double), point, seeds)
    for name, gradient in gradients.items():
        if gradient.shape != np.shape(point[name]):
            return f"{name}: {gradient.shape} for {np.shape(point[name])}"

    def function(moved: Arrays) -> float:
        outputs = forward(fed(model, moved))
        return float(sum(np.sum(np.where(finite[n], outputs[n], 0).astype(float) * s) for n, s in seeds.items()))

    scale = sum(float(np.sum(np.abs(np.where(finite[n], values[n], 0) * s))) for n, s in seeds.items())
    for _ in range(2):
        for step in (measure.step, 10 * measure.step):  # a large sum's rounding drowns the smaller step
            try:
                found = directional(function, point, gradients, rng, step, measure.floor * scale)
            except Exception as error:  # an input that decides on the shape of the output
                return _line(error)
            if found.error <= measure.tolerance:
                break
        else:
            return f"{forward.name}: {found}"
    return _narrow_error(bench, subject, point, seeds, values, gradients) if measure.double else None


def _gradients(subject: Subject, measure: Measure, backward: onnx.ModelProto, point: Arrays, seeds: Arrays) -> Arrays:
    failure = None
    for prefer in dict.fromkeys((measure.executor, "onnxruntime", "reference")):
        try:
            run = _executor(backward, prefer)
            result = _run(run, backward, {**point, **{f"g_{name}": seed for name, seed in seeds.items()}})
        except NotEvaluableError as error:
            failure = error
            continue
        return {name: np.asarray(result[f"g_grad_{name}"]) for name in subject.wanted}
    raise NotEvaluableError(f"its gradient {failure}")


def _narrow_error(
    bench: Bench, subject: Subject, point: Arrays, seeds: Arrays, values: Arrays, gradients: Arrays
) -> str | None:
    """Where stock onnxruntime, in the types of the published model, departs from the gradients in float64."""
    model = bench.prepared(subject, False)
    if not _all_float32(subject, model):
        return None
    types = {value.name: dtype_of(value.type) for value in (*model.graph.input, *model.graph.output)}
    feeds = {name: _as(x, types.get(name)) for name, x in point.items()}
    feeds |= {f"g_{name}": _as(seed, types[name]) for name, seed in seeds.items()}

    def run(written: Subject) -> Arrays:
        backward = bench.backward(written, False)
        found = _run(_executor(backward, "onnxruntime"), backward, feeds)
        if not all(np.allclose(found[name], values[name], 1e-3, 1e-4, equal_nan=True) for name in subject.seeded):
            raise NotEvaluableError("computes other outputs")
        return found

    try:
        result = run(subject)
    except NotEvaluableError as error:
        try:
            run(_plain(subject))
        except NotEvaluableError:
            return None
        return f"in float32 it {error}"
    least = 3e-2 if subject.op.removesuffix(", expanded") in CANCELLING else 1e-3
    for name, gradient in gradients.items():
        off = np.max(np.abs(result[f"g_grad_{name}"] - gradient), initial=0.0)
        if not off <= 1e-4 * np.max(np.abs(gradient), initial=least):
            return f"{name} is off by {off:.1e} in float32"
    return None


def verdicts(file: str, only: Callable[[str], bool], variants: Sequence[Options] = (Options(),)) -> list[Verdict]:
    """What comes of every subject, with each variant's options, of the published cases of a file that are asked for."""
    found: list[Verdict] = []
    op = ""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in published_cases(file):
            expanded = "_expanded" in case.name  # follows the case itself
            op = op if expanded else case.model.graph.node[0].op_type
            if only(case.name):
                bench = Bench()
                named = f"{op}, expanded" if expanded else op
                every = (subject for options in variants for subject in subjects(case, named, options))
                found.extend(verdict for subject in every for verdict in bench.judge(subject))
    return found


def _beside_the_point(verdict: Verdict) -> bool:
    """Whether it is the refusal of an input that the standard tags as non-differentiable."""
    node = verdict.subject.model.graph.node[0]
    names = list(node.input)
    if verdict.kind != REFUSED or node.domain or not set(verdict.subject.wanted) <= set(names):
        return False
    version = next(entry.version for entry in verdict.subject.model.opset_import if not entry.domain)
    inputs = onnx.defs.get_schema(node.op_type, version).inputs
    tags = [inputs[min(names.index(name), len(inputs) - 1)].differentiation_category for name in verdict.subject.wanted]
    return all(tag == onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable for tag in tags)


def by_case(found: Iterable[Verdict]) -> dict[tuple[str, str], str]:
    """(operator, case) -> what came of the case as it was published, the worst of its inputs and outputs."""
    worst: dict[tuple[str, str], str] = {}
    for verdict in found:
        if verdict.subject.form.startswith(PUBLISHED) and not _beside_the_point(verdict):
            key = (verdict.subject.op, verdict.subject.case)
            worst[key] = max(worst.get(key, RIGHT), verdict.kind, key=KINDS.index)
    return worst


def table(found: Iterable[tuple[str, str]]) -> str:
    """How much of each operator came out how, from pairs of operator and kind."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for op, kind in found:
        counts[op][kind] += 1
        counts["all"][kind] += 1
    lines = [f"{'':36}" + "".join(f"{kind:>21}" for kind in KINDS)]
    for op in sorted(counts, key=lambda op: (op == "all", op)):
        lines.append(f"{op:36}" + "".join(f"{counts[op][kind] or '':>21}" for kind in KINDS))
    return "\n".join(lines)


SLOW = frozenset({"test_averagepool_3d_default", "test_lppool_3d_default"})
"""They take onnx.reference half a minute."""


MOST = 1
"""How many cases of a file `make test` runs; `make conformance` runs the others too."""


def quick(file: str) -> set[str]:
    """The names of the cases of a file that `make test` runs, from all over it."""
    names = [case.name for case in published_cases(file)]
    return set(names[:: -(-len(names) // MOST) or 1]) - SLOW


POOLING = {"averagepool", "lppool", "maxpool"}
"""Files for which onnx computes seconds, in Python, before there is a case; `make conformance` runs all of each."""


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=pytest.mark.slow) if file in POOLING else file for file in FILES]
)
@pytest.mark.thinned(4, 16)
def test_published_nodes(file: str) -> None:
    check(file, quick(file).__contains__)


def check(file: str, only: Callable[[str], bool]) -> None:
    found = verdicts(file, only)
    print(table((v.subject.op, v.kind) for v in found))
    assert not [f"{v.subject}: {v.why}" for v in found if v.kind == WRONG]


def test_a_wrong_rule_is_found() -> None:
    with registry.scoped():

        @registry.rule("Sigmoid", override=True)
        def sigmoid(op, g, y, x):
            return g * y

        found = verdicts("sigmoid", lambda name: name == "test_sigmoid")
    assert [verdict.kind for verdict in found] == [WRONG, WRONG]


def test_what_is_drawn_is_no_measure() -> None:
    found = verdicts("bernoulli", lambda name: True)
    assert {(verdict.kind, verdict.why) for verdict in found} == {(NOT, "draws at random")}


def kinds(file: str, case: str, options: Options) -> list[tuple[str, str, bool]]:
    """The form, the kind and whether it is another model, of all forms of a case."""
    found = verdicts(file, lambda name: name == case, [options])
    return [(verdict.subject.form, verdict.kind, verdict.changed) for verdict in found]


BLOCKED = ("conv", "test_basic_conv_with_padding", Options(target="ort-cpu"))
COPIED = ("logsoftmax", "test_logsoftmax_axis_0_expanded", Options(recompute=RecomputeSpec("elementwise")))


def test_gradients_for_a_target_and_with_recomputation() -> None:
    assert kinds(*BLOCKED) == [
        (PUBLISHED, RIGHT, False), ("symbolic axes", RIGHT, False), (f"{WIDE} times the channels", RIGHT, True)
    ]  # fmt: skip
    assert kinds(*COPIED) == [(PUBLISHED, RIGHT, True), ("symbolic axes", RIGHT, True)]


@pytest.mark.parametrize(
    ("key", "text", "instead"),
    [
        ((DENSE, "Conv"), "perm = [0, 1, 3, 2, 4]", "perm = [1, 0, 3, 2, 4]"),
        ((DENSE, "ConvTranspose"), "perm = [2, 0, 3, 1, 4]", "perm = [0, 2, 3, 1, 4]"),
        ((DENSE, "Conv"), "nchwc.Conv", "nchwc.NoSuchOperator"),
    ],
    ids=["the blocks of a weight", "those of a transposed one", "an operator that onnxruntime has not"],
)
def test_a_wrong_target_is_found(
    key: tuple[str, str], text: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text in blocked_channels.BODIES[key]
    monkeypatch.setitem(blocked_channels.BODIES, key, blocked_channels.BODIES[key].replace(text, instead))
    blocked_channels.function_of.cache_clear()
    found = kinds(*BLOCKED)
    blocked_channels.function_of.cache_clear()
    assert [kind for _, kind, _ in found] == [RIGHT, RIGHT, WRONG]


def test_a_wrong_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rewrite.write_recomputation

    def write(plan: Plan) -> int:
        count = right(plan)
        for node in plan.flow.graph.nodes:
            if node.name.startswith(rewrite.SCOPE) and node.op_type == "Exp":
                node.op_type = "Neg"
        return count

    monkeypatch.setattr(rewrite, "write_recomputation", write)
    assert {kind for _, kind, _ in kinds(*COPIED)} == {WRONG}


def main(words: Sequence[str]) -> None:
    """Print what came of the files named, or of all: what is not simply right (-v: everything), and the tables."""
    only = SLOW.__contains__ if "--slow" in words else lambda name: name not in SLOW
    names = [word for word in words if not word.startswith("-")] or FILES
    found = [verdict for name in names for verdict in verdicts(name, only)]
    for verdict in found:
        if verdict.kind != RIGHT or "-v" in words:
            print(f"{verdict.kind:21}{verdict.subject.op}: {verdict.subject}: {verdict.why}")
    print(table((v.subject.op, v.kind) for v in found), "cases:", sep="\n\n")
    print(table((op, kind) for (op, _), kind in by_case(found).items()))


if __name__ == "__main__":
    main(sys.argv[1:])
