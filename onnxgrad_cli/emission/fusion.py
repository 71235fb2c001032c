"""The cotangents of what several nodes compute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fusion:
    """The cotangents of what several nodes compute together, where one rule for all takes fewer passes over memory.

    Attributes:
        operator: what they stand for, as 'domain::Op'.
        inputs: the values that get a cotangent.
        kept: other values of theirs that the rule reads.
        function: `rule(op, g, *inputs, *kept)`, which returns a cotangent for each input.
    """

    operator: str
    inputs: tuple[str, ...]
    kept: tuple[str, ...]
    function: Callable[..., Any]
