"""The options of an attack."""

from __future__ import annotations

from typing import Any

import pytest

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.options.attack import MAX_STEP, Fooling
from tests.facts import raises


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 3}, ("conflict", "steps", "step_size", "restarts")),
        ({"step_size": 0.1}, ("conflict", "steps", "step_size", "restarts")),
        ({"restarts": 2}, ("conflict", "steps", "step_size", "restarts")),
        ({"method": "pgd", "restarts": 2, "start": False}, ("conflict", "restarts")),
        ({"clip": (1, 0)}, ("wrong_value", "clip")),
        ({"clip": (1, 1)}, ("wrong_value", "clip")),
        ({"clip": (0, 1, 2)}, ("wrong_value", "clip")),
        ({"epsilon": 1e39}, ("wrong_value", "epsilon", "float32")),
        ({"method": "pgd", "step_size": 1e39}, ("wrong_value", "step_size", "float32")),
        ({"epsilon": -0.1}, ("wrong_value", "epsilon=-0.1", "0")),
        ({"targeted": -1}, ("wrong_value", "targeted=-1", "0")),
        ({"targeted": 1.5}, ("wrong_value", "targeted=1.5", "0")),
        ({"method": "pgd", "steps": 0}, ("wrong_value", "steps=0", "1")),
        ({"method": "pgd", "restarts": 0}, ("wrong_value", "restarts=0", "1")),
        ({"seed": -1}, ("wrong_value", "seed=-1", "0")),
        ({"norm": "1"}, ("wrong_value", "norm='1'", "inf", "2")),
        ({"start": 1}, ("wrong_value", "start=1")),
        ({"radius": 1}, ("unknown_name", "radius")),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    with raises(UsageError, *expected):
        Fooling(**options)


@pytest.mark.parametrize(
    "options",
    [{"targeted": 0}, {"targeted": "cat"}, {"clip": (0, 1)}, {"epsilon": MAX_STEP}, {"epsilon": 0}, {"start": False},
     {"method": "pgd", "restarts": 2, "steps": 1, "step_size": 0.0, "norm": "2", "loss": "dlr"}],
)  # fmt: skip
def test_what_fits_is_taken(options: dict[str, Any]) -> None:
    assert all(getattr(Fooling(**options), name) == value for name, value in options.items())


def test_steps_and_their_size() -> None:
    assert Fooling(epsilon=0.5).way == (1, 0.5)
    assert Fooling("pgd", 0.5).way == (10, 0.125)
    assert Fooling("pgd", 0.5, steps=5).way == (5, 0.25)
    assert Fooling("pgd", 0.5, steps=4, step_size=0.0).way == (4, 0.0)
    assert [Fooling(method, start=start).random for method in ("fgsm", "pgd") for start in (False, True)] == [
        False, False, False, True
    ]  # fmt: skip
