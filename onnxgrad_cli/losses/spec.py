"""A loss as it is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossSpec:
    """One loss as asked for: its name or file, the output it judges, the label input, its share of the total."""

    name: str
    output: str | None = None
    label: str | None = None
    weight: float = 1.0
