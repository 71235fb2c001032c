"""Errors: their codes and arguments, and the hints for names that are misspelt."""

from __future__ import annotations

import pytest

from onnxgrad_cli import errors
from onnxgrad_cli.errors import CODES, InternalError, OnnxgradError, Refusal, UnsupportedError, UsageError, suggest

FACTORIES = [
    (errors.unreadable, "unreadable_file", 1),
    (errors.unwritable, "unwritable_file", 1),
    (errors.missing_file, "missing_file", 1),
    (errors.unknown_name, "unknown_name", 2),
    (errors.wrong_value, "wrong_value", 2),
    (UsageError, "usage", 2),
    (OnnxgradError, "failed", 1),
    (InternalError, "internal", 1),
    (UnsupportedError, "refused", 3),
    (errors.CheckFailed, "check_failed", 4),
]


@pytest.mark.parametrize(("factory", "code", "exit_code"), FACTORIES)
def test_each_kind_has_its_codes(factory: type[OnnxgradError], code: str, exit_code: int) -> None:
    error = factory("x")
    assert (error.code, error.exit_code) == (code, exit_code) and code in CODES


@pytest.mark.parametrize(
    ("message", "argument"),
    [
        ("`train`: no", "train"),
        ("no `mode='Train'` with `lora`", "mode"),
        ("no argument in 'quotes'", None),
        ("`Not` one", None),
        ("`yield_=False` is", "yield_"),
    ],
)
def test_the_argument_is_the_first_one_in_the_message(message: str, argument: str | None) -> None:
    assert UsageError(message).argument == argument


def test_hints_and_details_are_shown() -> None:
    error = OnnxgradError("a", "b", ["c", "d"])
    assert str(error) == "a\n  c\n  d" and error.__notes__ == ["hint: b"] and error.hint == "b"


def test_refusals_are_details() -> None:
    error = UnsupportedError("a", [Refusal("n", "Op", "why")], details=["first"])
    assert error.details == ("first", "n (Op): why")


MANY = [f"layer{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("wieght", ["bias", "weight"], "did you mean weight?"),
        ("WEIGHT", ["weights", "Weight"], "did you mean Weight?"),
        ("fc1.wait", ["fc1.weight", "fc1.bias"], "did you mean fc1.weight or fc1.bias?"),
        ("q", [], "the model has no weights"),
        ("q", ["fc1", "fc2"], "weights: fc1, fc2"),
        ("q", MANY, f"weights: {', '.join(MANY[:8])}, ... (12 in all)"),
    ],
)
def test_hints_for_names(name: str, known: list[str], hint: str) -> None:
    assert suggest(name, known, "weights") == hint
    shown = suggest(name, known, "weights", repr)
    assert all(repr(each) in shown for each in known if each in hint.replace(",", "").replace("?", "").split())
