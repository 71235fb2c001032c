"""A base class for dataclasses that refuse unknown keywords, with a hint that gives similar names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from onnxgrad_cli.errors import suggest, unknown_name


@dataclass(frozen=True)
class KnownKeywords:
    """Base class of dataclasses that refuse unknown keywords. Type checkers still use the dataclass's `__init__`."""

    def __new__(cls, *_: object, **given: object) -> Self:
        """Check that each keyword is a field, before `__init__` is called.

        Raises:
            UsageError: a keyword is not a field; the hint gives similar names.
        """
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown_name(f"`{cls.__name__}` has no option '{name}'", suggest(name, known, "options"))
        return super().__new__(cls)
