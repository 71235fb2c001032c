"""The proof of a model of derivatives, against differences of the outputs that it differentiates, or of their gradient.

Whatever the kind, the derivatives become gradients of one number: of the outputs times numbers, which for a
vector-Jacobian product are its cotangents and else random. A second derivative is the first one of a gradient, which is
proved before it.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import onnx
from onnx import ModelProto

from onnxgrad_cli.common.choices import Derivative, Mode
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.double import DoubleExecutor, widened
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import Arrays, is_float
from onnxgrad_cli.metadata import Derived, Role, Roles, read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.agreement import NEAR, FailsNearby, Point, in_single, off_zero, run_nearby, varies, wide
from onnxgrad_cli.verification.case import NOTHING, Case, Found
from onnxgrad_cli.verification.checks import OPENING, ORIGINAL
from onnxgrad_cli.verification.claims import Claims
from onnxgrad_cli.verification.feeds import Range, finite, part, run_on_drawn
from onnxgrad_cli.verification.findings import hiding, in_words
from onnxgrad_cli.verification.judgement import Judge
from onnxgrad_cli.verification.loss_function import FAITHFUL, ScalarFunction, narrowest
from onnxgrad_cli.verification.original import Original
from onnxgrad_cli.verification.perturbation import perturbed
from onnxgrad_cli.verification.proof import checked
from onnxgrad_cli.verification.verdict import FAILED, PROVED, Proof

AGREES = "derivatives against differences"
"""The name of the check."""

WHOLE = "every derivative"
"""The name of the check that no output is left out."""

SECOND = ("hvp", "hessian")

SAME = 1e-4
"""How far the same derivatives, computed in two ways, may be apart in float32, relative to the largest."""

WIDER = (-10.0, 10.0)
"""Range of inputs at the second point where what is written as zero must be zero."""

FAR = (-1e3, 1e3)
"""Range of inputs that shows more of a function that is constant among normal numbers, such as Round(x / 100)."""

ATTEMPTS = 4
"""How often other data are drawn. Weights move to either side in turn: a constant that is an index must not grow."""

POINTS = 3
"""At how many points what is written as zero must be zero, as far as points are drawn."""


@dataclass(frozen=True)
class Function:
    """What is differentiated once.

    Attributes:
        model: the model.
        outputs: its outputs by what they are called in the derivatives.
        moves: value in between -> the input of the model that is added to it.
        before: what computes such values from the model's inputs; None where there are none.
    """

    model: ModelProto
    outputs: Mapping[str, str]
    moves: Mapping[str, str] = field(default_factory=dict)
    before: ModelProto | None = None


def prove_derived(
    model: ModelProto,
    derived: Derived,
    path: Path | None = None,
    original: ModelProto | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    force: bool = False,
    note: Callable[[str], object] = str,
) -> Proof:
    """Check a model of derivatives on given or random data.

    Args:
        model: the model of derivatives; external data are relative to `path`.
        derived: what it says of itself.
        original: the model that was differentiated; without it a first derivative is proved where the model computes
            the outputs too.
        data, sizes, seed, force, note: see `prove`.
    """
    before = Original(original, path) if original is not None else None
    roles = roles_of(model, derived)
    case = Case(model, roles, path, before, dict(data or {}), sizes or {}, np.random.default_rng(seed), force)
    case.differentiated = derived.of
    if derived.kind == "vjp":
        case.cotangents = dict(zip(derived.inputs, derived.of, strict=False))
    outputs = [value.name for value in before.model.graph.output] if before is not None else []
    compared = derived.mode == "keep" and any(_made(model, [name]) for name in outputs)
    checks = (*OPENING, ORIGINAL) if compared else OPENING
    agree, whole = (AGREES, partial(_agrees, derived)), (WHOLE, partial(_covers_every_output, derived))
    return checked(case, (*checks, agree, whole), note)


def roles_of(model: ModelProto, derived: Derived) -> Roles:
    """The roles of what goes in and out, in the terms of a training model; the first derivative stands for the loss.

    Cotangents, tangents and vectors are model inputs, so that they are drawn as such.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    moved = {name: "weight" if name in derived.wrt else "constant" for name in stored}
    inputs = {value.name: moved.get(value.name, "model input") for value in model.graph.input}
    outputs = {name: Role("derivative") for name in derived.outputs}
    if derived.kind in ("vjp", "hvp"):
        outputs = {name: Role("gradient", x) for x, name in zip(derived.wrt, derived.outputs, strict=True)}
    first = next(iter(outputs), "")
    return Roles("", (), "", inputs, {**outputs, first: Role("loss")}, derived.estimated, derived.partial)


def _agrees(derived: Derived, case: Case) -> Found:
    """Whether the derivatives are what differences say, here, elsewhere or in float64."""
    if derived.estimated or derived.partial:
        what = "are straight-through estimates" if derived.estimated else "leave out paths that are declared to stop"
        return Found("skipped", f"they {what}: no difference agrees with them")
    if any(node.op_type == "YieldOp" for node in with_bodies(case.model.graph.node)):
        return Found("skipped", "a training session is to hand in the cotangents, by a YieldOp")
    if varies(case):
        return Found("skipped", "the model draws random numbers, so the derivatives of two runs differ")
    function, why = _function(derived, case)
    if function is None:
        return why
    found = _against_differences(derived, function, case)
    return found if found.status == "passed" or not derived.inner else _as_added(derived, case, found)


def _covers_every_output(derived: Derived, case: Case) -> Found:
    """Whether each output of floats is a derivative by its description, or a value of the model: others may be one too.

    What is differentiated, or is differentiated by, is such a value. Of other outputs the original tells that they are,
    with which they are compared.
    """
    known = {*derived.outputs, *derived.of, *derived.inner}
    own = [value.name for value in case.original.model.graph.output] if case.original is not None else []
    if derived.mode == "keep":
        known.update(own)
    floats = [value.name for value in case.model.graph.output if is_float(value.type)]
    others = [name for name in floats if name not in known and not _is_score(derived, case, name)]
    if not others:
        return NOTHING
    hint = "" if case.original is not None else ": give the model that it is of with --original"
    return Found("skipped", f"the model's description says nothing of its output {listed(others)}{hint}")


def _is_score(derived: Derived, case: Case, name: str) -> bool:
    """Whether an output is the score of a class of one that is differentiated."""
    values = [case.outputs[y] for y in derived.of if derived.pick and y in case.outputs]
    try:
        return any(np.array_equal(_score(derived, case.feeds, x), case.outputs[name]) for x in values)
    except (_Unmeasured, ValueError, IndexError):  # there is no such class, as the differences have told
        return False


def _against_differences(derived: Derived, function: Function, case: Case) -> Found:
    try:
        measure = _Measure(derived, function, case)
        try:
            found = measure.here()
        except _Unmeasured as error:  # elsewhere it may be
            if case.drawn is None:
                raise
            found = Found("skipped", str(error))
        if measure.still and measure.is_zero:
            found = measure.as_zero(found)
        elif (found.status != "passed" or found.hidden) and case.drawn is not None:
            ranges = (FAR,) if measure.still else ()
            found = measure.elsewhere(ranges)
            if (found.status != "passed" or found.hidden) and case.described.weights:  # one of them may be a size
                found = measure.elsewhere(ranges, moves=False)
        if found.status != "passed" or found.hidden:
            found = measure.in_double()
        return replace(found, status="skipped", detail=hiding(found)) if found.hidden else found
    except (_Unmeasured, FailsNearby) as error:
        return Found("skipped", str(error))


def _as_added(derived: Derived, case: Case, found: Found) -> Found:
    """The judgement of derivatives by inner values where no difference tells, as of a maximum over the zeros of Relu.

    By an input that is added to each, they are proved where it is drawn at random; there is no such kink. Where it is
    zero, they must be the ones that are judged.
    """
    base = case.original.model if case.original is not None else _only(case.described.model, derived.of)
    model, moves = perturbed(base, case.path, derived.inner)
    names = {added: name for name, added in moves.items()}
    again = derive(
        model, cast(Derivative, derived.kind), of=[glob.escape(name) for name in derived.of],
        wrt=[glob.escape(moves.get(name, name)) for name in derived.wrt], class_=derived.pick or None,
        class_axis=derived.class_axis, per_sample=derived.per_sample is not None, path=case.path,
        cotangents="input" if derived.inputs or derived.kind != "vjp" else "ones",
        options=Options(mode=cast(Mode, derived.mode)),
    )  # fmt: skip
    said = read_derived(again)
    assert said is not None
    proof = prove_derived(again, said, case.path, model, sizes=case.sizes, force=True)
    if proof.verdict != PROVED:
        return found if proof.verdict != FAILED else Found("failed", f"by what is added to inner values: {proof.why}")
    feeds = dict(case.feeds)
    feeds |= {theirs: case.feeds[ours] for theirs, ours in _paired(said.added(names), derived.added())}
    feeds |= {said.label: case.feeds[derived.label]} if derived.label else {}
    try:
        feeds |= {moves[name]: np.zeros_like(x) for name, x in _run(_only(base, derived.inner), feeds).items()}
        results = _run(again, feeds)
    except Exception as error:  # the executors' exceptions share no base class
        return Found("skipped", f"with something added to inner values the model does not run: {str(error)[:300]}")
    pairs = _paired(said.results(names), derived.results())
    worst = max(_apart(results[theirs], case.outputs[ours]) for theirs, ours in pairs)
    detail = "by what is added to inner values they are proved, elsewhere, and where that is zero they are these"
    return Found("passed", detail) if worst < SAME else Found("failed", f"{detail}, but for {worst:.1e}")


def _run(model: ModelProto, feeds: Arrays) -> Arrays:
    """The outputs of a model on those of the feeds that are its inputs."""
    taken = {value.name for value in model.graph.input}
    return Executor(model)({name: x for name, x in feeds.items() if name in taken})


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference of two arrays, relative to the largest entry of the first."""
    largest, difference = (float(np.abs(each).max(initial=0)) for each in (x, np.subtract(y, x)))
    return difference / (largest or 1.0)


def _paired(theirs: Mapping[tuple[str, ...], str], ours: Mapping[tuple[str, ...], str]) -> list[tuple[str, str]]:
    return [(theirs[key], ours[key]) for key in ours]


def _may_be_size(x: np.ndarray) -> bool:
    """Return True for a whole number above 1: executors round one that has moved to other sizes."""
    return x.size == 1 and float(x.reshape(())) > 1 and float(x.reshape(())).is_integer()


class _Unmeasured(Exception):
    """There is no measure in float64."""


def _written_as_zero(derived: Derived, model: ModelProto) -> bool:
    """Whether the derivatives follow from no value: of data and weights they read the shapes alone."""
    graph = Graph(model)
    shapes = {node.output[0] for node in graph.nodes if is_standard(node.domain) and node.op_type in ("Shape", "Size")}
    read = graph.ancestors(derived.outputs, shapes - set(derived.outputs))
    return read.isdisjoint([*derived.wrt, *(value.name for value in model.graph.input)])


def _function(derived: Derived, case: Case) -> tuple[Function | None, Found]:
    """What was differentiated once, or why that is not known."""
    base = case.original.model if case.original is not None else case.described.model
    known = [*derived.inner, *(derived.of if derived.kind not in SECOND else ())]
    if case.original is None and derived.kind in SECOND:
        return None, Found("skipped", "a second derivative is measured with the original: give it with --original")
    if not _made(base, derived.inner if case.original is not None else known):
        return None, Found("skipped", "the model does not compute what it differentiates: give it with --original")
    try:
        model, moves = perturbed(base, case.path, derived.inner)
    except OnnxgradError as error:
        return None, Found("skipped", f"nothing can be added to inner values: {error.message}")
    before = _only(base, derived.inner) if moves else None
    if derived.kind in SECOND:
        return _gradient(derived, case, model, moves, before)
    if case.original is not None and derived.mode != "keep":
        model = _derive(model, derived, moves, case.path)
    if not _made(model, derived.of):
        return None, Found("skipped", "the model does not compute what it differentiates: give it with --original")
    return Function(_only(model, derived.of), {name: name for name in derived.of}, moves, before), Found()


def _gradient(
    derived: Derived, case: Case, model: ModelProto, moves: Mapping[str, str], before: ModelProto | None
) -> tuple[Function | None, Found]:
    """The first derivatives of a model, proved, of which second ones are differences."""
    gradient = _derive(model, derived, moves, case.path)
    said = read_derived(gradient)
    assert said is not None
    proof = prove_derived(gradient, said, case.path, model, sizes=case.sizes, force=True)
    if proof.verdict != PROVED:
        return None, Found("failed" if proof.verdict == FAILED else "skipped", f"first derivatives: {proof.why}")
    names = {added: name for name, added in moves.items()}
    outputs = {names.get(x, x): output for x, output in zip(said.wrt, said.outputs, strict=True)}
    return Function(gradient, outputs, moves, before), Found()


def _derive(original: ModelProto, derived: Derived, moves: Mapping[str, str], path: Path | None) -> ModelProto:
    """The gradient of the sum of the outputs, and these."""
    by = [moves.get(name, name) for name in derived.wrt]
    of, wrt = ([glob.escape(name) for name in names] for names in (derived.of, by))
    pick = derived.pick if derived.kind in SECOND and derived.pick else None
    return derive(
        original, of=of, wrt=wrt, cotangents="ones", keep_outputs=True, path=path, class_=pick,
        class_axis=derived.class_axis, options=Options(mode=cast(Mode, derived.mode)),
    )  # fmt: skip


def _made(model: ModelProto, names: list[str] | tuple[str, ...]) -> bool:
    """Whether a model knows all of these values."""
    made = {name for node in model.graph.node for name in node.output}
    return made.union(value.name for value in (*model.graph.input, *model.graph.initializer)).issuperset(names)


def _only(model: ModelProto, outputs: tuple[str, ...]) -> ModelProto:
    """The part of a model that computes these outputs."""
    cut = copied(model)
    del cut.graph.output[:]
    cut.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return part(cut)


class _Measure:
    """The derivatives of a case, and the differences that they are held against.

    Derivatives that are written as zero are those of functions with jumps, as of Floor: steps in proportion to each
    entry cross few of them.

    Attributes:
        is_zero: True if the derivatives are written as zero.
        still: True if the derivatives are zero, and the function stays where the inputs move.

    Raises:
        _Unmeasured: the function can't be computed in float64.
    """

    def __init__(self, derived: Derived, function: Function, case: Case) -> None:
        self._derived, self._function, self._case = derived, function, case
        self._run = DoubleExecutor(function.model)
        self._still_for: Arrays | None = None
        self._shares = np.ones(0)
        self._zeros: Arrays = {}
        self._finite = {name: np.isfinite(x) for name, x in self._start().items()}
        self._moving = [name for name, entries in self._finite.items() if entries.any()]
        self.still, self._by = False, ""
        self.is_zero = _written_as_zero(derived, case.described.model)
        case.measured_by = self._run.name

    def here(self) -> Found:
        """The judgement on the data that the case has."""
        factors = self._factors()
        point = self._point(factors)
        judge = Judge(point.loss, point.claims, self._case.rng)
        judged = judge.judge()
        self._by = point.loss.name
        self.still = bool(judged.visible) and judged.visible.keys() <= set(judged.still)
        elements = [sum(x.size for x in arrays.values()) for arrays in (factors, self._finite)]
        if not all(elements) and not judged.refuted:
            return Found("passed", "the inputs or the outputs have no elements, so the derivatives are zero")
        return self._with_fixed(in_words(judge, judged, ()))

    def as_zero(self, found: Found) -> Found:
        """Judge derivatives that are written as zero and are zero here, as of Floor, or second ones of straight pieces.

        The outputs, or the first derivatives, which are proved, must stay where the inputs move, also at other points.
        One point is enough for second derivatives.

        Args:
            found: the judgement here.
        """
        second, points = self._derived.kind in SECOND, 1
        while points < POINTS and self._case.drawn is not None:
            found, points = self.elsewhere((WIDER,) if points == 1 and not second else ()), points + 1
            if not self.still:
                return found
        if points < POINTS and not second:
            return found
        where = "at this point" if points == 1 else f"at {points} points"
        what = "the first derivatives, proved before," if second else "the outputs"
        detail = f"they are written as zero, and {where} {what} stay where these move"
        return self._with_fixed(Found("passed", f"{detail}: {', '.join(self._moving[:5])} ({self._by})"))

    def elsewhere(self, ranges: Sequence[Range] = (), moves: bool = True) -> Found:
        """Judge on other data and weights next to those that are stored, if the model runs on them.

        Args:
            ranges: of floats; the first in which the outputs are finite is taken.
            moves: False leaves weights as they are stored.
        """
        case = self._case
        assert case.drawn is not None
        found = Found()
        near, weights = dict[str, np.ndarray](), case.described.weights if moves else {}
        weights = {name: x for name, x in weights.items() if not _may_be_size(x)}
        case.feeds = {name: x for name, x in case.feeds.items() if name not in case.described.weights}
        for attempt in range(ATTEMPTS):
            with np.errstate(over="ignore"):
                if attempt % 2:
                    near = {name: np.asarray(2 * x - near[name], x.dtype) for name, x in weights.items()}
                else:
                    near = {name: off_zero(x, case.rng) for name, x in weights.items()}
            data = {**{name: x for name, x in near.items() if finite(x)}, **case.data}
            try:
                feeds, outputs, sizes = run_on_drawn(
                    case.run, case.described, case.rng, data, case.drawn, case.sizes, False, ranges
                )
            except Exception as error:  # the executors' exceptions share no base class
                found = Found("skipped", f"the model does not run on other data: {str(error).strip()[:300]}")
                continue
            case.feeds, case.outputs, case.drawn = {**case.feeds, **feeds}, outputs, sizes or case.drawn
            try:
                return self.here()
            except _Unmeasured as error:
                found = Found("skipped", str(error))
        return found

    def in_double(self) -> Found:
        """The judgement of the derivatives that the same graph gives in float64; and how far float32's are off."""
        case, factors = self._case, self._factors()
        point = self._point(factors)
        try:
            run = DoubleExecutor(case.described.model)
            exact = self._claims(run(run.widened(case.feeds)), factors)
        except Exception as error:  # the executors' exceptions share no base class
            raise _Unmeasured(f"the derivatives can't be had in float64: {str(error).strip()[:300]}") from error
        judge = Judge(point.loss, Claims(point.loss.point, exact, case.rng, self.is_zero), case.rng)
        found = self._with_fixed(in_words(judge, judge.judge(), (), named=True))
        if found.status != "passed":
            return found
        return in_single(point, exact, found, point.loss.value, FAITHFUL[narrowest(case.described.model)])

    def _with_fixed(self, found: Found) -> Found:
        """What was found, and of which constants nothing was but zeros, as of a mask of infinities."""
        fixed = [name for name, entries in self._finite.items() if entries.size and not entries.any()]
        told = f"; not by {', '.join(fixed[:5])}, whose values are not finite" if fixed else ""
        return replace(found, detail=found.detail + told)

    def _factors(self) -> Arrays:
        """What each output of the function is multiplied with, before all are added up."""
        derived, case = self._derived, self._case
        if derived.kind in ("vjp", "hvp"):
            of = derived.of if derived.kind == "vjp" else derived.wrt
            given = {y: np.asarray(case.feeds[name], np.float64) for y, name in zip(of, derived.inputs, strict=False)}
            given = given or {name: np.ones_like(x) for name, x in self._values({}).items()}
            if derived.per_sample is not None:  # each sample counts otherwise, so that none stands for another
                self._shares = case.rng.standard_normal(len(next(iter(given.values()))))
                given = {name: _times(self._shares, x) for name, x in given.items()}
            return given
        return {name: case.rng.standard_normal(np.shape(x)) for name, x in self._values({}).items()}

    def _point(self, factors: Arrays) -> Point:
        case = self._case
        claims, *near = (
            self._claims({name: wide(x) for name, x in outputs.items()}, factors)
            for outputs in (case.outputs, *(run_nearby(case) for _ in range(NEAR[False])))
        )
        if self._derived.kind == "jvp":
            loss = ScalarFunction(partial(self._along, factors), {y: np.zeros(()) for y in factors}, True, self._run)
        else:
            start = self._start()
            point = {x: np.where(self._finite[x], start[x], 0.0) for x in claims}
            loss = ScalarFunction(partial(self._total, factors), point, True, self._run)
        if not np.isfinite(loss.value):
            raise _Unmeasured("the outputs are not finite on these data: give others")
        found = Claims(loss.point, claims, case.rng, self.is_zero)
        for other in near:
            found.compare(other)
        return Point(loss, found)

    def _claims(self, outputs: Mapping[str, np.ndarray], factors: Arrays) -> Arrays:
        """The derivatives of the sum of the outputs times the factors.

        Raises:
            _Unmeasured: they are not of the shapes that they have by their description, or not zero by what is not
                finite.
        """
        try:
            claims = self._contractions(outputs, factors)
        except ValueError as error:
            raise _Unmeasured(f"the derivatives are none of what they are said to be of: {error}") from None
        start = self._start() if self._derived.kind != "jvp" else {}
        for x, claim in claims.items():
            if x in start and claim.shape != start[x].shape:
                sizes = f"{list(claim.shape)}, and it has {list(start[x].shape)}"
                raise _Unmeasured(f"the derivative by '{x}' has shape {sizes}")
            if x in start and np.any(claim[~self._finite[x]]):
                raise _Unmeasured(f"values of '{x}' are not finite, and the derivative by these is not zero")
        return {x: claim for x, claim in claims.items() if x not in start or x in self._moving}

    def _contractions(self, outputs: Mapping[str, np.ndarray], factors: Arrays) -> Arrays:
        derived = self._derived
        found = [outputs[name] for name in derived.outputs]
        if derived.kind in ("vjp", "hvp"):
            return {x: self._of_samples(x, claim) for x, claim in zip(derived.wrt, found, strict=True)}
        if derived.kind == "jvp":
            return {y: np.asarray(np.sum(factors[y] * x)) for y, x in zip(derived.of, found, strict=True)}
        rows = derived.of if derived.kind == "jacobian" else derived.wrt
        claims: Arrays = {}
        for (row, x), entries in zip(product(rows, derived.wrt), found, strict=True):
            claims[x] = claims.get(x, 0.0) + self._contracted(x, factors[row], entries)
        return claims

    def _of_samples(self, x: str, gradient: np.ndarray) -> np.ndarray:
        """The gradient of all samples' sum, each counted as often as its share, from those of each."""
        apart = self._derived.per_sample
        if apart is None:
            return gradient
        return _times(self._shares, gradient) if x in apart else np.tensordot(self._shares, gradient, 1)

    def _contracted(self, x: str, factors: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """The sum of the rows of a Jacobian times their factors; of each sample by its own."""
        if x not in (self._derived.per_sample or ()):
            return np.asarray(np.tensordot(factors, entries, factors.ndim))
        each = [np.tensordot(f, rows, f.ndim) for f, rows in zip(factors, entries, strict=True)]
        return np.asarray(each)

    def _start(self) -> Arrays:
        """What can move, in float64."""
        stored = {tensor.name: tensor for tensor in self._case.described.model.graph.initializer}
        values = {**{n: onnx.numpy_helper.to_array(stored[n]) for n in stored}, **self._case.feeds, **self._still()}
        return {name: np.asarray(values[name], np.float64) for name in self._derived.wrt}

    def _still(self) -> Arrays:
        """Zeros like the values in between: what is added to them where they are."""
        if self._function.before is not None and self._still_for is not self._case.feeds:
            run = DoubleExecutor(self._function.before)
            try:
                values = run(run.widened({**self._case.described.weights, **self._case.feeds}))
            except Exception as error:  # the executors' exceptions share no base class
                raise _Unmeasured(f"inner values can't be had in float64: {str(error).strip()[:300]}") from error
            self._zeros = {name: np.zeros(values[name].shape) for name in self._function.moves}
            self._still_for = self._case.feeds
        return self._zeros

    def _values(self, moved: Arrays) -> Arrays:
        """The outputs of the function, by what they are called in the derivatives."""
        weights_there = {**self._case.described.weights, **self._case.feeds}
        if not all(entries.all() for entries in self._finite.values()):  # what is infinite stays
            start = self._start()
            moved = {name: np.where(self._finite[name], x, start[name]) for name, x in moved.items()}
        named = {self._function.moves.get(name, name): x for name, x in {**self._still(), **moved}.items()}
        weights = {name: widened(weights_there[name]) for name in self._case.described.weights}
        feeds = {**self._run.widened(weights_there), **weights, **named}
        try:
            outputs = self._run(feeds)
            found = {name: np.asarray(outputs[output], np.float64) for name, output in self._function.outputs.items()}
            if self._derived.kind in SECOND:
                return found
            return {name: _score(self._derived, self._case.feeds, x) for name, x in found.items()}
        except Exception as error:  # the executors' exceptions share no base class
            raise _Unmeasured(f"the outputs can't be had in float64: {str(error).strip()[:300]}") from error

    def _total(self, factors: Arrays, moved: Arrays) -> float:
        return sum(_weighted(name, factors[name], x) for name, x in self._values(moved).items())

    def _along(self, factors: Arrays, moved: Arrays) -> float:
        """The same where each output is taken so far along the tangents as is said of it."""
        derived, start = self._derived, self._start()
        tangents = {x: self._case.feeds[name] for x, name in zip(derived.wrt, derived.inputs, strict=True)}
        total = 0.0
        for far in {float(moved.get(name, 0.0)) for name in factors}:
            values = self._values({x: start[x] + far * tangent for x, tangent in tangents.items()})
            here = [name for name in factors if float(moved.get(name, 0.0)) == far]
            total += sum(_weighted(name, factors[name], values[name]) for name in here)
        return total


def _score(derived: Derived, feeds: Mapping[str, np.ndarray], values: np.ndarray) -> np.ndarray:
    """Of the scores of classes the one that is differentiated, by numpy; all, where all are."""
    pick, axis = derived.pick, derived.class_axis
    if not pick:
        return values
    if pick.isdigit():
        return np.take(values, int(pick), axis)
    which = values.argmax(axis) if pick == "argmax" else feeds[derived.label]
    if list(np.shape(which)) != np.delete(values.shape, axis).tolist():
        places = ", ".join(map(str, np.shape(which)))
        raise _Unmeasured(f"the labels are [{places}], the scores of the classes {list(values.shape)}")
    return np.take_along_axis(values, np.expand_dims(which, axis), axis).squeeze(axis)


def _times(shares: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Each slice of `x` along axis 0, times its share."""
    return x * shares.reshape(-1, *[1] * (x.ndim - 1))


def _weighted(name: str, factors: np.ndarray, values: np.ndarray) -> float:
    """The sum of the entries of an output, each times its factor."""
    if factors.shape != values.shape:
        raise _Unmeasured(f"'{name}' has shape {list(values.shape)}, and its cotangent {list(factors.shape)}")
    return float(np.sum(factors * values))
