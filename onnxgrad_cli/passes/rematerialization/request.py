"""What --recompute is asked for, as it is typed: a kind, and what goes with it."""

from __future__ import annotations

from typing import get_args

from onnxgrad_cli.common.byte_sizes import bytes_of
from onnxgrad_cli.common.choices import Recomputation
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.options import RecomputeSpec

KINDS: tuple[Recomputation, ...] = get_args(Recomputation)
ELEMENTWISE, BLOCK, BUDGET, OPTIMAL = KINDS
SIZED = (BUDGET, OPTIMAL)
AUTO = "auto"
"""The pattern that stands for the layers of the network."""

FORM = "`recompute` takes elementwise, block:auto, block:GLOB, budget:SIZE or optimal:SIZE"


def parse_recompute(text: str) -> RecomputeSpec:
    """Read `elementwise`, `block:auto`, `block:GLOB`, `budget:SIZE` or `optimal:SIZE`, such as budget:512MB.

    Raises:
        UsageError: it is none of these.
    """
    word, _, rest = (part.strip() for part in text.partition(":"))
    kind = next((kind for kind in KINDS if kind == word), None)
    if kind is None:
        raise UsageError(f"{FORM}, not '{text}'", suggest(word, KINDS, "kinds"))
    if bool(rest) != (kind != ELEMENTWISE):
        raise UsageError(f"{FORM}, not '{text}'", "such as block:'*layer*/output' or budget:512MB")
    return RecomputeSpec(
        kind, rest if kind == BLOCK else "", bytes_of(rest, f"`recompute` {kind}") if kind in SIZED else 0
    )
