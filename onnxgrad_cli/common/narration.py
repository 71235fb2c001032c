"""How long work is narrated: whoever does it gets a function that takes a line and the verbosity it belongs to."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str, int], None]
"""Takes a line of narration and the verbosity it belongs to."""


def silent(text: str, level: int) -> None:
    """Tell nobody."""
