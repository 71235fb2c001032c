"""THE TABLE: one row an operator, attribute family and opset boundary; one module a family of rules.

A row is a `Case` of tests/harness.py. `tests/autodiff/test_rules.py` runs every row, and proves that rows equal rules.
"""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

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
