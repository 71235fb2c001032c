"""Options of functions: values are converted by Python's and numpy's rules, and what does not fit is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnxgrad_cli.common.settings import (
    Floats,
    Length,
    Lengths,
    Option,
    declared,
    exactly,
    keyword,
    spelled,
    undocumented,
    value_of,
)
from onnxgrad_cli.errors import OnnxgradError, UsageError
from tests.facts import raises


def every(
    a, *, rate: float = 0.5, steps: int = 1, flag: bool = False, w: Floats = None, n: Length = 1, at: Lengths = ()
):
    """A function with an option of each kind."""


DOCS = dict.fromkeys(("rate", "steps", "flag", "w", "n", "at"), "a description")


def test_keywords_are_options_with_the_kinds_of_their_annotations() -> None:
    options = declared(every, DOCS, "every")
    assert [(option.name, option.kind, option.default) for option in options] == [
        ("rate", "float", 0.5), ("steps", "int", 1), ("flag", "bool", False), ("w", "Floats", None),
        ("n", "Length", 1), ("at", "Lengths", ()),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("float", 2, 2.0),
        ("float", 0.25, 0.25),
        ("int", 3, 3),
        ("int", 3.0, 3),
        ("bool", True, True),
        ("Length", 10, 10.0),
        ("Lengths", "10/20", (10.0, 20.0)),
        ("Lengths", 5, (5.0,)),
        ("Lengths", [1, 2.5], (1.0, 2.5)),
    ],
)
def test_values_that_fit(kind: str, value: object, expected: object) -> None:
    found = Option("x", kind, None, "").convert(value)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("float", value) for value in (True, "1", math.nan, math.inf, None)),
        *(("int", value) for value in (1.5, False, "2")),
        *(("bool", value) for value in (1, 0.0, "true")),
        *(("Length", value) for value in ("x", math.inf)),
        *(("Lengths", value) for value in ("1/x", "1/inf", None, [[1], [2]])),
        *(("Floats", value) for value in ("none.npy", [[1.0]], [math.nan], "x", object())),
    ],
)
def test_values_that_do_not_fit(kind: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OnnxgradError) as caught:
        Option("rate", kind, None, "the hint").convert(value)
    missing = kind == "Floats" and isinstance(value, str)
    assert caught.value.code == ("unreadable_file" if missing else "wrong_value")
    assert "rate" in caught.value.message and (missing or caught.value.hint == "the hint")


def test_numbers_come_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.array([1, 2], np.int16))
    found = Option("w", "Floats", None, "").convert(tmp_path / "w.npy")
    assert found.dtype == np.float64 and found.tolist() == [1.0, 2.0]


def unannotated(a, *, rate=0.5):
    """An option whose kind is that of its default."""


def strange(a, *, name: str = "x"):
    """An option of a kind that there is not."""


def without_default(a, *, rate: float):
    """An option without a default."""


def test_a_default_says_the_kind_of_an_option() -> None:
    assert [(option.name, option.kind) for option in undocumented(unannotated, "it")] == [("rate", "float")]


@pytest.mark.parametrize("function", [strange, without_default])
def test_options_that_are_of_no_kind_or_have_no_default(function: Callable[..., object]) -> None:
    with pytest.raises(UsageError) as caught:
        undocumented(function, "it")
    assert f"'{'name' if function is strange else 'rate'}'" in caught.value.message


@pytest.mark.parametrize(
    ("function", "docs"), [(every, {}), (every, {**DOCS, "more": "x"}), (strange, {"name": "x"}), (every, None)]
)
def test_options_without_a_description(function: Callable[..., object], docs: dict[str, str] | None) -> None:
    with pytest.raises(OnnxgradError) as caught:
        declared(function, docs, "it")
    assert caught.value.code == "failed"


def test_an_option_that_there_is_not() -> None:
    with raises(UsageError, "unknown_name", "rat") as caught:
        exactly(declared(every, DOCS, "every"), {"rat": 1}, "every")
    assert "rate" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", 3), ("-1_0", -10), ("1e-3", 1e-3), (" true ", True), ("False", False), ("3e", "3e"), ("a b", "a b")],
)
def test_a_text_is_a_number_or_a_truth_where_it_can_be(text: str, expected: object) -> None:
    found = value_of(text)
    assert found == expected and type(found) is type(expected)


def test_a_name_with_options() -> None:
    assert spelled("focal") == ("focal", {})
    assert spelled("focal: gamma = 2, label-smoothing=0.1,") == ("focal", {"gamma": 2, "label_smoothing": 0.1})


@pytest.mark.parametrize("text", ["focal:gamma", "focal:gamma=", "focal:=2", "focal:a=1,b"])
def test_a_name_with_options_in_another_form(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        spelled(text)
    assert caught.value.code == "wrong_value" and f"'{text}'" in caught.value.message


def test_settings_are_typed_with_hyphens() -> None:
    assert keyword("weight-decay") == "weight_decay"
    with raises(UsageError, "unknown_name", "weight_decay", "weight-decay"):
        keyword("weight_decay")
