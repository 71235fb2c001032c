"""Whether gradients are what slopes of the loss say: looked at here, then elsewhere, then in float64."""

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
    """Whether the gradients are what differences of the loss say."""
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
    """How many numbers the gradients are of."""
    return sum(case.outputs[output].size for output in case.roles.gradients.values())


def varies(case: Case) -> bool:
    """Return True if operators draw random numbers, and two runs on the same data differ."""
    if not any(node.op_type in RANDOM for node in with_bodies(case.described.model.graph.node)):
        return False
    again, names = case.run(case.feeds), (case.roles.loss, *case.roles.gradients.values())
    return not all(np.array_equal(again[name], case.outputs[name], equal_nan=True) for name in names)


class _Refuted(Exception):
    """Refuted before slopes are looked at: onnxruntime computes another loss in the training model than in its forward
    part alone, or a gradient is of another shape than its tensor."""


class FailsNearby(Exception):
    """The model does not run on floats that differ in their last digits, as where one of them is a size."""


def run_nearby(case: Case) -> Arrays:
    """The outputs where floats, those of weights included, differ in their last digits.

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
    """What is known where a case is.

    Attributes:
        loss: the loss as a function.
        claims: the gradients that onnxruntime gives, and by how much they are other at points that their precision
            can't tell from this one.
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
    """Return the loss among outputs, as often as it counts."""
    factors = (float(case.feeds[name]) for name, role in case.roles.inputs.items() if role == "loss gradient")
    return math.prod(factors) * float(outputs[case.roles.loss])


def _gradients(case: Case, outputs: Arrays) -> Arrays:
    """The gradients among outputs, but for those that leave out paths; in float32 at least."""
    whole = {n: output for n, output in case.roles.gradients.items() if n not in case.roles.partial}
    return {name: wide(outputs[output]) for name, output in whole.items()}


def wide(x: np.ndarray) -> np.ndarray:
    """An array in which numpy computes with its floats, and a difference of two that are alike is exact."""
    return x if x.dtype == np.float64 else np.asarray(x, np.float32)


def _here(case: Case) -> Found:
    """The gradients judged where the case is, if that is not on a kink, where wrong ones would pass."""
    point = _point(case)
    judge = Judge(point.loss, point.claims, case.rng)
    if point.loss.exact and judge.drowned():
        return _compared_in_double(case, point)
    judged = judge.judge()
    if judged.kinked and point.loss.exact and not judged.refuted:
        return Found("skipped", "the weights are on a kink, where any slope between two is a derivative")
    return in_words(judge, judged, case.roles.partial)


def _with_lengths(case: Case) -> Found | None:
    """Return the judgement elsewhere with signals of full length; None if the model has no lengths, or does not run."""
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
    """The judgement at another point, with steps in proportion to each entry.

    A right gradient can differ: a value lies so near to a kink that float32 and float64 see it on different sides; a
    row of an attention mask hides everything, so that adding -3e38 rounds away what has a derivative; a scale near
    zero makes a plateau, which any step leaves; or weights that begin at zero put everything on a kink. None of this is
    met again among other weights, without masks and with steps in proportion; a wrong rule is.
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
    """An array whose entries are other ones: off zero, on either side of it, where all of them were next to it."""
    if np.max(np.abs(x), initial=0) > ELSEWHERE:
        return moved(x, rng, ELSEWHERE)
    signs = np.where(x == 0, rng.choice([-1.0, 1.0], x.shape), np.sign(np.asarray(x, np.float64)))
    return np.asarray(signs * ELSEWHERE * (1 + rng.random(x.shape)), x.dtype)


def _in_double(case: Case) -> Found:
    """The gradients that the same graph gives in float64, where onnxruntime's float32 kernels are only near to them;
    where neither agrees with the slopes, what is wrong is named."""
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
    """What the delivered gradients are worth, where those in float64 are right.

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
    """The loss in float64, though it is another than onnxruntime's in float32; None where it can't be had."""
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
    """What a judge says, in words; where gradients are wrong, also which, if they are to be named."""
    return in_words(judge, judge.judge(), case.roles.partial, named)
