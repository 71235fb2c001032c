"""Sizes of values: found behind operators, chosen where nobody gave them, or counted as 1."""

from __future__ import annotations

from tests.report.test_build_report import f32, forward_cost


def test_sizes_are_found_behind_operators() -> None:
    """The convolution's output height has no symbol of the inputs': it follows from the size that is given."""
    text = "g (float[n, 1, h, w] x) => (float[n, 2, a, b] y) { c = Conv(x, k) y = Relu(c) }"
    found = forward_cost(text, {"n": 2, "h": 10, "w": 12}, k=f32(2, 1, 3, 3))
    out = 2 * 2 * 8 * 10
    assert (found.flops_forward, found.at_run_time) == (out * 18 + out, 0)
    alone = forward_cost(text.replace("h, w", "10, 12"), k=f32(2, 1, 3, 3))
    assert (alone.assumed, alone.flops_forward) == ({"n": 1}, (out * 18 + out) // 2)


def test_a_size_that_nobody_gave_is_one_that_the_network_takes() -> None:
    """A kernel of 20 on one sample would make an output of -18, and a negative count."""
    text = "g (float[batch, 1, samples] x) => (float[batch, 2, a] y) { c = Conv<strides = [4]>(x, k) y = Relu(c) }"
    found = forward_cost(text, k=f32(2, 1, 20))
    out = 2 * ((64 - 20) // 4 + 1)
    assert (found.assumed, found.flops_forward) == ({"batch": 1, "samples": 64}, out * 40 + out)


def test_what_is_known_at_run_time_only_is_counted_as_one_and_said() -> None:
    text = "g (float[n] x) => (float[1, m] y) { i = NonZero(x) g = Gather(x, i) y = Exp(g) }"
    found = forward_cost(text, {"n": 5})
    assert (found.at_run_time, found.flops_forward) == (2, 1)
