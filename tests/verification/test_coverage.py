"""The table of operators: complete, up to date with the rules, and without a gradient that nothing proves."""

from pathlib import Path

import onnx
import pytest

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.verification import coverage
from onnxgrad_cli.verification.coverage import Coverage
from tests import proofs
from tools.operators import document

DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"
STALE = "run `make docs`"
UNPROVEN = {
    "QuantizeLinear": "an estimate, which no difference can confirm: autodiff/rules/test_quantize.py has PyTorch's",
    "SequenceMap": "its published tests return sequences, of which no derivative is measured",
}


@pytest.fixture(scope="module")
def table() -> list[Coverage]:
    return list(coverage.coverage())


def test_every_operator_stands_once(table: list[Coverage]) -> None:
    keys = [(each.domain, each.op_type) for each in table]
    assert len(set(keys)) == len(keys)
    assert {("", schema.name) for schema in onnx.defs.get_all_schemas() if not schema.domain} <= set(keys)
    assert {(rule.domain, rule.op_type) for rule in registry.all_rules()} <= set(keys)


@pytest.mark.slow
def test_the_proofs_are_those_of_the_table_of_rows() -> None:
    assert proofs.of_rows() == coverage.proofs()["rows"], STALE


def test_the_page_is_up_to_date(table: list[Coverage]) -> None:
    assert document(table) == DOCUMENT.read_text(), STALE


def test_nothing_is_wrong_and_nothing_unproven(table: list[Coverage]) -> None:
    assert not [each.op_type for each in table if each.cases.get("WRONG")]
    assert not [
        f"{each.domain}.{each.op_type}"
        for each in table
        if each.kind in ("rule", "definition", "function", "straight-through") and each.op_type not in UNPROVEN
        if not each.files and not each.cases.get("right")
    ]
    assert not [
        f"{each.op_type} {operand.name}"
        for each in table
        if each.kind not in ("refused", "straight-through", "zero") and each.op_type not in UNPROVEN
        for operand in each.operands
        if operand.state == "unproven"
    ]


def test_what_the_standard_tags_as_differentiable_is_so_or_says_why_not(table: list[Coverage]) -> None:
    silent = [
        f"{each.op_type} {operand.name}"
        for each in table
        for operand in each.operands
        if operand.tag == "differentiable" and not operand.agrees and not operand.word
    ]
    assert not silent
    (hardmax,) = [each for each in table if each.op_type == "Hardmax"]
    assert hardmax.operands[0].agrees is False and "step" in hardmax.operands[0].word


def test_a_refusal_has_its_reason(table: list[Coverage]) -> None:
    whole = ("refused", "straight-through")
    assert all(each.reason for each in table if each.kind in whole)
    assert all(o.word for each in table for o in each.operands if o.state == "refused" and each.kind not in whole)
