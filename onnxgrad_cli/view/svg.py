"""A drawing as an SVG picture, laid out by ourselves: no program and no font has to be there."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from html import escape
from itertools import groupby, pairwise

from onnxgrad_cli.common.visible import visible_lines
from onnxgrad_cli.view.drawing import LOOKS, Box, Drawing, Group, Kind
from onnxgrad_cli.view.layout import Layout, Place, Point, Route, layout

LETTER, LINE, PAD = 6.05, 13.0, 9.0
"""Pixels of a letter of the monospaced font, of a line, and around the text of a box."""

LID, CUT = 8.0, 8.0
"""Pixels of the upper side of a cylinder, and of the corners that a hexagon lacks."""

MARGIN, HEAD = 16.0, 58.0
"""Pixels around the picture, and above it for its title and legend."""

STYLE = """
text { font: 10px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #111; }
.t { font-weight: 700; } .e { fill: none; stroke: #666; stroke-width: 1; } .l { font-size: 8.5px; fill: #444; }
.f { fill: #0001; stroke-width: 1; stroke-dasharray: 2 3; } .h { font-size: 14px; font-weight: 700; }
"""


def svg(drawing: Drawing) -> str:
    """The drawing as a picture."""
    return '<?xml version="1.0" encoding="UTF-8"?>\n<!-- drawn by onnxgrad -->\n' + picture(drawing) + "\n"


def picture(drawing: Drawing) -> str:
    """The drawing as an `svg` element."""
    return "\n".join(_lines(drawing))


def _lines(drawing: Drawing) -> Iterator[str]:
    """The lines of the SVG picture."""
    found = layout(drawing, _size)
    whole = found.places[drawing.root.key]
    legend = list(_legend(drawing.kinds))
    width = max(whole.width, LETTER * 1.4 * _width(drawing.caption), 130.0 * len(drawing.kinds)) + 2 * MARGIN
    height = whole.height + HEAD + 2 * MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
    yield f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    yield f"<title>{_text(drawing.caption)}</title>\n<style>{STYLE}</style>"
    yield '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    yield '<path d="M0 0L8 4L0 8z" fill="#666"/></marker></defs>'
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    yield f'<text class="h" x="{MARGIN:.0f}" y="26">{_text(drawing.caption)}</text>'
    yield from legend
    yield f'<g transform="translate({MARGIN:.0f} {HEAD + MARGIN:.0f})">'
    yield from _frames(drawing.root, found)
    for route in found.routes:
        told = _text("\n".join(route.edge.tensors))
        yield f'<path class="e" marker-end="url(#a)" d="{_path(route)}"><title>{told}</title></path>'
    for key, box in drawing.boxes.items():
        yield from _box(box, found.places[key])
    for (label, (x, y)), _ in groupby(sorted(_labels(drawing, found))):
        yield f'<text class="l" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{_text(label)}</text>'
    yield "</g>\n</svg>"


def _labels(drawing: Drawing, found: Layout) -> Iterator[tuple[str, Point]]:
    """What stands at edges, near their ends, where they lie apart."""
    for route in found.routes:
        if (label := drawing.label(route.edge)) and not route.sideways:  # there the boxes are too near
            (x, y), (_, before) = route.points[-1], route.points[-2]
            yield label, (x, y + (-8 if before <= y else 14))


def _legend(kinds: list[Kind]) -> Iterator[str]:
    for i, kind in enumerate(kinds):
        yield from _box(Box(f"legend-{kind}", kind, LOOKS[kind].meaning), Place(MARGIN + 130 * i, 36, 120, 22))


def _frames(group: Group, found: Layout) -> Iterator[str]:
    place = found.places[group.key]
    if group.title:
        color = LOOKS[group.kind].color if group.kind else "#888"
        yield f'<rect class="f" {_area(place)} rx="6" stroke="{color}"/>'
        yield f'<text class="l" x="{place.x + 6:.1f}" y="{place.y + 13:.1f}">{_text(group.title)}</text>'
    for part in group.parts:
        if isinstance(part, Group):
            yield from _frames(part, found)


# -- boxes ----------------------------------------------------------------------------------------------------------


def _size(box: Box) -> tuple[float, float]:
    rows = [box.title, *box.lines]
    lid = LID if LOOKS[box.kind].shape == "cylinder" else 0.0
    return LETTER * max(map(_width, rows)) + 2 * PAD + 10, LINE * len(rows) + PAD + lid


def _width(text: str) -> int:
    """The columns that a text takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _box(box: Box, place: Place) -> Iterator[str]:
    """The lines that draw one box."""
    look = LOOKS[box.kind]
    dash = ' stroke-dasharray="5 3"' if look.border == "dashed" else ""
    colors = f'fill="{look.fill}" stroke="{look.color}" stroke-width="1.5"'
    yield f'<g id="{box.key}" class="{box.kind}" {colors}{dash}>'
    if box.details:
        yield f"<title>{_text(box.details)}</title>"
    yield _shape(look.shape, place)
    if look.border == "double":
        yield _shape(look.shape, Place(place.x + 3, place.y + 3, place.width - 6, place.height - 6))
    yield "</g>"
    lid = LID / 2 if look.shape == "cylinder" else 0.0
    top = place.center + lid - LINE * (1 + len(box.lines)) / 2 + 10
    for i, row in enumerate([box.title, *box.lines]):
        name = "" if i else ' class="t"'
        yield f'<text{name} x="{place.middle:.1f}" y="{top + i * LINE:.1f}" text-anchor="middle">{_text(row)}</text>'


def _shape(shape: str, p: Place) -> str:
    left, right, top, bottom, center = (f"{number:.1f}" for number in (p.x, p.x + p.width, p.y, p.bottom, p.center))
    if shape == "hexagon":
        inner, outer = f"{p.x + CUT:.1f}", f"{p.x + p.width - CUT:.1f}"
        return f'<path d="M{left} {center}L{inner} {top}H{outer}L{right} {center}L{outer} {bottom}H{inner}z"/>'
    if shape == "cylinder":
        arc, upper, lower = f"A{p.width / 2:.1f} {LID / 2:.1f} 0 0", f"{p.y + LID / 2:.1f}", f"{p.bottom - LID / 2:.1f}"
        rim = f'<path fill="none" d="M{left} {upper}{arc} 0 {right} {upper}"/>'
        return f'<path d="M{left} {upper}{arc} 1 {right} {upper}V{lower}{arc} 1 {left} {lower}z"/>{rim}'
    radius = {"round": 8.0, "stadium": min(p.height / 2, 18.0)}.get(shape, 0.0)
    return f'<rect {_area(p)} rx="{radius:.1f}"/>'


def _area(p: Place) -> str:
    return f'x="{p.x:.1f}" y="{p.y:.1f}" width="{p.width:.1f}" height="{p.height:.1f}"'


def _path(route: Route) -> str:
    """A curve that leaves and reaches boxes at right angles."""
    found = ["M{:.1f} {:.1f}".format(*route.points[0])]
    for (ax, ay), (bx, by) in pairwise(route.points):
        x, y = (ax + bx) / 2, (ay + by) / 2
        bend = (x, ay, x, by) if route.sideways else (ax, y, bx, y)
        found.append(f"V{by:.1f}" if ax == bx else "C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} {:.1f}".format(*bend, bx, by))
    return "".join(found)


def _text(text: str) -> str:
    """The text for XML, which has no control characters."""
    return escape(visible_lines(text))
