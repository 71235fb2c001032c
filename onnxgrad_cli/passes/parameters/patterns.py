"""Names that the user chooses by patterns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from onnxgrad_cli.errors import UsageError, suggest

Known = Mapping[str, Collection[str]]
"""What things are called besides their names; see `ir.modules.known_as`."""


def matching(
    patterns: str | Sequence[str], names: list[str], option: str, kind: str, known: Known | None = None
) -> list[str]:
    """Those of `names` that equal one of `patterns` or match one as a glob, in their order.

    Args:
        patterns: the patterns, or a single one.
        names: what can be chosen.
        option: the option that the patterns were given with, for errors.
        kind: what the names are, in the plural, for errors.
        known: other names by which each can be chosen.

    Raises:
        UsageError: a pattern matches no name.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in names if any(matches(each, pattern) for each in (name, *(known or {}).get(name, ())))]
        if not hits:
            raise UsageError(f"{option}: '{pattern}' matches no {kind[:-1]}", suggest(pattern, names, kind))
        found.update(hits)
    return [name for name in names if name in found]


def matches(name: str, pattern: str) -> bool:
    """Whether a name equals a pattern, or matches it as a glob."""
    return name == pattern or fnmatchcase(name, pattern)
