"""Every rule, proven: each row of the table against central differences, and rows equal rules."""

import pytest

from onnxgrad_cli.autodiff import registry
from tests.autodiff.rows import ROWS
from tests.harness import Case, check_case

ESTIMATES = {("", "QuantizeLinear")}
"""What no difference can prove; PyTorch does, in tests/autodiff/rules/test_quantize.py."""


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_gradient(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("case", [row for row in ROWS if row.symbolic], ids=str)
def test_gradient_with_symbolic_axes(case: Case) -> None:
    check_case(case, symbolic=True)


@pytest.mark.parametrize("case", [row for row in ROWS if row.second_order], ids=str)
def test_second_order(case: Case) -> None:
    check_case(case, order=2)


def test_every_rule_has_a_row() -> None:
    rules = {(rule.domain, rule.op_type) for rule in registry.all_rules() if not rule.is_zero and not rule.refusal}
    rules -= ESTIMATES
    definitions = {(definition.domain, definition.op_type) for definition in registry.all_definitions()}
    assert rules == {(row.domain, row.op) for row in ROWS} - (definitions - rules)
