"""Check gradients against slopes, which are finite differences of the loss.

The check looks at the given point, then at another point, then at the model in float64, until one look decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.limits import OverLimit
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.randomness import RANDOM
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.verification.case import Case, Found
from onnxgrad_cli.verification.claims import Claims
from onnxgrad_cli.verification.feeds import lengths_in, random_feeds
from onnxgrad_cli.verification.findings import STILL, hiding, in_words
from onnxgrad_cli.verification.judgement import Judge, distance
from onnxgrad_cli.verification.loss_function import (
    FAITHFUL,
    LossFunction,
    ScalarFunction,
    loss_function,
    moved,
    narrowest,
    nearby,
)

ELSEWHERE = 1e-2
"""How far the second look moves each weight, relative to it; and one that is nearer to zero than that, in all."""

KERNELS = 5e-2
"""How far onnxruntime's float32 gradients may be from those of the same graph in float64, relative to the largest."""

NOISY = 0.1
"""Rounding noise of gradients in float32, relative to the largest, from which they can't be held against float64."""

FEW = 100
"""Numbers up to which wrong gradients may agree by chance with slopes that are measured in float32, where a fault of a
fifth is hidden: they are looked at twice."""

NEAR = {True: 1, False: 2}
"""Points beside the one that is looked at, from which its precision can't tell it, in costly models and in others."""


def agrees_with_slopes(case: Case) -> Found:
    """Judge whether the gradients match finite differences of the loss."""
    if case.roles.estimated:
        return Found(
            "skipped", "they are straight-through estimates: the derivative of rounding is zero or does not exist"
        )
    if varies(case):
        return Found("skipped", "the model draws random numbers, so the losses of two runs differ")
    if not case.roles.gradients:
        return Found("skipped", "no output is a gradient")
    if set(case.roles.gradients) <= set(case.roles.partial):
        return Found("skipped", "every gradient leaves out paths that are declared to be stopped")
    passed = 0
    for look in (_here, _elsewhere, _in_double):
        try:
            found = look(case)
            if look is _elsewhere and found.detail == STILL:  # all units of a layer may be off, or all signals masked
                found = _with_lengths(case) or look(case)
        except _Refuted as error:
            return Found("failed", str(error))
        except FailsNearby as error:
            return Found("skipped", str(error))
        passed += found.status == "passed" and not found.hidden
        sure = case.exact or _numbers(case) > FEW or (look is _elsewhere and passed == 2)
        if found.status == "passed" and sure and not found.hidden:
            return found
    if found.hidden:
        return Found("skipped", hiding(found))
    if passed:
        return Found("skipped", f"right on some data, as far as float32 tells, and not on others: {found.detail}")
    return found


def _numbers(case: Case) -> int:
    """Count the entries of all tensors that have gradients."""
    return sum(case.outputs[output].size for output in case.roles.gradients.values())


def varies(case: Case) -> bool:
    """Return True if operators draw random numbers, and two runs on the same data differ."""
    if not any(node.op_type in RANDOM for node in with_bodies(case.described.model.graph.node)):
        return False
    again, names = case.run(case.feeds), (case.roles.loss, *case.roles.gradients.values())
    return not all(np.array_equal(again[name], case.outputs[name], equal_nan=True) for name in names)


class _Refuted(Exception):
    """Gradients that are wrong before any slope is measured.

    Either the training model's loss differs from its forward part's, or a gradient has another shape than its tensor.
    """


class FailsNearby(Exception):
    """The model fails if the last digits of floats change, for example because a float is a size."""


def run_nearby(case: Case) -> Arrays:
    """Run the model with the last digits of all floats changed, weights included, and return the outputs.

    Raises:
        FailsNearby: the model does not run there.
    """
    try:
        return case.run(nearby(case.described, case.feeds, case.rng))
    except (OverLimit, MemoryError):
        raise
    except Exception as error:  # the executors' exceptions share no base class
        raise FailsNearby(f"on floats that differ in their last digits it fails: {str(error)[:300]}") from error


@dataclass(frozen=True)
class Point:
    """The loss and the gradients at the point of a case.

    Attributes:
        loss: the loss as a function.
        claims: onnxruntime's gradients, and how much they vary between points that float precision can't tell apart.
    """

    loss: ScalarFunction
    claims: Claims


def _point(case: Case, by_entry: bool = False) -> Point:
    sizes = np.shape(case.outputs[case.roles.loss])
    if math.prod(sizes) != 1:
        raise _Refuted(f"the loss '{case.roles.loss}' is {list(sizes)}, and a loss is one number")
    weights = case.described.weights
    values = {**weights, **case.feeds}
    gradients = _gradients(case, case.outputs)
    for name, claim in gradients.items():
        shape = values[name].shape
        if claim.shape != shape and (claim.size or math.prod(shape)):  # of an empty past the other sizes say nothing
            raise _Refuted(f"the gradient of '{name}' is {list(claim.shape)}, and the tensor {list(shape)}")
    claims = Claims(values, gradients, case.rng, by_entry)
    value, others = _loss(case, case.outputs), []
    for _ in range(NEAR[case.is_costly]):
        near = run_nearby(case)
        others.append(_loss(case, near))
        claims.compare(_gradients(case, near))
        del near  # in large models, as much memory as all weights
    allowed = FAITHFUL[narrowest(case.described.model)] * max(abs(value), 1e-6) + 10 * max(
        abs(other - value) for other in others
    )
    loss = loss_function(case.described, case.feeds, value, allowed)
    if abs(loss.value - value) > allowed:
        raise _Refuted(
            f"the loss is {value:.6g}, and {loss.value:.6g} by its forward part alone: a fault of onnxruntime"
        )
    case.measured_by, case.exact = loss.name, loss.exact
    return Point(loss, claims)


def _loss(case: Case, outputs: Arrays) -> float:
    """Return the loss from the outputs, multiplied by the gradients of the loss that are fed."""
    factors = (float(case.feeds[name]) for name, role in case.roles.inputs.items() if role == "loss gradient")
    return math.prod(factors) * float(outputs[case.roles.loss])


def _gradients(case: Case, outputs: Arrays) -> Arrays:
    """Return the gradients from the outputs, in float32 or wider, without gradients that leave out paths."""
    whole = {n: output for n, output in case.roles.gradients.items() if n not in case.roles.partial}
    return {name: wide(outputs[output]) for name, output in whole.items()}


def wide(x: np.ndarray) -> np.ndarray:
    """Convert an array of half precision to float32, in which differences of close values are exact."""
    return x if x.dtype == np.float64 else np.asarray(x, np.float32)


def _here(case: Case) -> Found:
    """Judge the gradients at the given point, unless it is on a kink, where wrong gradients would pass."""
    point = _point(case)
    judge = Judge(point.loss, point.claims, case.rng)
    if point.loss.exact and judge.drowned():
        return _compared_in_double(case, point)
    judged = judge.judge()
    if judged.kinked and point.loss.exact and not judged.refuted:
        return Found("skipped", "the weights are on a kink, where any slope between two is a derivative")
    return in_words(judge, judged, case.roles.partial)


def _with_lengths(case: Case) -> Found | None:
    """Judge at another point with signals of full length; None if the model has no lengths or does not run."""
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


def _elsewhere(case: Case, lengths: bool = False) -> Found:
    """Judge at another point, with steps in proportion to each entry.

    A right gradient can disagree with slopes:

    - A value is so near to a kink that float32 and float64 see different sides.
    - A mask hides a whole row: adding -3e38 rounds its values away.
    - A scale near zero makes a plateau that every step leaves.
    - Weights that begin at zero put everything on a kink.

    With other weights, no masks and proportional steps all of these vanish, and a wrong rule still fails.
    """
    if case.drawn is not None:
        drawn = random_feeds(case.described, case.rng, case.drawn, masked=False, lengths=lengths)
        case.feeds = {**case.feeds, **drawn, **case.data}
    here = {**case.described.weights, **case.feeds}
    case.feeds = {**case.feeds, **{name: off_zero(here[name], case.rng) for name in case.roles.gradients}}
    case.outputs = case.run(case.feeds)
    point = _point(case, by_entry=True)
    judge = Judge(point.loss, point.claims, case.rng)
    if point.loss.exact and judge.drowned():
        return _compared_in_double(case, point)
    return _told(judge, case)


def off_zero(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Move the entries of an array. If all were close to zero, they get values clearly above and below it."""
    if np.max(np.abs(x), initial=0) > ELSEWHERE:
        return moved(x, rng, ELSEWHERE)
    signs = np.where(x == 0, rng.choice([-1.0, 1.0], x.shape), np.sign(np.asarray(x, np.float64)))
    return np.asarray(signs * ELSEWHERE * (1 + rng.random(x.shape)), x.dtype)


def _in_double(case: Case) -> Found:
    """Judge the same graph in float64, because float32 kernels may only come close to its gradients.

    If neither matches the slopes, the wrong gradients are named.
    """
    return _compared_in_double(case, _point(case))


def _compared_in_double(case: Case, point: Point) -> Found:
    """Judge the gradients in float64, and hold those in float32 against them."""
    loss, exact = point.loss if point.loss.exact else _double_loss(case), _double_gradients(case)
    if loss is None or exact is None:
        return _told(Judge(point.loss, point.claims, case.rng), case, named=True)
    case.measured_by, case.exact = loss.name, loss.exact
    found = _told(Judge(loss, Claims(loss.point, exact, case.rng), case.rng), case, named=True)
    if found.status != "passed":
        return found
    least = FAITHFUL[narrowest(case.described.model)]
    delivered = in_single(point, exact, found, loss.value, least)
    if delivered.status == "skipped" and NEAR[case.is_costly] < NEAR[False]:  # by too few points near
        point.claims.compare(_gradients(case, run_nearby(case)))
        delivered = in_single(point, exact, found, loss.value, least)
    return delivered


def in_single(point: Point, exact: Arrays, found: Found, value: float, least: float) -> Found:
    """Judge the delivered gradients by float64 gradients that are right.

    Args:
        point: where they are from.
        exact: the gradients in float64.
        found: that they are right.
        value: the loss in float64.
        least: the share of the largest gradient that is rounding in any.
    """
    claims = point.claims
    apart = {name: distance(claims.arrays[name], exact[name]) for name in exact}
    largest = max(size for _, size in apart.values())
    worst = float(np.max([farthest for farthest, _ in apart.values()])) / (largest or 1.0)
    noise = max(map(claims.largest_noise, claims.arrays)) / (largest or 1.0)
    kernels = f"onnxruntime's float32 kernels are off by {worst:.1e}"
    if noise > KERNELS / 10:
        kernels += f", and a change in the last digits of these data makes {noise:.1e}"
    if noise > NOISY or KERNELS < worst <= 10 * noise:
        return Found("skipped", f"right in float64, but in float32 they are rounding noise on these data: {kernels}")
    others = []  # gradients that may be small beside others, and are off for themselves by more than they are noisy
    for name, (farthest, size) in apart.items():
        rounding = max(least * largest, 10 * claims.largest_noise(name)) / KERNELS
        if farthest > KERNELS * max(size, rounding):
            others.append(name)
    if worst <= KERNELS and others:
        return Found("skipped", f"right in float64, but what float32 makes of {listed(others)} is another: {kernels}")
    if worst <= KERNELS:
        return replace(found, detail=f"{found.detail}; in float64: {kernels}")
    if not point.loss.exact:
        losses = f"{point.loss.value:.6g}, which is {value:.6g} in float64"
        return Found("skipped", f"right in float64, but not to be measured in float32: the loss is {losses}; {kernels}")
    return Found("failed", f"right in float64, but {kernels}")


def _double_loss(case: Case) -> LossFunction | None:
    """Return the loss in float64, even if it differs from onnxruntime's in float32; None if that is impossible."""
    try:
        return LossFunction(case.described, case.feeds, exact=True)
    except Exception:  # the executors' exceptions share no base class
        return None


def _double_gradients(case: Case) -> Arrays | None:
    """The gradients in float64; None where an operator of the backward part has no such form on either executor."""
    try:
        run = DoubleExecutor(case.described.model)
        return _gradients(case, run(run.widened(case.feeds)))
    except Exception:  # the executors' exceptions share no base class
        return None


def _told(judge: Judge, case: Case, named: bool = False) -> Found:
    """Put a judgement into words; with `named`, also name the wrong gradients."""
    return in_words(judge, judge.judge(), case.roles.partial, named)
