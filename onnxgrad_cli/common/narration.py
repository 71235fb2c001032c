"""The type of functions that receive progress messages. Jobs call them instead of printing."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str, int], None]
"""A function that receives a message, and the lowest verbosity at which to show it."""


def silent(text: str, level: int) -> None:
    """Ignore a message."""
