"""Every rule, proven: each row of the table against central differences, and rows equal rules."""

from functools import partial

import pytest

from onnxgrad_cli.autodiff import registry
from tests.autodiff.rows import ROWS, by_operator
from tests.conftest import Each
from tests.harness import check_case

EVERY = by_operator(ROWS)
SYMBOLIC = by_operator(row for row in ROWS if row.symbolic)
TWICE = by_operator(row for row in ROWS if row.second_order)

ESTIMATES = {("", "QuantizeLinear")}
"""What no difference can prove; PyTorch does, in tests/autodiff/rules/test_quantize.py."""


@pytest.mark.parametrize("operator", EVERY)
def test_gradient(operator: str, each: Each) -> None:
    each(EVERY[operator], check_case)


@pytest.mark.parametrize("operator", SYMBOLIC)
def test_gradient_with_symbolic_axes(operator: str, each: Each) -> None:
    each(SYMBOLIC[operator], partial(check_case, symbolic=True))


@pytest.mark.parametrize("operator", TWICE)
def test_second_order(operator: str, each: Each) -> None:
    each(TWICE[operator], partial(check_case, order=2))


def test_every_rule_has_a_row() -> None:
    rules = {(rule.domain, rule.op_type) for rule in registry.all_rules() if not rule.is_zero and not rule.refusal}
    rules -= ESTIMATES
    definitions = {(definition.domain, definition.op_type) for definition in registry.all_definitions()}
    assert rules == {(row.domain, row.op) for row in ROWS} - (definitions - rules)
