"""JSON that every reader takes, and JSON from another program that has the annotated types or is refused."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from onnxgrad_cli.common.strict_json import decoded, dumps
from onnxgrad_cli.metadata import Adapter, Derived, IntegerWeight, Quantized, Slot

WEIGHT = IntegerWeight("w", "q", "s", factors=("a", "b"), times=2.0)
SAID = {"weights": [{**asdict(WEIGHT), "factors": ["a", "b"]}], "scales": ["s"], "copies": {"c": "s"}}


def test_what_json_has_no_word_for() -> None:
    value = {"a": [math.nan, -math.inf, 1.5], b"n\xff": (b"\xc3\xa9", None), "\x1b": True}
    text = dumps(value)
    assert json.loads(text) == {"a": [None, None, 1.5], "n\\xff": ["é", None], "\x1b": True}
    assert "\x1b" not in text


def test_what_was_written_comes_back() -> None:
    assert decoded(Quantized, SAID) == Quantized((WEIGHT,), ("s",), {"c": "s"})
    assert decoded(Slot, {"of": "w", "kind": "m", "dtype": "float32", "shape": [2, 3], "initial": 0}).initial == 0.0
    derived = Derived("vjp", ("y",), ("x",), (), ("d",), "keep", per_sample=("x",))
    assert decoded(Derived, {**asdict(derived), **{n: ["y"] for n in ("of",)}, "wrt": ["x"], "inputs": [],
                             "outputs": ["d"], "partial": [], "inner": [], "per_sample": ["x"], "weights": [],
                             "kinks": []}) == derived  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Quantized, [], r"it can't be \[\]"),
        (Quantized, {**SAID, "more": 1}, "it has an unknown entry 'more'"),
        (Quantized, {**SAID, "scales": "s"}, r"it.scales can't be 's'"),
        (Quantized, {**SAID, "copies": {"c": []}}, r"it.copies\['c'\] can't be \[\]"),
        (Quantized, {**SAID, "weights": [{"weight": "w"}]}, r"it.weights\[0\] has no 'tensor'"),
        (Quantized, {**SAID, "weights": [{**asdict(WEIGHT), "axis": True}]}, "axis can't be True"),
        (float, 10**400, "it can't be 1000"),
        (float, float("nan"), "it can't be nan"),
        (int, 1.0, "it can't be 1.0"),
        (tuple[str, ...] | None, 3, "it can't be 3"),
        (Adapter, {"weight": "w", "a": "a", "b": "b", "rank": 0, "alpha": 1.0}, "rank 0 and scaling"),
    ],
)
def test_what_is_something_else(kind: Any, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decoded(kind, value)
