"""Draw curves of a training run: as a line of block characters for a terminal, and as a self-contained SVG.

Values that span more than a factor of ten are drawn on a logarithmic scale, so that small values remain visible. The
same values always give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxgrad_cli.common.checks import is_number
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.report.formatting import scaled

BLOCKS = "▁▂▃▄▅▆▇█"

WIDTH, HEIGHT = 720.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 40.0, 40.0
"""Width, height and margins of the picture of a learning curve, in pixels."""

COLUMNS, SMOOTH = 600, 50
"""Largest number of points in the line of all steps, and in the smoothed line. A point may average several steps."""

STYLE = """
.curve { max-width: 100%; height: auto; } .curve rect { fill: #fff; }
.curve text { font: 11px system-ui, sans-serif; fill: #444; } .curve .h { font-size: 14px; font-weight: 700; }
.curve path { fill: none; stroke: #ddd; stroke-linejoin: round; } .curve .raw { stroke: #9ec5fe; }
.curve .loss { stroke: #0b5ed7; stroke-width: 2; } .curve .val { stroke: #d9480f; } .curve circle { fill: #d9480f; }
@media (max-width: 600px) { .curve text { font-size: 14px; } }
@media (prefers-color-scheme: dark) {
  .curve rect { fill: #16191d; } .curve text { fill: #ccc; } .curve path { stroke: #444; }
  .curve .raw { stroke: #355c8f; }
  .curve .loss { stroke: #6ea8fe; } .curve .val { stroke: #ff9466; } .curve circle { fill: #ff9466; }
}
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The curve of one quantity of a run, as points (step, value).

    Attributes:
        steps: the points for the training steps. Empty for a metric.
        judged: the points measured on the validation data. Empty for the learning rate.
    """

    steps: list[Point] = field(default_factory=list)
    judged: list[Point] = field(default_factory=list)

    @staticmethod
    def of(log: Iterable[Mapping[str, Any]]) -> Curve:
        """Return the curve of the loss, from the lines of a run's log."""
        lines = list(log)
        return Curve(_points([line for line in lines if "rate" in line], "loss"), _points(lines, "val_loss"))

    @staticmethod
    def others(log: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
        """Return metric -> its curve, from the lines of a run's log. Curves of a single point are omitted.

        If the learning rate changes during the run, the key 'rate' has its curve.
        """
        lines = list(log)
        names = dict.fromkeys(name for line in lines for name in line if name.startswith("val_") and name != "val_loss")
        found = {name: Curve(judged=_points(lines, name)) for name in names}
        rates = _points(lines, "rate")
        if len({rate for _, rate in rates}) > 1:
            found["rate"] = Curve(steps=rates)
        return {name: curve for name, curve in found.items() if len(curve.steps) + len(curve.judged) > 1}


def _points(lines: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    """Return the points of the quantity with this key in the log. Lines without a number for it are skipped."""
    points = [(line.get("step"), line.get(name)) for line in lines]
    return [(step, value) for step, value in points if is_number(step) and is_number(value)]  # type: ignore[misc]


def blocks(values: Sequence[float], columns: int = 60) -> str:
    """Return values as a line of block characters, such as '▇▅▃▂▁'.

    If there are more values than columns, each block shows the mean of several values.
    """
    means = [value for _, value in _means(list(enumerate(values)), columns)]
    scale = _scale(means)
    low, high = scale(min(means)), scale(max(means))
    return "".join(BLOCKS[round((scale(v) - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for v in means)


def bars(values: Sequence[float], columns: int = 60) -> str:
    """Return values as a line of block characters whose heights start at 0.

    If there are more values than columns, each block shows the maximum of several values.
    """
    size, top = -(-len(values) // columns), max(*values, 0) or 1
    most = (max(values[i : i + size]) for i in range(0, len(values), size))
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in most)


def area(values: Sequence[float], caption: str) -> str:
    """Return values as a filled step curve above 0, scaled to their maximum: an `svg` element for HTML."""
    top, width = max(*values, 0) or 1, (WIDTH - 4) / len(values)
    steps = "".join(f"V{96 - 92 * value / top:.1f}H{2 + (i + 1) * width:.1f}" for i, value in enumerate(values))
    return (
        f'<svg class="course" viewBox="0 0 {WIDTH:.0f} 100" role="img">'
        f"<title>{_text(caption)}</title>"
        f'<path d="M2 96{steps}V96z" fill="#0b5ed7" fill-opacity=".25" stroke="#0b5ed7"/></svg>'
    )


def trade(axes: tuple[str, str], pairs: Sequence[Point], taken: Point, caption: str) -> str:
    """Return a trade-off curve between two quantities as an `svg` element for HTML. The chosen point is marked.

    Args:
        axes: the names of the two quantities; the first is the horizontal axis.
        pairs: the points of the curve in order; a line joins them.
        taken: the chosen point.
        caption: a description of the picture, for screen readers.
    """
    width, height = max(x for x, _ in (*pairs, taken)) or 1, max(y for _, y in (*pairs, taken)) or 1

    def place(point: Point) -> str:
        x = LEFT + point[0] / width * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f} {HEIGHT - BOTTOM - point[1] / height * (HEIGHT - TOP - BOTTOM):.1f}"

    x, y = place(taken).split()
    marks = [f'<circle cx="{x}" cy="{y}" r="2.5" fill="#0b5ed7"/>' for x, y in (place(p).split() for p in pairs)]
    frame = f"M{LEFT:.1f} {TOP:.1f}V{HEIGHT - BOTTOM:.1f}H{WIDTH - RIGHT:.1f}"
    words = [
        (LEFT - 6, TOP + 4, "end", scaled(height, "")), (LEFT - 6, HEIGHT - BOTTOM + 4, "end", "0"),
        (WIDTH - RIGHT, HEIGHT - BOTTOM + 16, "end", scaled(width, "")), (LEFT, TOP - 12, "start", axes[1]),
        (WIDTH - RIGHT, HEIGHT - 6, "end", axes[0]),
    ]  # fmt: skip
    texts = [
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="currentColor">{_text(text)}</text>'
        for x, y, anchor, text in words
    ]
    return "".join([
        f'<svg class="course" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img"><title>{_text(caption)}</title>',
        f'<path d="{frame}" fill="none" stroke="currentColor" stroke-opacity=".4"/>',
        f'<path d="M{"L".join(map(place, pairs))}" fill="none" stroke="#0b5ed7"/>', *marks, *texts,
        f'<circle class="taken" cx="{x}" cy="{y}" r="6" fill="none" stroke="#d9480f" stroke-width="2">',
        "<title>taken</title></circle></svg>",
    ])  # fmt: skip


def svg(curve: Curve, caption: str) -> str:
    """Return a curve with at least one point as an `svg` element."""
    return "\n".join(_lines(curve, caption))


def _lines(curve: Curve, caption: str) -> Iterator[str]:
    """Yield the lines of the `svg` element: frame, axes, losses and validation losses."""
    raw, smooth = _means(curve.steps, COLUMNS), _means(curve.steps, SMOOTH) if len(curve.steps) > SMOOTH else []
    shown = [loss for _, loss in (*raw, *curve.judged)]
    scale, last = _scale(shown), max(*(step for step, _ in (*curve.steps[-1:], *curve.judged[-1:])), 2)
    low, high = scale(min(shown)), scale(max(shown))

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - 1) / (last - 1) * (WIDTH - LEFT - RIGHT)
        y = TOP + (high - scale(point[1])) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)
        return x, y

    yield f'<svg class="curve" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    yield f' width="{WIDTH:.0f}" height="{HEIGHT:.0f}" role="img">\n<title>{_text(caption)}</title>'
    yield f'<style>{STYLE}</style>\n<rect width="100%" height="100%"/>'
    yield f'<text class="h" x="{LEFT:.0f}" y="22">{_text(caption)}</text>'
    for value in _ticks(min(shown), max(shown), scale is math.log):
        y = place((1, value))[1]
        yield f'<path d="M{LEFT:.1f} {y:.1f}H{WIDTH - RIGHT:.1f}"/>'
        yield f'<text x="{LEFT - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    for step in _ticks(1, last, False):
        if step == int(step):
            x = place((step, shown[0]))[0]
            yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18:.1f}" text-anchor="middle">{int(step):,}</text>'
    yield f'<text x="{WIDTH - RIGHT:.1f}" y="{HEIGHT - 6:.1f}" text-anchor="end">step</text>'
    drawn = [("raw", "each step", raw), ("loss", "smoothed", smooth), ("val", "validation", curve.judged)]
    x = WIDTH - RIGHT - 100 * len(drawn)
    for kind, words, points in drawn:
        if points:
            yield f'<path class="{kind}" d="M{"L".join("{:.1f} {:.1f}".format(*place(p)) for p in points)}"/>'
            yield f'<path class="{kind}" d="M{x:.1f} 18h18"/><text x="{x + 24:.1f}" y="22">{words}</text>'
            x += 100
    yield from ('<circle cx="{:.1f}" cy="{:.1f}" r="3"/>'.format(*place(point)) for point in curve.judged)
    yield "</svg>"


def _text(text: str) -> str:
    from html import escape  # reports without pictures don't need it

    return escape(escaped(text))


def _scale(values: Sequence[float]) -> Callable[[float], float]:
    return math.log if min(values) > 0 and max(values) > 10 * min(values) else float


def _means(points: Sequence[Point], columns: int) -> list[Point]:
    """Return at most `columns` points, each the mean of several consecutive ones."""
    size = max(-(-len(points) // columns), 1)
    parts = (points[i : i + size] for i in range(0, len(points), size))
    return [(sum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part)) for part in parts]


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Return about four round numbers between `low` and `high`."""
    if logarithmic:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        found = found if len(decades) < 5 else found[:: 3 * (1 + len(decades) // 8)]
    else:
        rough = ((high - low) or 1) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        unit = power * min((1, 2, 5, 10), key=lambda digit: abs(digit * power - rough))
        found = [i * unit for i in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
    return [value for value in found if low <= value <= high]
