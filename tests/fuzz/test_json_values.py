"""Changes in what JSON held leave what they are drawn from as it is."""

from __future__ import annotations

from copy import deepcopy
from random import Random

from tests.fuzz.json_values import VALUES, change, text_of


def test_many_changes_of_one_value_are_json() -> None:
    before = repr(VALUES)
    for seed in range(300):
        rng = Random(seed)
        value = deepcopy({"a": [1, [2, 3]], "b": {"c": [[]]}})
        for _ in range(8):
            if value:
                change(value, rng)
        text_of(value)
    assert repr(VALUES) == before
