"""Tables of frequencies before Sin and Cos are constants."""

from __future__ import annotations

import pytest

from tests.passes.parameters.test_constants import named, roles
from tests.passes.parameters.test_select import VIEWS, behind, training

FREQUENCIES = named("a table of frequencies for Sin or Cos")


GEOMETRIC, EVEN, LEARNED = "1, 0.1, 0.01", "1.5, 3, 4.5", "1, 0.3, 0.2"


@pytest.mark.parametrize("values", [GEOMETRIC, EVEN, LEARNED])
@pytest.mark.parametrize(
    ("nodes", "turns"),
    [
        ("p = Mul(x, f) y = Sin(p)", 1),
        ("p = Div(x, f) y = Cos(p)", 1),
        ("p = Mul(x, f) r = Relu(p) y = Sin(p)", 1),
        ("p = Mul(x, f) t = Transpose(p) r = Relu(t) y = Sin(p)", 1),
        ("p = Mul(x, f) q = Sub(p, s) y = Sin(q)", 1),
        ("t = Transpose(f) p = Mul(x, t) a = Sin(p) b = Cos(p) y = Concat<axis = 0>(a, b)", 2),
        ("p = Mul(x, f) a = Sin(p) b = Cos(p) y = Concat<axis = 0>(a, b)", 2),
        ("p = Mul(x, f) c = Concat<axis = 1>(x, p) a = Sin(c) b = Cos(c) y = Concat<axis = 0>(a, b)", 2),
        ("h = MatMul(x, square) p = Mul(h, f) a = Sin(p) b = Cos(p) y = Concat<axis = 0>(a, b)", 1),
        ("p = Mul(x, f) q = Add(p, w) a = Sin(q) b = Cos(q) y = Concat<axis = 0>(a, b)", 0),
        ("y = Sin(f)", 0),
        ("p = Add(x, f) y = Sin(p)", 0),
        ("p = Mul(x, f) y = Tan(p)", 0),
        ("p = Mul(x, f) e = Exp(p) y = Sin(e)", 0),
        ("y = Mul(x, f)", 0),
    ],
)
def test_frequencies_turn_both_ways(nodes: str, turns: int, values: str) -> None:
    """A learned factor may stand before a sine too, or before both behind a layer.

    `turns` is how many of Sin and Cos the products reach, of what no layer has made if both.
    """
    found = roles(nodes, f=f"float[3] f = {{{values}}}")
    assert found.reason("f") == (FREQUENCIES if turns == 2 else "")
    assert ("f" in found.doubts) == (turns == 2 and values == LEARNED)


def test_random_frequencies_of_an_input_are_told_of() -> None:
    nodes = "p = Mul(x, f) a = Sin(p) b = Cos(p) y = Concat<axis = 0>(a, b)"
    found = roles(nodes, f="float[5] f = {0.3, -1, 2.2, 0.7, 0.1}")
    assert found.reason("f") == FREQUENCIES
    assert "`train='f'`" in found.doubts["f"]


def test_frequencies_before_a_sine_are_a_table() -> None:
    found = training("""
    g (float[N, 1] t) => (float[N, 2] y) <float[1, 3] f = {1, 0.1, 0.01}, float[3, 2] w = {1, 2, 3, 4, 5, 7}>
    { p = Mul(t, f) a = Sin(p) b = Cos(p) s = Add(a, b) y = MatMul(s, w) }
    """)
    assert found.trained == ["w"]
    assert "frequencies" in found.not_trained["f"]


@pytest.mark.parametrize("view", VIEWS)
def test_frequencies_before_a_view_of_a_sine_are_a_table(view: str) -> None:
    assert "frequencies" in training(behind([view])).not_trained["f"]


@pytest.mark.parametrize("hops", [0, 1, 4, 9])
def test_frequencies_lie_any_number_of_views_before_a_sine(hops: int) -> None:
    assert "frequencies" in training(behind((["Mul", "Transpose"] * 5)[:hops])).not_trained["f"]
