"""A drawing as a Mermaid flowchart, which forges and Markdown viewers draw themselves.

Source: mermaid.js.org, Flowcharts - Basic Syntax (entity codes, shapes, classes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.view.drawing import LOOKS, Box, Drawing, Group, Kind

SHAPES = {"box": "[{}]", "round": "({})", "stadium": "([{}])", "cylinder": "[({})]", "hexagon": "{{{{{}}}}}"}

HEAD = "%% drawn by onnxgrad"

MAX_EDGES, MAX_TEXT = 500, 50_000
"""Edges and characters that Mermaid draws, unless the page around it is set up for more."""

MARKED = re.compile(r"""[&<>"#;`\\|{}*~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|^[-+](?=\s)|(?<=^\d)[.)]|(?<=^\d\d)[.)]""")
"""What Mermaid, HTML or Markdown would read as a mark."""


def mermaid(drawing: Drawing) -> str:
    """The drawing as a flowchart.

    A node and its gradient share no frame here: Mermaid would stretch it from the one far above to the other below.
    """
    return "\n".join(_lines(drawing)) + "\n"


def too_large(text: str) -> bool:
    """Whether a text is a flowchart that Mermaid refuses, as it is set up by default."""
    return text.startswith(HEAD) and (text.count(" --") > MAX_EDGES or len(text) > MAX_TEXT)


def _lines(drawing: Drawing) -> Iterator[str]:
    """The lines of the Mermaid diagram."""
    yield f"{HEAD}\nflowchart TB"
    for part in drawing.root.parts:
        yield from _part(part, "  ")
    for edge in drawing.edges:
        label = drawing.label(edge)
        arrow = f'-->|"{_escaped(label)}"|' if label else "-->"
        yield f"  {edge.source} {arrow} {edge.target}"
    yield '  subgraph legend ["legend"]'
    yield "    direction TB"
    for kind in drawing.kinds:
        yield f"    legend_{kind}{_shaped(kind, LOOKS[kind].meaning)}"
    yield "  end"
    yield "  style legend fill:none,stroke:#808080"
    for kind in drawing.kinds:
        look = LOOKS[kind]
        border = {"solid": "1px", "dashed": "1px,stroke-dasharray:4 3", "double": "3px"}[look.border]
        yield f"  classDef {kind}_ fill:{look.fill},stroke:{look.color},color:#000,stroke-width:{border}"


def _part(part: Box | Group, indent: str) -> Iterator[str]:
    if isinstance(part, Box):
        yield f"{indent}{part.key}{_shaped(part.kind, *[part.title, *part.lines])}"
        return
    inside = indent + "  " if part.title else indent
    if part.title:
        yield f'{indent}subgraph {part.key} ["{_escaped(part.title)}"]'
    for inner in part.parts:
        yield from _part(inner, inside)
    if part.title:
        yield f"{indent}end"
        yield f"{indent}style {part.key} fill:none,stroke:{LOOKS[part.kind].color if part.kind else '#808080'}"


def _shaped(kind: Kind, *lines: str) -> str:
    return SHAPES[LOOKS[kind].shape].format(f'"{"<br/>".join(map(_escaped, lines))}"') + f":::{kind}_"


def _escaped(text: str) -> str:
    """The text with every mark as a character code."""
    return MARKED.sub(lambda mark: "".join(f"#{ord(c)};" for c in mark[0]), visible(text))
