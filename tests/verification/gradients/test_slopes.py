"""What a measured slope is worth: the true one lies within its doubt."""

import numpy as np

from onnxgrad_cli.verification.gradients.slopes import double_steps, slope

EPS = float(np.finfo(np.float64).eps)


def test_the_rounding_of_the_loss_is_in_doubt() -> None:
    """Where a slope is small beside the loss, two differences may agree by chance, and both be wrong."""
    rng = np.random.default_rng(0)
    for here in rng.uniform(0.1, 1, 200):
        true = 1e-8 * rng.uniform(0.5, 2)
        steps = double_steps(here, true)
        found = slope(lambda step, here=here, true=true: here + true * step, here, steps, 1e-5 * true, EPS)
        assert abs(found.value - true) <= found.doubt
        assert found.doubt <= 5e-2 * true


def test_a_slope_that_is_large_is_measured_in_few_steps() -> None:
    taken = []

    def loss(step: float) -> float:
        taken.append(step)
        return float(np.exp(step))

    found = slope(loss, 1.0, double_steps(1.0, 1.0), 1e-5, EPS)
    assert abs(found.value - 1) <= found.doubt <= 1e-6
    assert len(taken) == 2


def test_where_the_sides_differ_more_steps_are_taken() -> None:
    """At the ends of the first step lies a kink, so that the central difference is no slope of the loss here."""
    taken = []

    def loss(step: float) -> float:
        taken.append(step)
        return 1.0 + step + max(step - 2e-9, 0.0)

    found = slope(loss, 1.0, double_steps(1.0, 1.0), 1e-5, EPS)
    assert abs(found.value - 1) <= found.doubt
    assert len(taken) == 10
