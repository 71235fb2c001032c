"""Verdicts on gradients after one, two or three looks at them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest

from onnxgrad_cli.builder import build
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification.case import CheckOutcome, ProofCase
from onnxgrad_cli.verification.checks.agreement import ELSEWHERE, FEW_ENTRIES, agrees_with_slopes, off_zero, wide
from onnxgrad_cli.verification.gradients.loss_function import FAITHFUL
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.verdict import PROVED

PASSED, SKIPPED, HIDDEN = (
    CheckOutcome("passed", "right"),
    CheckOutcome("skipped", "noise"),
    CheckOutcome("passed", "right", hidden=("w",)),
)
LOOKS = ("_here", "_elsewhere", "_in_double")


def case_of(exact: bool, numbers: int = FEW_ENTRIES, **roles: Any) -> ProofCase:
    """Return a case of one gradient that draws no random numbers."""
    model = SimpleNamespace(graph=SimpleNamespace(node=[]))
    given = {"estimated": (), "gradients": {"w": "w_grad"}, "partial": (), **roles}
    fields = {"roles": SimpleNamespace(**given), "described": SimpleNamespace(model=model), "exact": exact}
    return cast(ProofCase, SimpleNamespace(**fields, outputs={"w_grad": np.zeros(numbers)}))


@pytest.mark.parametrize(
    ("exact", "numbers", "found", "status", "taken"),
    [
        (True, FEW_ENTRIES, [PASSED], "passed", 1),
        (True, FEW_ENTRIES + 1, [PASSED], "passed", 1),
        (False, FEW_ENTRIES + 1, [PASSED], "passed", 1),
        (False, FEW_ENTRIES, [PASSED, PASSED], "passed", 2),
        (False, FEW_ENTRIES, [PASSED, SKIPPED, SKIPPED], "skipped", 3),
        (False, FEW_ENTRIES, [SKIPPED, PASSED, SKIPPED], "skipped", 3),
        (True, FEW_ENTRIES, [SKIPPED, PASSED], "passed", 2),
        (True, FEW_ENTRIES, [HIDDEN, PASSED], "passed", 2),
        (True, FEW_ENTRIES, [HIDDEN, HIDDEN, HIDDEN], "skipped", 3),
        (False, FEW_ENTRIES, [HIDDEN, PASSED, SKIPPED], "skipped", 3),
        (True, FEW_ENTRIES, [CheckOutcome("failed"), PASSED], "passed", 2),
        (True, FEW_ENTRIES, [CheckOutcome("failed")] * 3, "failed", 3),
        (True, FEW_ENTRIES, [SKIPPED] * 3, "skipped", 3),
    ],
)
def test_looks_are_taken_until_one_is_sure(
    monkeypatch: pytest.MonkeyPatch, exact: bool, numbers: int, found: list[CheckOutcome], status: str, taken: int
) -> None:
    """Few numbers that float32 finds right may be so by chance, and are looked at twice."""
    left = list(found)
    for look in LOOKS:
        monkeypatch.setattr(f"onnxgrad_cli.verification.checks.agreement.{look}", lambda case: left.pop(0))
    assert agrees_with_slopes(case_of(exact, numbers)).status == status
    assert len(found) - len(left) == taken


def smooth() -> onnx.ModelProto:
    text = """<ir_version: 10, opset_import: ["": 18]> g (float[N, 3] x) => (float[N, 2] y)
    <float[3, 2] w = {0.5, -0.2, 0.3, 0.1, 0.4, -0.6}> { h = MatMul(x, w) y = Tanh(h) }"""
    return build(onnx.parser.parse_model(text)).model


def test_a_smooth_model_is_proved_by_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for look in LOOKS[1:]:
        monkeypatch.setattr(
            f"onnxgrad_cli.verification.checks.agreement.{look}", lambda case: CheckOutcome("failed", "looked again")
        )
    proof = prove(smooth(), describe(smooth()))
    assert proof.verdict == PROVED, proof.why


def test_costly_models_are_compared_again_with_the_noise_of_a_second_point(monkeypatch: pytest.MonkeyPatch) -> None:
    for look in LOOKS[:2]:
        monkeypatch.setattr(f"onnxgrad_cli.verification.checks.agreement.{look}", lambda case: SKIPPED)
    monkeypatch.setattr("onnxgrad_cli.verification.case.LONG_RUN_OPERATIONS", 10)
    taken: list[Any] = []

    def compared(*arguments: Any) -> CheckOutcome:
        taken.append(arguments)
        return SKIPPED if len(taken) == 1 else PASSED

    monkeypatch.setattr("onnxgrad_cli.verification.checks.agreement.in_single", compared)
    assert prove(smooth(), describe(smooth()), operations=11).verdict == PROVED
    first, second = taken
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert second[-1] == FAITHFUL[4]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ({"estimated": ("w",)}, "straight-through"),
        ({"gradients": {}}, "no output is a gradient"),
        ({"partial": ("w", "v")}, "all gradients leave out paths"),
    ],
)
def test_gradients_that_slopes_do_not_show_are_skipped(roles: dict[str, Any], words: str) -> None:
    found = agrees_with_slopes(case_of(True, **roles))
    assert found.status == "skipped" and words in found.detail


def test_losses_of_two_random_runs_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.verification.checks.agreement.varies", lambda case: True)
    found = agrees_with_slopes(case_of(True))
    assert found.status == "skipped" and "random numbers" in found.detail


def test_narrow_floats_are_subtracted_in_float32() -> None:
    assert wide(np.ones(2, np.float16)).dtype == np.float32
    assert wide(np.ones(2, np.float32)).dtype == np.float32
    assert wide(np.ones(2)).dtype == np.float64


@pytest.mark.parametrize("size", [0.0, 1e-20, -ELSEWHERE])
def test_tensors_next_to_zero_move_off_it(size: float) -> None:
    x = np.full((20, 20), size, np.float32)
    moved = off_zero(x, np.random.default_rng(0))
    assert moved.dtype == np.float32
    assert np.min(np.abs(moved)) >= np.float32(ELSEWHERE) and np.max(np.abs(moved)) <= np.float32(2 * ELSEWHERE)
    assert set(np.unique(np.sign(moved))) == ({-1.0, 1.0} if size == 0 else {np.sign(size)})


def test_other_tensors_move_in_proportion_to_each_entry() -> None:
    x = np.array([0.0, 1.0, -100.0])
    moved = off_zero(x, np.random.default_rng(0))
    assert moved[0] == 0
    assert np.all(np.abs(moved[1:] - x[1:]) <= ELSEWHERE * np.abs(x[1:])) and np.all(moved[1:] != x[1:])
