"""Check a model of derivatives against finite differences.

Every kind of derivative is reduced to the gradient of one number: a weighted sum of the outputs. In a vector-Jacobian
or Hessian-vector product the weights are the cotangents or vectors that the model takes as inputs. Otherwise they are
random. A second derivative is checked as the first derivative of a gradient. Before that, the gradient itself is
checked against finite differences of the outputs. Kinds that are composed of others are checked in composed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from onnxgrad_cli.common.choices import SECOND_DERIVATIVES
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.double import DoubleExecutor, widened
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import Arrays, is_float
from onnxgrad_cli.metadata import Derived, Role, Roles
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase, skipped, unproved
from onnxgrad_cli.verification.checks.agreement import (
    NEARBY_POINTS,
    FailsNearby,
    Point,
    in_single,
    off_zero,
    run_nearby,
    varies,
    wide,
)
from onnxgrad_cli.verification.composed_derivatives import COMPOSED, agrees_with_parts
from onnxgrad_cli.verification.feeds import Range, finite, part, run_on_drawn, run_on_own
from onnxgrad_cli.verification.findings import hiding, in_words
from onnxgrad_cli.verification.gradients.directions import Claims
from onnxgrad_cli.verification.gradients.judgement import Judge
from onnxgrad_cli.verification.gradients.loss_function import FAITHFUL, ScalarFunction, narrowest
from onnxgrad_cli.verification.original_derivatives import derive_again, feeds_again, perturbed
from onnxgrad_cli.verification.original_model import Original
from onnxgrad_cli.verification.proof_checks import OPENING, ORIGINAL, checked
from onnxgrad_cli.verification.verdict import PROVED, Proof

AGREES = "derivatives against differences"
"""Name of the check that compares the derivatives with finite differences."""

WHOLE = "every derivative"
"""Name of the check that the model's description lists each float output that may be a derivative."""

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Largest accepted difference between two computations of a derivative in float32, relative to the largest entry."""

WIDE_RANGE = (-10.0, 10.0)
"""Range of random inputs at the second point, if derivatives are checked that the graph computes as zero."""

FAR_RANGE = (-1e3, 1e3)
"""Range of inputs large enough to show changes of a function that is constant near zero, such as Round(x / 100)."""

ATTEMPTS = 4
"""Number of times that other random data are tried.

Every second attempt moves the weights in the opposite direction: a weight that is used as an index must not grow.
"""

POINTS = 3
"""If the graph computes derivatives as zero, they are checked at this number of points, if inputs can be random."""


@dataclass(frozen=True)
class Function:
    """A function whose first derivatives are compared with finite differences.

    Attributes:
        model: computes the function.
        outputs: differentiated value, by its name in the model of derivatives -> the output of `model` that holds it.
        moves: inner value with respect to which the function is differentiated -> the input of `model` that is added to
            it.
        before: computes these inner values from the inputs of `model`; None if there are none.
        cotangents: input of `model` that is a cotangent -> the input of the model of derivatives that has its value.
    """

    model: ModelProto
    outputs: Mapping[str, str]
    moves: Mapping[str, str] = field(default_factory=dict)
    before: ModelProto | None = None
    cotangents: Mapping[str, str] = field(default_factory=dict)


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
        derived: the model's own description of its derivatives.
        original: the model that was differentiated. Without it, a first derivative is checked only if `model` computes
            the outputs too.
        data, sizes, seed, force, note: see `prove`.
    """
    before = Original(original, path) if original is not None else None
    roles = roles_of(model, derived)
    case = ProofCase(model, roles, path, before, dict(data or {}), sizes or {}, np.random.default_rng(seed), force)
    case.differentiated = derived.of
    fed = derived.inputs if derived.kind == "vjp" else derived.weights
    case.cotangents = dict(zip(fed, derived.of, strict=False))
    outputs = [value.name for value in before.model.graph.output] if before is not None else []
    compared = derived.mode == "keep" and any(has_values(model, [name]) for name in outputs)
    checks = (*OPENING, ORIGINAL) if compared else OPENING
    agree, whole = (AGREES, partial(_agrees, derived)), (WHOLE, partial(_covers_every_output, derived))
    return checked(case, (*checks, agree, whole), note)


def roles_of(model: ModelProto, derived: Derived) -> Roles:
    """Return the roles that the inputs and outputs would have in a training model.

    The first derivative takes the role of the loss. Cotangents, tangents and vectors are model inputs, so that random
    values are drawn for them.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    moved = {name: "weight" if name in derived.wrt else "constant" for name in stored}
    inputs = {value.name: moved.get(value.name, "model input") for value in model.graph.input}
    outputs = {name: Role("derivative") for name in derived.outputs}
    if derived.kind in ("vjp", "hvp", "gnvp", "hessian-diagonal"):
        outputs = {name: Role("gradient", x) for x, name in zip(derived.wrt, derived.outputs, strict=True)}
    first = next(iter(outputs), "")
    return Roles("", (), "", inputs, {**outputs, first: Role("loss")}, derived.estimated, derived.partial)


def _agrees(derived: Derived, case: ProofCase) -> CheckOutcome:
    """Compare the derivatives with finite differences: on the case's data, if necessary on other data or in float64."""
    if derived.estimated:
        return skipped("they are straight-through estimates, so finite differences do not agree with them")
    if derived.partial:
        return skipped("they leave out paths with stopped gradients, so finite differences do not agree with them")
    if any(node.op_type == "YieldOp" for node in with_bodies(case.model.graph.node)):
        return skipped("a training session must provide the cotangents at a YieldOp")
    if varies(case):
        return skipped("the model draws random numbers, so the derivatives of two runs differ")
    if derived.kind in COMPOSED:
        return agrees_with_parts(derived, case, prove_derived)
    function = _function(derived, case)
    if isinstance(function, CheckOutcome):
        return function
    found = _against_differences(derived, function, case)
    return found if found.status == "passed" or not derived.inner else _as_added(derived, case, found)


def _covers_every_output(derived: Derived, case: ProofCase) -> CheckOutcome:
    """Skip if a float output may be a derivative that the model's description doesn't list.

    The description lists the derivatives, the differentiated values, and the inner values with respect to which they
    are differentiated. An output of the original may be present too: another check compares it with the original.
    """
    known = {*derived.outputs, *derived.of, *derived.inner}
    own = [value.name for value in case.original.model.graph.output] if case.original is not None else []
    if derived.mode == "keep":
        known.update(own)
    floats = [value.name for value in case.model.graph.output if is_float(value.type)]
    others = [name for name in floats if name not in known and not _is_score(derived, case, name)]
    if not others:
        return NOTHING
    hint = "" if case.original is not None else ": pass the original model with --original"
    return skipped(f"the model's description does not cover its outputs {listed(others)}{hint}")


def _is_score(derived: Derived, case: ProofCase, name: str) -> bool:
    """Return True if an output is the score of the chosen class, taken from a differentiated output."""
    values = [case.outputs[y] for y in derived.of if derived.pick and y in case.outputs]
    try:
        return any(np.array_equal(_score(derived, case.feeds, x), case.outputs[name]) for x in values)
    except (_Unmeasured, ValueError, IndexError):  # there is no such class; _Measure reports it
        return False


def _against_differences(derived: Derived, function: Function, case: ProofCase) -> CheckOutcome:
    try:
        measure = _Measure(derived, function, case)
        try:
            found = measure.here()
        except _Unmeasured as error:  # other data may have a measure
            if case.drawn is None:
                raise
            found = skipped(str(error))
        if measure.still and measure.is_zero:
            found = measure.as_zero(found)
        elif (found.status != "passed" or found.hidden) and case.drawn is not None:
            ranges = (FAR_RANGE,) if measure.still else ()
            found = measure.elsewhere(ranges)
            if (found.status != "passed" or found.hidden) and case.described.weights:  # a weight may be a size
                found = measure.elsewhere(ranges, moves=False)
        if found.status != "passed" or found.hidden:
            found = measure.in_double()
        return replace(found, status="skipped", detail=hiding(found)) if found.hidden else found
    except (_Unmeasured, FailsNearby) as error:
        return skipped(str(error))


def _as_added(derived: Derived, case: ProofCase, found: CheckOutcome) -> CheckOutcome:
    """Check derivatives with respect to inner values through inputs that are added to these values.

    This is for derivatives at kinks, which can't be compared with finite differences, such as the derivative of a
    maximum over many zeros that a Relu computes. The derivative with respect to an inner value equals the derivative
    with respect to an input that is added to the value. A model with such inputs is checked in two steps. With random
    inputs there is no kink, so its derivatives are compared with finite differences. With inputs of zero, they must
    equal the derivatives of the case.

    Args:
        derived, case: the derivatives to check.
        found: the outcome so far, returned if the first step does not prove the derivatives.
    """
    base = case.original.model if case.original is not None else part(case.described.model, derived.of)
    model, moves = perturbed(base, case.path, derived.inner)
    names = {added: name for name, added in moves.items()}
    again, said = derive_again(
        derived, model, case.path, derived.kind, moves, per_sample=derived.per_sample is not None,
        weighted=bool(derived.weights), cotangents="input" if derived.inputs or derived.kind != "vjp" else "ones",
    )  # fmt: skip
    proof = prove_derived(again, said, case.path, model, sizes=case.sizes, force=True)
    if proof.verdict != PROVED:
        return unproved(proof, "after adding offsets to inner values") if proof.failed else found
    feeds = feeds_again(said, derived, case.feeds)
    feeds |= {theirs: case.feeds[ours] for theirs, ours in _paired(said.added(names), derived.added())}
    try:
        feeds |= {moves[name]: np.zeros_like(x) for name, x in run_on_own(part(base, derived.inner), feeds).items()}
        results = run_on_own(again, feeds)
    except Exception as error:  # the executors' exceptions share no base class
        return skipped(f"the model does not run after adding offsets to inner values: {str(error)[:300]}")
    pairs = _paired(said.results(names), derived.results())
    worst = max(_apart(results[theirs], case.outputs[ours]) for theirs, ours in pairs)
    detail = "proved on other data with offsets added to inner values, and equal to these derivatives for zero offsets"
    if not worst < MAX_RELATIVE_DIFFERENCE:
        return CheckOutcome("failed", f"{detail}, except for a difference of {worst:.1e}")
    return CheckOutcome("passed", detail)


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference of two arrays, relative to the largest entry of the first."""
    largest, difference = (float(np.abs(each).max(initial=0)) for each in (x, np.subtract(y, x)))
    return difference / (largest or 1.0)


def _paired(theirs: Mapping[tuple[str, ...], str], ours: Mapping[tuple[str, ...], str]) -> list[tuple[str, str]]:
    return [(theirs[key], ours[key]) for key in ours]


def _may_be_size(x: np.ndarray) -> bool:
    """Return True if the array is one whole number above 1, which may be a size in the model.

    Executors would round a changed value to a different size, so such a weight stays unchanged.
    """
    return x.size == 1 and float(x.reshape(())) > 1 and float(x.reshape(())).is_integer()


class _Unmeasured(Exception):
    """The derivatives can't be compared with finite differences."""


def _written_as_zero(derived: Derived, model: ModelProto) -> bool:
    """Return True if the derivatives depend on no data or weights, at most on shapes: the graph computes zeros."""
    graph = Graph(model)
    shapes = {node.output[0] for node in graph.nodes if is_standard(node.domain) and node.op_type in ("Shape", "Size")}
    read = graph.ancestors(derived.outputs, shapes - set(derived.outputs))
    return read.isdisjoint([*derived.wrt, *(value.name for value in model.graph.input)])


def _function(derived: Derived, case: ProofCase) -> Function | CheckOutcome:
    """Return the function whose first derivatives are checked, or an outcome that says why there is none."""
    base = case.original.model if case.original is not None else case.described.model
    lacking = skipped("the model does not compute the values that it differentiates: pass the original with --original")
    if case.original is None and derived.kind in SECOND_DERIVATIVES:
        return skipped("a second derivative is measured with the original model: pass it with --original")
    if not has_values(base, derived.inner):
        return lacking
    try:
        model, moves = perturbed(base, case.path, derived.inner)
    except OnnxgradError as error:
        return skipped(f"offsets can't be added to inner values: {error.message}")
    before = part(base, derived.inner) if moves else None
    if derived.kind in SECOND_DERIVATIVES:
        return _gradient(derived, case, model, moves, before)
    if case.original is not None and derived.mode != "keep":
        model, _ = derive_again(derived, model, case.path, "vjp", moves, class_=None, **_with_outputs(derived))
    if not has_values(model, derived.of):
        return lacking
    return Function(part(model, derived.of), {name: name for name in derived.of}, moves, before)


def _gradient(
    derived: Derived, case: ProofCase, model: ModelProto, moves: Mapping[str, str], before: ModelProto | None
) -> Function | CheckOutcome:
    """Prove the first derivatives, and return them as a function.

    The second derivatives must match the finite differences of this function.
    """
    gradient, said = derive_again(derived, model, case.path, "vjp", moves, **_with_outputs(derived))
    proof = prove_derived(gradient, said, case.path, model, sizes=case.sizes, force=True)
    if proof.verdict != PROVED:
        return unproved(proof, "first derivatives")
    names = {added: name for name, added in moves.items()}
    outputs = {names.get(x, x): output for x, output in zip(said.wrt, said.outputs, strict=True)}
    cotangents = {said.added()[(y,)]: name for y, name in zip(derived.of, derived.weights, strict=False)}
    return Function(gradient, outputs, moves, before, cotangents)


def _with_outputs(derived: Derived) -> dict[str, Any]:
    """Return options of `derive` for the gradient of the sum of the outputs, with the outputs themselves.

    If the outputs have weights, these are the cotangents that the model takes as inputs.
    """
    return {"cotangents": "input" if derived.weights else "ones", "keep_outputs": True}


def has_values(model: ModelProto, names: Iterable[str]) -> bool:
    """Return True if a model has all of these values, as inputs, initializers or results of nodes."""
    made = {name for node in model.graph.node for name in node.output}
    return made.union(value.name for value in (*model.graph.input, *model.graph.initializer)).issuperset(names)


class _Measure:
    """Compares the derivatives of a case with finite differences.

    If the function has jumps, such as Floor, its derivatives in the graph are zero, but a finite difference across a
    jump is not. For such functions, each entry of an input moves by a step in proportion to the entry, because such
    steps cross few jumps.

    Attributes:
        is_zero: True if the derivatives depend on no data and no weights, so the graph computes zeros.
        still: True if the derivatives are zero and the function does not change along the tested directions.

    Raises:
        _Unmeasured: the function can't be computed in float64.
    """

    def __init__(self, derived: Derived, function: Function, case: ProofCase) -> None:
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

    def here(self) -> CheckOutcome:
        """Check the derivatives on the current data of the case."""
        factors = self._factors()
        point = self._point(factors)
        judge = Judge(point.loss, point.claims, self._case.rng)
        judged = judge.judge()
        self._by = point.loss.name
        self.still = bool(judged.visible) and judged.visible.keys() <= set(judged.still)
        elements = [sum(x.size for x in arrays.values()) for arrays in (factors, self._finite)]
        if not all(elements) and not judged.refuted:
            return CheckOutcome("passed", "the inputs or the outputs have no elements, so the derivatives are zero")
        return self._with_fixed(in_words(judge, judged, ()))

    def as_zero(self, found: CheckOutcome) -> CheckOutcome:
        """Check derivatives that the graph computes as zero, after they were zero on the current data.

        Floor has such derivatives, and piecewise linear functions have such second derivatives. The function must not
        change when its inputs move, also at other points. For a second derivative the function is the first derivative,
        which is already proved. Then one point is enough if no other random data can be drawn.

        Args:
            found: the outcome on the current data.
        """
        second, points = self._derived.kind in SECOND_DERIVATIVES, 1
        while points < POINTS and self._case.drawn is not None:
            found, points = self.elsewhere((WIDE_RANGE,) if points == 1 and not second else ()), points + 1
            if not self.still:
                return found
        if points < POINTS and not second:
            return found
        where = "at this point" if points == 1 else f"at {points} points"
        what = "the first derivatives, which are proved," if second else "the outputs"
        detail = f"they are written as zero, and {where} {what} do not change with these"
        return self._with_fixed(CheckOutcome("passed", f"{detail}: {', '.join(self._moving[:5])} ({self._by})"))

    def elsewhere(self, ranges: Sequence[Range] = (), moves: bool = True) -> CheckOutcome:
        """Check the derivatives on other random data and on weights close to the stored ones, if the model runs there.

        Args:
            ranges: ranges for random float inputs. The first range in which the outputs are finite is used.
            moves: False keeps the stored weights.
        """
        case = self._case
        assert case.drawn is not None
        found = CheckOutcome()
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
                found = skipped(f"the model does not run on other data: {str(error).strip()[:300]}")
                continue
            case.feeds, case.outputs, case.drawn = {**case.feeds, **feeds}, outputs, sizes or case.drawn
            try:
                return self.here()
            except _Unmeasured as error:
                found = skipped(str(error))
        return found

    def in_double(self) -> CheckOutcome:
        """Check the derivatives that the same graph computes in float64, and compare the float32 ones with them."""
        case, factors = self._case, self._factors()
        point = self._point(factors)
        try:
            run = DoubleExecutor(case.described.model)
            exact = self._claims(run.on(case.feeds), factors)
        except Exception as error:  # the executors' exceptions share no base class
            raise _Unmeasured(f"the derivatives can't be computed in float64: {str(error).strip()[:300]}") from error
        judge = Judge(point.loss, Claims(point.loss.point, exact, case.rng, self.is_zero), case.rng)
        found = self._with_fixed(in_words(judge, judge.judge(), (), named=True))
        if found.status != "passed":
            return found
        return in_single(point, exact, found, point.loss.value, FAITHFUL[narrowest(case.described.model)])

    def _with_fixed(self, found: CheckOutcome) -> CheckOutcome:
        """Add to an outcome's text the names of inputs that have no finite value, such as a mask of infinities."""
        fixed = [name for name, entries in self._finite.items() if entries.size and not entries.any()]
        told = f"; not with respect to {', '.join(fixed[:5])}, whose values are not finite" if fixed else ""
        return replace(found, detail=found.detail + told)

    def _factors(self) -> Arrays:
        """Return, for each output of the function, the array of weights of its entries in the weighted sum."""
        derived, case = self._derived, self._case
        if derived.kind in ("vjp", "hvp"):
            of = derived.of if derived.kind == "vjp" else derived.wrt
            given = {y: np.asarray(case.feeds[name], np.float64) for y, name in zip(of, derived.inputs, strict=False)}
            given = given or {name: np.ones_like(x) for name, x in self._values({}).items()}
            if derived.per_sample is not None:  # samples have different shares, so swapped samples show
                self._shares = case.rng.standard_normal(len(next(iter(given.values()))))
                given = {name: _times(self._shares, x) for name, x in given.items()}
            return given
        return {name: case.rng.standard_normal(np.shape(x)) for name, x in self._values({}).items()}

    def _point(self, factors: Arrays) -> Point:
        case = self._case
        claims, *near = (
            self._claims({name: wide(x) for name, x in outputs.items()}, factors)
            for outputs in (case.outputs, *(run_nearby(case) for _ in range(NEARBY_POINTS[False])))
        )
        if self._derived.kind == "jvp":
            loss = ScalarFunction(partial(self._along, factors), {y: np.zeros(()) for y in factors}, True, self._run)
        else:
            start = self._start()
            point = {x: np.where(self._finite[x], start[x], 0.0) for x in claims}
            loss = ScalarFunction(partial(self._total, factors), point, True, self._run)
        if not np.isfinite(loss.value):
            raise _Unmeasured("the outputs are not finite on these data: pass other data")
        found = Claims(loss.point, claims, case.rng, self.is_zero)
        for other in near:
            found.compare(other)
        return Point(loss, found)

    def _claims(self, outputs: Mapping[str, np.ndarray], factors: Arrays) -> Arrays:
        """Return the derivatives of the weighted sum of the outputs, computed from the model's derivatives.

        Raises:
            _Unmeasured: a derivative has a different shape than its description says. Or it is not zero for an entry
                whose value is not finite.
        """
        try:
            claims = self._contractions(outputs, factors)
        except ValueError as error:
            raise _Unmeasured(f"the derivatives do not fit their description: {error}") from None
        start = self._start() if self._derived.kind != "jvp" else {}
        for x, claim in claims.items():
            if x in start and claim.shape != start[x].shape:
                sizes = f"{list(claim.shape)}, but '{x}' has {list(start[x].shape)}"
                raise _Unmeasured(f"the derivative with respect to '{x}' has the shape {sizes}")
            if x in start and np.any(claim[~self._finite[x]]):
                raise _Unmeasured(
                    f"values of '{x}' are not finite, but the derivative with respect to them is not zero"
                )
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
        """Return the gradient of a weighted sum over the samples, from the gradients of single samples.

        If gradients are not computed per sample, return the gradient unchanged.
        """
        apart = self._derived.per_sample
        if apart is None:
            return gradient
        return _times(self._shares, gradient) if x in apart else np.tensordot(self._shares, gradient, 1)

    def _contracted(self, x: str, factors: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Return the sum of a Jacobian's rows times their factors; one such sum per sample if rows are per sample."""
        if x not in (self._derived.per_sample or ()):
            return np.asarray(np.tensordot(factors, entries, factors.ndim))
        each = [np.tensordot(f, rows, f.ndim) for f, rows in zip(factors, entries, strict=True)]
        return np.asarray(each)

    def _start(self) -> Arrays:
        """Return the values, in float64, of the tensors to differentiate with respect to."""
        stored = {tensor.name: tensor for tensor in self._case.described.model.graph.initializer}
        values = {**{n: onnx.numpy_helper.to_array(stored[n]) for n in stored}, **self._case.feeds, **self._still()}
        return {name: np.asarray(values[name], np.float64) for name in self._derived.wrt}

    def _still(self) -> Arrays:
        """Return values for the inputs that are added to inner values (see `Function.moves`): zeros in their shapes."""
        if self._function.before is not None and self._still_for is not self._case.feeds:
            run = DoubleExecutor(self._function.before)
            try:
                values = run.on({**self._case.described.weights, **self._case.feeds})
            except Exception as error:  # the executors' exceptions share no base class
                raise _Unmeasured(f"inner values can't be computed in float64: {str(error).strip()[:300]}") from error
            self._zeros = {name: np.zeros(values[name].shape) for name in self._function.moves}
            self._still_for = self._case.feeds
        return self._zeros

    def _values(self, moved: Arrays) -> Arrays:
        """Return the outputs of the function at moved inputs, by their names in the model of derivatives."""
        weights_there = {**self._case.described.weights, **self._case.feeds}
        if not all(entries.all() for entries in self._finite.values()):  # infinite entries don't move
            start = self._start()
            moved = {name: np.where(self._finite[name], x, start[name]) for name, x in moved.items()}
        named = {self._function.moves.get(name, name): x for name, x in {**self._still(), **moved}.items()}
        weights = {name: widened(weights_there[name]) for name in self._case.described.weights}
        given = {theirs: self._case.feeds[ours] for theirs, ours in self._function.cotangents.items()}
        feeds = {**self._run.widened({**weights_there, **given}), **weights, **named}
        try:
            outputs = self._run(feeds)
            found = {name: np.asarray(outputs[output], np.float64) for name, output in self._function.outputs.items()}
            if self._derived.kind in SECOND_DERIVATIVES:
                return found
            return {name: _score(self._derived, self._case.feeds, x) for name, x in found.items()}
        except Exception as error:  # the executors' exceptions share no base class
            raise _Unmeasured(f"the outputs can't be computed in float64: {str(error).strip()[:300]}") from error

    def _total(self, factors: Arrays, moved: Arrays) -> float:
        return sum(_weighted(name, factors[name], x) for name, x in self._values(moved).items())

    def _along(self, factors: Arrays, moved: Arrays) -> float:
        """Return the weighted sum of the outputs for inputs moved along the tangents.

        Each output is evaluated at its own distance, so that the sum can be differentiated by each distance.

        Args:
            factors: output -> the weights of its entries.
            moved: output -> the distance along the tangents.
        """
        derived, start = self._derived, self._start()
        tangents = {
            x: np.asarray(self._case.feeds[name], np.float64)
            for x, name in zip(derived.wrt, derived.inputs, strict=True)
        }
        total = 0.0
        for far in {float(moved.get(name, 0.0)) for name in factors}:
            values = self._values({x: start[x] + far * tangent for x, tangent in tangents.items()})
            here = [name for name in factors if float(moved.get(name, 0.0)) == far]
            total += sum(_weighted(name, factors[name], values[name]) for name in here)
        return total


def _score(derived: Derived, feeds: Mapping[str, np.ndarray], values: np.ndarray) -> np.ndarray:
    """Return the scores of the chosen class, computed with numpy from a differentiated output.

    If no class is chosen, return all scores.

    Raises:
        _Unmeasured: the labels don't have the shape of the scores without the class axis.
    """
    pick, axis = derived.pick, derived.class_axis
    if not pick:
        return values
    if pick.isdigit():
        return np.take(values, int(pick), axis)
    which = values.argmax(axis) if pick == "argmax" else feeds[derived.label]
    if list(np.shape(which)) != np.delete(values.shape, axis).tolist():
        places = ", ".join(map(str, np.shape(which)))
        raise _Unmeasured(
            f"the labels have the shape [{places}], but the scores of the classes have {list(values.shape)}"
        )
    return np.take_along_axis(values, np.expand_dims(which, axis), axis).squeeze(axis)


def _times(shares: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return `x` with each slice along axis 0 multiplied by the share with the same index."""
    return x * shares.reshape(-1, *[1] * (x.ndim - 1))


def _weighted(name: str, factors: np.ndarray, values: np.ndarray) -> float:
    """Return the sum of the entries of an output, each multiplied by its entry in `factors`."""
    if factors.shape != values.shape:
        raise _Unmeasured(f"'{name}' has the shape {list(values.shape)}, but its cotangent has {list(factors.shape)}")
    return float(np.sum(factors * values))
