"""Every rule, proven: each row of the table against central differences, and rows equal rules."""

from functools import partial

import pytest

from onnxgrad_cli.autodiff import registry
from tests.autodiff.rows import ROWS, by_operator, few, tiers
from tests.conftest import Each
from tests.harness import Case, check_case

ESTIMATES = {("", "QuantizeLinear")}
"""What no difference can prove; PyTorch does, in tests/autodiff/rules/test_quantize.py."""


MOST = 2
"""Number of rows per operator in `make test`; with symbolic axes and in second order it is one."""

EVERY, SYMBOLIC, TWICE = (
    by_operator(rows) for rows in (ROWS, (r for r in ROWS if r.symbolic), (r for r in ROWS if r.second_order))
)


@pytest.mark.parametrize("rows", tiers(EVERY, few(EVERY, MOST)))
def test_gradient(rows: list[Case], each: Each) -> None:
    each(rows, check_case)


@pytest.mark.parametrize("rows", tiers(SYMBOLIC, few(SYMBOLIC, 1)))
def test_gradient_with_symbolic_axes(rows: list[Case], each: Each) -> None:
    each(rows, partial(check_case, symbolic=True))


@pytest.mark.parametrize("rows", tiers(TWICE, few(TWICE, 1)))
def test_second_order(rows: list[Case], each: Each) -> None:
    each(rows, partial(check_case, order=2))


def test_every_rule_has_a_row() -> None:
    rules = {(rule.domain, rule.op_type) for rule in registry.all_rules() if not rule.is_zero and not rule.refusal}
    rules -= ESTIMATES
    definitions = {(definition.domain, definition.op_type) for definition in registry.all_definitions()}
    assert rules == {(row.domain, row.op) for row in ROWS} - (definitions - rules)
