"""Names that the user chooses by patterns."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from onnxgrad_cli.errors import UsageError, suggest


def matching(patterns: str | Sequence[str], names: list[str], option: str, kind: str) -> list[str]:
    """Those of `names` that equal one of `patterns` or match one as a glob, in their order.

    Args:
        patterns: the patterns, or a single one.
        names: what can be chosen.
        option: the option that the patterns were given with, for errors.
        kind: what the names are, in the plural, for errors.

    Raises:
        UsageError: a pattern matches no name.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not hits:
            raise UsageError(f"{option}: '{pattern}' matches no {kind[:-1]}", suggest(pattern, names, kind))
        found.update(hits)
    return [name for name in names if name in found]
