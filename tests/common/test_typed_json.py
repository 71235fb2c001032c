"""JSON of a stranger is what an annotation says, or a ValueError that says where it is not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from onnxgrad_cli.common.typed_json import decoded
from onnxgrad_cli.metadata import Adapter, Derived, IntegerWeight, Quantized, Slot

WEIGHT = IntegerWeight("w", "q", "s", factors=("a", "b"), times=2.0)
SAID = {"weights": [{**asdict(WEIGHT), "factors": ["a", "b"]}], "scales": ["s"], "copies": {"c": "s"}}


def test_what_was_written_comes_back() -> None:
    assert decoded(Quantized, SAID) == Quantized((WEIGHT,), ("s",), {"c": "s"})
    assert decoded(Slot, {"of": "w", "kind": "m", "dtype": "float32", "shape": [2, 3], "initial": 0}).initial == 0.0
    derived = Derived("vjp", ("y",), ("x",), (), ("d",), "keep", per_sample=("x",))
    assert decoded(Derived, {**asdict(derived), **{n: ["y"] for n in ("of",)}, "wrt": ["x"], "inputs": [],
                             "outputs": ["d"], "partial": [], "inner": [], "per_sample": ["x"]}) == derived  # fmt: skip


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
