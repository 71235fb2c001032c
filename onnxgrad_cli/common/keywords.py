"""Keywords that a class does not take: refused as other words are, with those of a name like it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from onnxgrad_cli.errors import UsageError, suggest


@dataclass(frozen=True)
class KnownKeywords:
    """A dataclass that refuses keywords of no field; type checkers go by its `__init__` as ever."""

    def __new__(cls, *_: object, **given: object) -> Self:
        """Check the keywords.

        Raises:
            UsageError: there is no such field; the hint has those of a name like it.
        """
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise UsageError(f"`{cls.__name__}` has no option '{name}'", suggest(name, known, "options"))
        return super().__new__(cls)
