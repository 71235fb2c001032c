"""THE TABLE: one row an operator, attribute family and opset boundary; one module a family of rules.

A row is a `Case` of tests/harness.py. `tests/autodiff/test_rules.py` runs every row, and proves that rows equal rules.
"""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from tests.harness import Case

ROWS: list[Case] = [row for module in iter_modules(__path__) for row in import_module(f"{__name__}.{module.name}").ROWS]


def by_operator(rows: Iterable[Case]) -> dict[str, list[Case]]:
    """The rows of each operator, by its name and, where that is not the standard's, its domain."""
    found: dict[str, list[Case]] = {}
    for row in rows:
        found.setdefault(f"{row.domain}.{row.op}".lstrip("."), []).append(row)
    return found


def few(rows: dict[str, list[Case]], most: int) -> dict[str, list[Case]]:
    """Of each operator some rows from all over its table, for a quick answer."""
    return {operator: every[:: -(-len(every) // most)] for operator, every in rows.items()}


def others(rows: dict[str, list[Case]], some: dict[str, list[Case]]) -> dict[str, list[Case]]:
    """The rows that are not among some, of each operator that has such."""
    taken = {id(row) for each in some.values() for row in each}
    left = {operator: [row for row in each if id(row) not in taken] for operator, each in rows.items()}
    return {operator: each for operator, each in left.items() if each}


def tiers(every: dict[str, list[Case]], quick: dict[str, list[Case]], most: int = 3) -> list[Any]:
    """Return the parameter sets of a test that gets rows of one operator.

    The rows in `quick` are quick. Of the other rows, up to `most` per operator are slow, and the rest are long.
    """
    rest = others(every, quick)
    slow = few(rest, most)
    marks = pytest.mark.slow, pytest.mark.long
    return [
        *(pytest.param(rows, id=operator) for operator, rows in quick.items()),
        *(pytest.param(rows, id=f"{operator}-slow", marks=marks[0]) for operator, rows in slow.items()),
        *(pytest.param(rows, id=f"{operator}-long", marks=marks) for operator, rows in others(rest, slow).items()),
    ]
