"""`Fusion`: one gradient rule for several nodes that compute one value together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Fusion(NamedTuple):
    """The gradient of a value that several nodes compute together, where one rule takes fewer passes over memory.

    Attributes:
        operator: the operator that the nodes stand for, as 'domain::Op'.
        inputs: the values that get a cotangent.
        saved: other values of these nodes that the rule reads.
        function: `rule(op, g, *inputs, *saved)`, which returns a cotangent for each input.
        convolved: `rule(op, g, x, w, *inputs[1:], *saved)` for where the first input is the convolution of x with w, a
            matrix for each pixel: a cotangent for each of these but what is saved. None where there is no such rule.
        kink: the convention where the value has no derivative.
    """

    operator: str
    inputs: tuple[str, ...]
    saved: tuple[str, ...]
    function: Callable[..., Any]
    convolved: Callable[..., Any] | None = None
    kink: str = ""
