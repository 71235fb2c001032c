"""Format counts, sizes, durations, shapes and lists of names for people, in the same way in every format."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.ir.types import Shape
from onnxgrad_cli.report.blocks import Inline, Name


def pieces(text: Inline) -> tuple[str, ...]:
    """Return the strings and names of which an `Inline` text consists."""
    return text if isinstance(text, tuple) else (text,)


def plain(text: Inline) -> str:
    """Return an `Inline` text as one line of plain text."""
    return escaped("".join(pieces(text)))


def quoted(text: str) -> Inline:
    """Return a message as an `Inline` text in which each part in single quotes is a `Name`, without the quotes."""
    return tuple(Name(p) if i % 2 else p for i, p in enumerate(re.split(r"(?<!\w)'([^']+)'(?!\w)", text)) if p)


def names(items: Sequence[str], most: int = 5) -> Inline:
    """Return a list of names as text: the first `most` of them, then the number of the others."""
    found: list[str] = []
    for item in items[:most]:
        found += [", ", Name(item)] if found else [Name(item)]
    return (*found, f" and {len(items) - most:,} more") if len(items) > most else tuple(found)


def number(value: int) -> str:
    """Return a number with thousands separators: '1,234'."""
    return f"{value:,}"


def several(count: int, noun: str) -> str:
    """Return a count and its noun: '1 node', '2 nodes'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def scaled(value: float, unit: str) -> str:
    """Return a quantity with three digits and a decimal prefix: '1.23 GFLOP', '45.6 kB'."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:#.3g}".rstrip(".") + f" {prefix}{unit}"
    return f"{value:,.0f} {unit}"


def seconds(value: float) -> str:
    """Return a duration: '12.3 ms', '4.56 s'."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def figure(value: float) -> str:
    """Return a measured number as text with four significant digits: '0.6931', '3.000e-06', '1,235'."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 999.95 <= abs(value) < 1e9 else f"{value:#.4g}"


def percent(share: float) -> str:
    """Return a share (0 to 1) in percent: '12.3 %'."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{share:.1%}".replace("%", " %")


def shape(dims: Shape | None) -> str:
    """Return a shape: 'batch × 3 × 224 × 224'."""
    return "any rank" if dims is None else " × ".join(map(str, dims)) or "scalar"
