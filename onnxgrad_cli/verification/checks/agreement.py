"""Check gradients against slopes: finite differences of the loss along random directions.

There are three attempts: at the given point, at another point, and with the gradients in float64. The first attempt
that the gradients clearly pass ends the check. The gradients are wrong if they fail all three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.limits import OverLimit
from onnxgrad_cli.ir.modes import RANDOM
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.verification.case import CheckOutcome, ProofCase, skipped
from onnxgrad_cli.verification.feeds import lengths_in, random_feeds
from onnxgrad_cli.verification.findings import STILL, hiding, in_words
from onnxgrad_cli.verification.gradients.directions import Claims
from onnxgrad_cli.verification.gradients.judgement import Judge, distance
from onnxgrad_cli.verification.gradients.loss_function import (
    FAITHFUL,
    LossFunction,
    ScalarFunction,
    loss_factor,
    loss_function,
    moved,
    narrowest,
    nearby,
)

ELSEWHERE = 1e-2
"""Relative change of each entry of a weight for the second attempt of the check.

If no entry of a weight is larger than this number, the entries are set to values of about this size.
"""

KERNELS = 5e-2
"""Largest accepted error of onnxruntime's float32 gradients compared with float64, relative to the largest gradient."""

MAX_NOISE = 0.1
"""The largest noise, relative to the largest gradient, with which float32 gradients can be compared with float64 ones.

The noise is how much the gradients change if their inputs change by a rounding error.
"""

FEW_ENTRIES = 100
"""If the gradients have at most this many entries in total, wrong gradients may agree with float32 slopes by chance.

Slopes in float32 only show gradient errors above 20 %. So the gradients must then pass two attempts.
"""

NEARBY_POINTS = {True: 1, False: 2}
"""Number of runs, on inputs changed by a rounding error, that measure the noise of the gradients.

The key is True for costly models (see `ProofCase.is_costly`), False for others.
"""


def agrees_with_slopes(case: ProofCase) -> CheckOutcome:
    """Check that the gradients match finite differences of the loss."""
    if why := _not_comparable(case):
        return skipped(why)
    entries = sum(case.outputs[output].size for output in case.roles.gradients.values())
    passed = 0
    for look in (_here, _elsewhere, _in_double):
        try:
            found = look(case)
            if look is _elsewhere and found.detail == STILL:  # a layer may be 0 everywhere, or all signals masked
                found = _with_lengths(case) or look(case)
        except _Refuted as error:
            return CheckOutcome("failed", str(error))
        except FailsNearby as error:
            return skipped(str(error))
        passed += found.status == "passed" and not found.hidden
        sure = case.exact or entries > FEW_ENTRIES or (look is _elsewhere and passed == 2)
        if found.status == "passed" and sure and not found.hidden:
            return found
    if found.hidden:
        return skipped(hiding(found))
    if passed:
        return skipped(f"correct on some data within the precision of float32, but not on other data: {found.detail}")
    return found


def _not_comparable(case: ProofCase) -> str:
    """Return the reason why the gradients can't be compared with slopes; "" if they can."""
    if case.roles.estimated:
        return "they are straight-through estimates, because the derivative of rounding is zero or does not exist"
    if varies(case):
        return "the model draws random numbers, so the losses of two runs differ"
    if not case.roles.gradients:
        return "no output is a gradient"
    whole = set(case.roles.gradients) - set(case.roles.partial)
    return "" if whole else "all gradients leave out paths on which gradients are stopped"


def varies(case: ProofCase) -> bool:
    """Return True if the model contains random operators and two runs on the same data give different results."""
    if not any(node.op_type in RANDOM for node in with_bodies(case.described.model.graph.node)):
        return False
    again, names = case.run(case.feeds), (case.roles.loss, *case.roles.gradients.values())
    return not all(np.array_equal(again[name], case.outputs[name], equal_nan=True) for name in names)


class _Refuted(Exception):
    """The gradients are known to be wrong before any slope is measured.

    Either the training model's loss differs from the loss that its forward part computes alone, or a gradient has
    a different shape than its tensor.
    """


class FailsNearby(Exception):
    """The model fails if its floats change by a rounding error, for example because a size is computed from a float."""


def run_nearby(case: ProofCase) -> Arrays:
    """Run the model with all floats, weights included, changed by a rounding error; return the outputs.

    Raises:
        FailsNearby: the model does not run on the changed floats.
    """
    try:
        return case.run(nearby(case.described, case.feeds, case.rng))
    except (OverLimit, MemoryError):
        raise
    except Exception as error:  # the executors' exceptions share no base class
        raise FailsNearby(f"the model fails if its floats change in their last digits: {str(error)[:300]}") from error


@dataclass(frozen=True)
class Point:
    """The loss and the gradients at the point where a case is checked, which its weights and inputs define.

    Attributes:
        loss: the loss as a function.
        claims: onnxruntime's gradients, and their noise: how much they change if the point changes by a rounding error.
    """

    loss: ScalarFunction
    claims: Claims


def _point(case: ProofCase, by_entry: bool = False) -> Point:
    sizes = np.shape(case.outputs[case.roles.loss])
    if math.prod(sizes) != 1:
        raise _Refuted(f"the loss '{case.roles.loss}' must be one number, but has the shape {list(sizes)}")
    weights = case.described.weights
    values = {**weights, **case.feeds}
    gradients = _gradients(case, case.outputs)
    for name, claim in gradients.items():
        shape = values[name].shape
        if claim.shape != shape and (claim.size or math.prod(shape)):  # the sizes of an empty KV cache may differ
            raise _Refuted(
                f"the gradient of '{name}' has the shape {list(claim.shape)}, but the tensor has {list(shape)}"
            )
    claims = Claims(values, gradients, case.rng, by_entry)
    value, others = _loss(case, case.outputs), []
    for _ in range(NEARBY_POINTS[case.is_costly]):
        near = run_nearby(case)
        others.append(_loss(case, near))
        claims.compare(_gradients(case, near))
        del near  # takes as much memory as all weights
    allowed = FAITHFUL[narrowest(case.described.model)] * max(abs(value), 1e-6) + 10 * max(
        abs(other - value) for other in others
    )
    loss = loss_function(case.described, case.feeds, value, allowed)
    if abs(loss.value - value) > allowed:
        raise _Refuted(
            f"the loss is {value:.6g}, but its forward part alone gives {loss.value:.6g}, which is an error of "
            "onnxruntime"
        )
    case.measured_by, case.exact = loss.name, loss.exact
    return Point(loss, claims)


def _loss(case: ProofCase, outputs: Arrays) -> float:
    """Return the loss in the outputs of a run, multiplied by the model's inputs that are gradients of the loss."""
    return loss_factor(case.roles, case.feeds) * float(outputs[case.roles.loss])


def _gradients(case: ProofCase, outputs: Arrays) -> Arrays:
    """Return tensor -> its gradient, in float32 or float64. Gradients that leave out some paths are not included."""
    whole = {n: output for n, output in case.roles.gradients.items() if n not in case.roles.partial}
    return {name: wide(outputs[output]) for name, output in whole.items()}


def wide(x: np.ndarray) -> np.ndarray:
    """Convert an array to float32, in which differences of close values are exact, unless it is float64."""
    return x if x.dtype == np.float64 else np.asarray(x, np.float32)


def _here(case: ProofCase) -> CheckOutcome:
    """Check the gradients at the given point. Skip the check at a kink, where wrong gradients would pass."""
    return _judged(case, _point(case), at_kinks=False)


def _judged(case: ProofCase, point: Point, at_kinks: bool = True) -> CheckOutcome:
    """Check the gradients at a point, in float64 if rounding dominates most of them.

    If `at_kinks` is False, skip kinks, where wrong gradients would pass.
    """
    judge = Judge(point.loss, point.claims, case.rng)
    if point.loss.exact and judge.drowned():
        return _compared_in_double(case, point)
    judged = judge.judge()
    if judged.kinked and not at_kinks and point.loss.exact and not judged.refuted:
        return skipped("the weights are at a kink, where any slope between those of its two sides is a derivative")
    return in_words(judge, judged, case.roles.partial)


def _with_lengths(case: ProofCase) -> CheckOutcome | None:
    """Check the gradients at another point, at which inputs that may be signal lengths have the full length.

    Return None if the model has no such inputs, does not run, or its loss does not change there.
    """
    if case.drawn is None or not lengths_in(case.described):
        return None
    feeds, outputs = case.feeds, case.outputs
    try:
        found = _elsewhere(case, lengths=True)
    except (OverLimit, MemoryError, _Refuted):
        raise
    except Exception:  # the executors' exceptions share no base class
        found = None
    if found is None or found.detail == STILL:
        case.feeds, case.outputs = feeds, outputs
        return None
    return found


def _elsewhere(case: ProofCase, lengths: bool = False) -> CheckOutcome:
    """Check the gradients at another point, and move each entry in proportion to its size.

    At the given point, a correct gradient can disagree with slopes:

    - A value is so near to a kink that float32 and float64 are on different sides.
    - A mask hides a whole row: adding -3e38 rounds its values away.
    - A scale is near zero, and the loss is constant only for steps shorter than any that is measured.
    - Weights that are initialized to zero put every value on a kink.

    With other weights, no masks and proportional steps none of this occurs, and a wrong rule still fails.
    """
    if case.drawn is not None:
        drawn = random_feeds(case.described, case.rng, case.drawn, masked=False, lengths=lengths)
        case.feeds = {**case.feeds, **drawn, **case.data}
    here = {**case.described.weights, **case.feeds}
    case.feeds = {**case.feeds, **{name: off_zero(here[name], case.rng) for name in case.roles.gradients}}
    case.outputs = case.run(case.feeds)
    return _judged(case, _point(case, by_entry=True))


def off_zero(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an array with its entries moved.

    If all entries were close to zero, they are set to values clearly above or below it.
    """
    if np.max(np.abs(x), initial=0) > ELSEWHERE:
        return moved(x, rng, ELSEWHERE)
    signs = np.where(x == 0, rng.choice([-1.0, 1.0], x.shape), np.sign(np.asarray(x, np.float64)))
    return np.asarray(signs * ELSEWHERE * (1 + rng.random(x.shape)), x.dtype)


def _in_double(case: ProofCase) -> CheckOutcome:
    """Check the gradients that the same graph computes in float64, in case float32 kernels are inaccurate.

    If neither the float32 nor the float64 gradients match the slopes, the outcome names the wrong ones.
    """
    return _compared_in_double(case, _point(case))


def _compared_in_double(case: ProofCase, point: Point) -> CheckOutcome:
    """Check the gradients in float64; if they are correct, compare the float32 gradients with them."""
    try:
        loss = point.loss if point.loss.exact else LossFunction(case.described, case.feeds, exact=True)
        exact = _gradients(case, DoubleExecutor(case.described.model).on(case.feeds))
    except Exception:  # an operator has no float64 kernel; the executors' exceptions share no base class
        return _named(case, Judge(point.loss, point.claims, case.rng))
    case.measured_by, case.exact = loss.name, loss.exact
    found = _named(case, Judge(loss, Claims(loss.point, exact, case.rng), case.rng))
    if found.status != "passed":
        return found
    least = FAITHFUL[narrowest(case.described.model)]
    delivered = in_single(point, exact, found, loss.value, least)
    if (
        delivered.status == "skipped" and NEARBY_POINTS[case.is_costly] < NEARBY_POINTS[False]
    ):  # one nearby point may underestimate the noise
        point.claims.compare(_gradients(case, run_nearby(case)))
        delivered = in_single(point, exact, found, loss.value, least)
    return delivered


def in_single(point: Point, exact: Arrays, found: CheckOutcome, value: float, least: float) -> CheckOutcome:
    """Compare the gradients of the model in its own precision with float64 gradients that have passed their check.

    Args:
        point: the point, with the gradients in the model's own precision.
        exact: the gradients in float64.
        found: the outcome for the gradients in float64, which is 'passed'.
        value: the loss in float64.
        least: differences below this fraction of the largest gradient count as rounding.
    """
    claims = point.claims
    apart = {name: distance(claims.arrays[name], exact[name]) for name in exact}
    largest = max(size for _, size in apart.values())
    worst = float(np.max([farthest for farthest, _ in apart.values()])) / (largest or 1.0)
    noise = max(map(claims.largest_noise, claims.arrays)) / (largest or 1.0)
    kernels = f"onnxruntime's float32 kernels deviate by {worst:.1e}"
    if noise > KERNELS / 10:
        kernels += f", and a change in the last digits of these data changes the gradients by {noise:.1e}"
    if noise > MAX_NOISE or KERNELS < worst <= 10 * noise:
        return skipped(f"correct in float64, but dominated by rounding errors in float32 on these data: {kernels}")
    others = [  # small gradients that are off by more than their noise
        name
        for name, (farthest, size) in apart.items()
        if farthest > max(KERNELS * size, least * largest, 10 * claims.largest_noise(name))
    ]
    if worst <= KERNELS and others:
        return skipped(f"correct in float64, but the gradients of {listed(others)} differ in float32: {kernels}")
    if worst <= KERNELS:
        return replace(found, detail=f"{found.detail}; in float64: {kernels}")
    if not point.loss.exact:
        losses = f"{point.loss.value:.6g}, but {value:.6g} in float64"
        return skipped(f"correct in float64, but not measurable in float32: the loss is {losses}; {kernels}")
    return CheckOutcome("failed", f"correct in float64, but {kernels}")


def _named(case: ProofCase, judge: Judge) -> CheckOutcome:
    """Check the gradients, and return the outcome with a text that names the wrong gradients."""
    return in_words(judge, judge.judge(), case.roles.partial, named=True)
