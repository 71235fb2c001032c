"""Directions of claimed gradients: the slopes that claims predict are inner products with the way that tensors move."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad_cli.verification.gradients.directions import DIRECTIONS, PERIOD, SLICE, Claims
from onnxgrad_cli.verification.gradients.judgement import off
from onnxgrad_cli.verification.gradients.loss_function import in_last_digits


@pytest.mark.parametrize("by_entry", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, SLICE + 5), (2 * PERIOD + 7,)])
def test_shares_and_noises_are_inner_products(shape: tuple[int, ...], by_entry: bool) -> None:
    rng = np.random.default_rng(0)
    point, claim, other = ({"w": rng.standard_normal(shape).astype(np.float32)} for _ in range(3))
    claims = Claims(point, claim, rng, by_entry)
    claims.compare(other)
    apart = other["w"].astype(np.float64) - claim["w"]
    for number in range(DIRECTIONS):
        way = claims.direction("w", number, -0.5)
        moved = way.move(1e3, np.empty(shape)) - point["w"]
        assert way.share == pytest.approx(np.sum(claim["w"] * moved) / 1e3, rel=1e-6)
        assert way.noises == pytest.approx(
            [np.sum((other["w"].astype(np.float64) - claim["w"]) * moved) / 1e3], rel=1e-6
        )
        if by_entry:  # an entry moves in proportion to itself
            np.testing.assert_array_equal(way.move(1.0, np.empty(shape))[point["w"] == 0], 0)
    assert claims.largest_noise("w") == pytest.approx(np.max(np.abs(apart)))
    assert claims.noise("w") == pytest.approx(np.sqrt(np.mean(apart**2) / np.mean(claim["w"].astype(np.float64) ** 2)))


def test_directions_differ_and_see_the_claim() -> None:
    """No direction is almost at right angles to the claim."""
    rng = np.random.default_rng(0)
    w, claim = rng.standard_normal((2, 500, 400))
    claims = Claims({"w": w}, {"w": claim}, rng)
    moves = [claims.direction("w", number, 1.0).move(1.0, np.empty(w.shape)) - w for number in range(DIRECTIONS)]
    for i, move in enumerate(moves):
        assert abs(np.sum(claim * move)) > 0.4 * np.linalg.norm(claim) * np.sqrt(np.mean(w**2))
        assert all(abs(np.corrcoef(move.ravel(), other.ravel())[0, 1]) < 0.1 for other in moves[:i])


def test_what_moves_in_the_last_digits_is_near_and_elsewhere() -> None:
    x = np.random.default_rng(0).standard_normal(3 * PERIOD).astype(np.float32)
    near = in_last_digits(x, np.random.default_rng(1))
    assert near.dtype == x.dtype and np.mean(near != x) > 0.3
    np.testing.assert_allclose(near, x, rtol=3e-7)


def test_off_is_relative_to_the_largest_entry() -> None:
    a, b = np.ones((2, 3 * SLICE), np.float32), np.ones((2, 3 * SLICE), np.float32)
    assert off(a, b) == 0
    a[1, -1] = 3
    b[0, 0] = 4
    assert off(a, b) == 0.75
    a[0, 1] = b[0, 1] = np.nan
    a[0, 2] = b[0, 2] = np.inf
    assert off(a, b) == 0.75
    a[0, 3] = np.nan
    assert np.isnan(off(a, b))
