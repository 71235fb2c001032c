"""Figures, sizes, times and lists of names as text."""

from __future__ import annotations

import pytest

from onnxgrad_cli.report.blocks import Name
from onnxgrad_cli.report.formatting import figure, names, percent, quoted, scaled, seconds, several, shape


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-6, "3.000e-06"), (0.69314, "0.6931"), (1, "1.000"), (999.96, "1,000"), (12345.6, "12,346"), (0, "0.000"),
     (-2.5, "-2.500"), (float("nan"), "nan"), (3e12, "3.000e+12")],
)  # fmt: skip
def test_figures_are_significant(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (45_600, "45.6 kB"), (999_499, "999 kB"), (999_600, "1.00 MB"),
     (1.234e9, "1.23 GB"), (5e12, "5.00 TB"), (2e18, "2.00e+03 PB")],
)  # fmt: skip
def test_sizes_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert scaled(value, "B") == text


def test_counts_times_shares_and_shapes() -> None:
    assert [several(count, "node") for count in (0, 1, 2, 1000)] == ["0 nodes", "1 node", "2 nodes", "1,000 nodes"]
    assert [seconds(value) for value in (0.0123, 0.9999, 1, 4.567)] == ["12.3 ms", "999.9 ms", "1.00 s", "4.57 s"]
    assert [percent(share) for share in (0, 0.0001, 0.0005, 0.123, 1)] == [
        "0.0 %", "< 0.1 %", "0.1 %", "12.3 %", "100.0 %"
    ]  # fmt: skip
    assert [shape(dims) for dims in (None, (), ("n", 3))] == ["any rank", "scalar", "n × 3"]


def test_names_are_marked() -> None:
    assert names(["a", "b"]) == (Name("a"), ", ", Name("b"))
    assert names(list("abcdefg"))[-1] == " and 2 more" and len([n for n in names(list("abcdefg")) if n == ", "]) == 4
    found = quoted("'w1' isn't 'a b' or ''")
    assert found == (Name("w1"), " isn't ", Name("a b"), " or ''")
    assert [isinstance(part, Name) for part in found] == [True, False, True, False]
