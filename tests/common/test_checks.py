"""What users and files hand in is checked before it is used."""

from __future__ import annotations

import pytest

from onnxgrad_cli.common.checks import number_in


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1), ("9" * 19, None), ("9" * 5000, None), ("²", None), ("\u0663", None),
     ("-1", None), ("1\n", None), ("", None)],
)  # fmt: skip
def test_only_digits_that_64_bits_hold_are_a_number(text: str, number: int | None) -> None:
    assert number_in(text) == number
