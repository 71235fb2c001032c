"""Ratios as a picture: a line for each model, a mark for each peer, and 1 in the middle of a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM, ROW, WIDTH = 230.0, 20.0, 62.0, 34.0, 26.0, 860.0
"""Pixels around what is drawn, of a model's line, and of the picture."""

COLORS = ("#0b5ed7", "#9ec5fe", "#d9480f", "#ffc9a8")
TICKS = (0.1, 0.2, 0.33, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0)

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333; } .h { font-size: 14px; font-weight: 700; }
.grid { stroke: #e3e3e3; } .one { stroke: #333; stroke-width: 1.5; } .spread { stroke-width: 2; opacity: 0.5; }
"""


@dataclass(frozen=True)
class Mark:
    """A ratio of one model to one peer, and its spread."""

    name: str
    series: str
    value: float
    low: float
    high: float


def svg(marks: Sequence[Mark], caption: str) -> str:
    """The picture."""
    return "\n".join(_lines(marks, caption))


def _lines(marks: Sequence[Mark], caption: str) -> Iterator[str]:
    names, series = list(dict.fromkeys(m.name for m in marks)), sorted({m.series for m in marks}, reverse=True)
    colors = dict(zip(series, COLORS, strict=False))
    reach = max([2.0, *(max(m.value, 1 / m.value) for m in marks)]) * 1.1
    height = TOP + ROW * len(names) + BOTTOM

    def across(ratio: float) -> float:
        share = math.log(min(max(ratio, 1 / reach), reach)) / math.log(reach)
        return LEFT + (1 + share) / 2 * (WIDTH - LEFT - RIGHT)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" width="{WIDTH:.0f}"'
    yield f' height="{height:.0f}" role="img">\n<title>{escape(caption)}</title>\n<style>{STYLE}</style>'
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    yield f'<text class="h" x="12" y="22">{escape(caption)}</text>'
    for i, name in enumerate(series):
        x = LEFT + i * 150
        yield f'<circle cx="{x:.1f}" cy="40" r="5" fill="{colors[name]}"/>'
        yield f'<text x="{x + 10:.1f}" y="44">{escape(name)}</text>'
    for tick in TICKS:
        if 1 / reach <= tick <= reach:
            x, kind = across(tick), "one" if tick == 1 else "grid"
            yield f'<path class="{kind}" d="M{x:.1f} {TOP - 6:.1f}V{height - BOTTOM:.1f}"/>'
            yield f'<text x="{x:.1f}" y="{height - BOTTOM + 16:.1f}" text-anchor="middle">{tick:g}</text>'
    for i, name in enumerate(names):
        y = TOP + ROW * (i + 0.5)
        yield f'<text x="{LEFT - 12:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        for mark in (m for m in marks if m.name == name):
            at = y + (series.index(mark.series) - (len(series) - 1) / 2) * 4
            color, told = colors[mark.series], f"{name}: {mark.value:.2f} of {mark.series}"
            reached = f"M{across(mark.low):.1f} {at:.1f}H{across(mark.high):.1f}"
            yield f'<path class="spread" stroke="{color}" d="{reached}"/>'
            yield f'<circle cx="{across(mark.value):.1f}" cy="{at:.1f}" r="5" fill="{color}">'
            yield f"<title>{escape(told)}</title></circle>"
    yield "</svg>"
