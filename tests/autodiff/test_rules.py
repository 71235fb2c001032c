"""Every rule, proven: each row of the table against central differences, and rows equal rules."""

from functools import partial

import pytest

from onnxgrad_cli.autodiff import registry
from tests.autodiff.rows import ROWS, by_operator, few, others
from tests.conftest import Each
from tests.harness import check_case

ESTIMATES = {("", "QuantizeLinear")}
"""What no difference can prove; PyTorch does, in tests/autodiff/rules/test_quantize.py."""


MOST = 6
"""How many rows of an operator `make test` runs; `make test-all` runs the others too."""

EVERY, SYMBOLIC, TWICE = (
    by_operator(rows) for rows in (ROWS, (r for r in ROWS if r.symbolic), (r for r in ROWS if r.second_order))
)
SOME, SOME_SYMBOLIC, SOME_TWICE = (few(rows, MOST) for rows in (EVERY, SYMBOLIC, TWICE))
OTHERS, OTHERS_SYMBOLIC, OTHERS_TWICE = map(others, (EVERY, SYMBOLIC, TWICE), (SOME, SOME_SYMBOLIC, SOME_TWICE))


@pytest.mark.parametrize("operator", SOME)
def test_gradient(operator: str, each: Each) -> None:
    each(SOME[operator], check_case)


@pytest.mark.parametrize("operator", SOME_SYMBOLIC)
def test_gradient_with_symbolic_axes(operator: str, each: Each) -> None:
    each(SOME_SYMBOLIC[operator], partial(check_case, symbolic=True))


@pytest.mark.parametrize("operator", SOME_TWICE)
def test_second_order(operator: str, each: Each) -> None:
    each(SOME_TWICE[operator], partial(check_case, order=2))


@pytest.mark.slow
@pytest.mark.parametrize("operator", OTHERS)
def test_gradient_of_the_other_rows(operator: str, each: Each) -> None:
    each(OTHERS[operator], check_case)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OTHERS_SYMBOLIC)
def test_gradient_of_the_other_rows_with_symbolic_axes(operator: str, each: Each) -> None:
    each(OTHERS_SYMBOLIC[operator], partial(check_case, symbolic=True))


@pytest.mark.slow
@pytest.mark.parametrize("operator", OTHERS_TWICE)
def test_second_order_of_the_other_rows(operator: str, each: Each) -> None:
    each(OTHERS_TWICE[operator], partial(check_case, order=2))


def test_every_rule_has_a_row() -> None:
    rules = {(rule.domain, rule.op_type) for rule in registry.all_rules() if not rule.is_zero and not rule.refusal}
    rules -= ESTIMATES
    definitions = {(definition.domain, definition.op_type) for definition in registry.all_definitions()}
    assert rules == {(row.domain, row.op) for row in ROWS} - (definitions - rules)
