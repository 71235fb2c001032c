"""From files to files: what each command does, as one call that neither prints nor exits."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str, int], None]
"""Takes a line of narration and the verbosity it belongs to."""


def silent(text: str, level: int) -> None:
    """Tell nobody."""
