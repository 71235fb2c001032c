"""Listings of what is chosen by its name: losses, optimizers, schedules, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from onnxgrad_cli.common.settings import Option


class Listed(Protocol):
    """What has a name, documentation, and settings of its own."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def summary(self) -> str:
        """What it is, in a line."""

    @property
    def doc(self) -> str:
        """What it is, whole."""

    @property
    def options(self) -> tuple[Option, ...]:
        """Its settings."""


def described(each: Listed, facts: Mapping[str, object], shared: Iterable[Option] = ()) -> dict[str, Any]:
    """One of a listing, for JSON.

    Args:
        each: what is described.
        facts: what there is to say of its kind.
        shared: settings that all of its kind have.
    """
    options = [
        {"name": option.name, "kind": option.kind, "default": option.default, "doc": option.doc}
        for option in (*each.options, *shared)
    ]
    return {"name": each.name, "summary": each.summary, "doc": each.doc, **facts, "options": options}


def rows_of(each: Listed, *cells: str) -> list[tuple[str, ...]]:
    """One of a listing, for a table: its name, `cells` of its kind, and its summary; below, a row for each setting."""
    return [(each.name, *cells, each.summary), *rows_below(settings_lines(each.options), len(cells))]


def rows_below(lines: Iterable[str], cells: int = 0) -> list[tuple[str, ...]]:
    """Rows that stand below that of a name, indented in the last column."""
    return [("", *[""] * cells, f"  {line}") for line in lines]


def settings_lines(options: Iterable[Option]) -> list[str]:
    """Settings as they are typed, each with its default and what it does."""
    return [f"{option.name.replace('_', '-')}={_typed(option.default)}: {option.doc}" for option in options]


def _typed(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
