"""Judge gradients of a function whose true gradients are known by its formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.verification.gradients.directions import Claims
from onnxgrad_cli.verification.gradients.judgement import Judge, Judgement, distance, off
from onnxgrad_cli.verification.gradients.loss_function import ScalarFunction

NAMES = ("a", "b", "c", "d")


def judge_of(factors: dict[str, float], noise: float | None = None) -> Judge:
    """Return a judge of the gradients of sum(x**3), each multiplied by its factor.

    Args:
        factors: by tensor, 1.0 by default.
        noise: how much larger the gradients are at a second point, relative to them.
    """
    rng = np.random.default_rng(0)
    point = {name: rng.uniform(0.5, 1.5, (3, 5)) for name in NAMES}

    def at(moved: Arrays) -> float:
        return float(sum(np.sum(x**3) for x in {**point, **moved}.values()))

    loss = ScalarFunction(at, point, True, cast(Any, SimpleNamespace(name="numpy")))
    claims = Claims(point, {name: factors.get(name, 1.0) * 3 * x**2 for name, x in point.items()}, rng)
    if noise is not None:
        claims.compare({name: (1 + noise) * claim for name, claim in claims.arrays.items()})
    return Judge(loss, claims, rng)


def test_right_gradients_are_seen_in_two_directions() -> None:
    found = judge_of({}).judge()
    assert found.refuted == [] and found.still == [] and not found.kinked
    assert found.directions == 2
    assert found.error < 1e-5
    assert found.visible.keys() == set(NAMES) and max(found.visible.values()) < 0.01


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.02])
def test_wrong_gradients_are_refuted_and_named(factor: float) -> None:
    judge = judge_of({"b": factor, "d": factor})
    found = judge.judge()
    assert found.refuted == list(NAMES)
    wrong = judge.wrong_among(found.refuted)
    assert wrong.keys() == {"b", "d"}
    assert all(error > 0.01 for error in wrong.values())


@pytest.mark.parametrize(("noise", "drowned"), [(1.0, True), (0.05, True), (1e-3, False)])
def test_noise_hides_faults_of_a_fifth(noise: float, drowned: bool) -> None:
    assert judge_of({}, noise).drowned() == drowned


def test_the_fault_that_could_hide_is_relative_to_the_largest_gradient() -> None:
    judge = judge_of({"a": 1000.0, "b": 0.1, "c": 0.1, "d": 0.1})
    found = Judgement(visible={"a": 0.5, "b": 0.5})
    assert judge.could_hide(found, "a") == pytest.approx(0.5)
    assert judge.could_hide(found, "b") == pytest.approx(0.5e-4, rel=0.5)


def test_infinities_that_are_the_same_are_not_apart() -> None:
    infinite = np.array([np.inf, -np.inf, np.nan])
    assert distance(infinite, infinite) == (0.0, 0.0)
    assert off(infinite, infinite) == 0.0
    assert off(infinite, -infinite) == np.inf
    assert distance(np.empty(0), np.empty(0)) == (0.0, 0.0)


def test_truth_values_that_differ_are_infinitely_far_apart() -> None:
    same, other = np.array([True, False]), np.array([True, True])
    assert off(same, same) == 0 and off(same, other) == np.inf


def test_a_distance_is_relative_to_the_least_size_at_least() -> None:
    assert off(np.array([2.0]), np.array([1.0]), 4.0) == 0.25
    assert off(np.array([2.0]), np.array([-8.0]), 4.0) == 1.25
    assert distance(np.array(["a"]), np.array(["a"])) == (0.0, 1.0)
    assert distance(np.array(["a"]), np.array(["b"])) == (np.inf, 1.0)
