"""A drawing as one HTML page to look around in, with its script and its layout in it: no network, no font.

The layout of what is unfolded is computed in the page, by dagre (MIT licence), which lies beside the script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from onnxgrad_cli.autodiff.registry import lookup
from onnxgrad_cli.common.visible import visible, visible_lines
from onnxgrad_cli.view.drawing import LOOKS, Drawing, Kind
from onnxgrad_cli.view.tree import Branch, tree

FOLDER = Path(__file__).parent / "page"

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="onnxgrad">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{dagre}</script>
<script>{script}</script>
</body>
</html>
"""

DIFFERENTIATED = frozenset({Kind.FORWARD, Kind.LOSS})
"""Kinds of nodes that have a rule."""


def html(drawing: Drawing, limit: int = 150, depth: int | None = None) -> str:
    """The drawing as a page.

    Args:
        drawing: the whole model, unfolded.
        limit: levels of modules are unfolded at first while no more boxes than that stand for nodes; 0: all are.
        depth: so many levels are unfolded at first instead.
    """
    style, script, dagre = (_file(name) for name in ("page.css", "page.js", "dagre.min.js"))
    dagre = f"{_file('dagre.min.js.LEGAL.txt')}{dagre}"
    return PAGE.format(
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(dagre)} {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        title=escape(visible(drawing.caption)),
        style=style,
        body=_file("page.html").format(title=escape(visible(drawing.title))),
        data=_in_script(_data(drawing) | {"limit": limit, "depth": depth}),
        dagre=dagre,
        script=script,
    )


def _file(name: str) -> str:
    """A file of the page as it will stand in it: a control character in a literal of JavaScript becomes its escape."""
    return visible_lines((FOLDER / name).read_text("utf-8"))


def _hash(text: str) -> str:
    """What the content security policy calls a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _in_script(data: object) -> str:
    """JSON that no text in it can end: without `<`, `>` and `&`, and with escapes for what is not ASCII."""
    text = json.dumps(data, separators=(",", ":"))
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})


# -- data -----------------------------------------------------------------------------------------------------------


def _data(drawing: Drawing) -> dict[str, Any]:
    """What the script reads: boxes and branches in one list, each with the number of the one around it."""
    items: list[list[Any]] = []
    numbers: dict[str, int] = {}
    kinds = list(Kind)
    for branch, parent in _flat(tree(drawing), -1, items):
        box = branch.box
        if box is None:
            items.append([parent, -2 if branch.row else -1, branch.title])
        else:
            numbers[box.key] = len(items)
            items.append([parent, kinds.index(box.kind), box.title, box.lines, box.details, box.nodes])
    operators = {box.title for box in drawing.boxes.values() if box.nodes and box.kind in DIFFERENTIATED}
    return {
        "caption": drawing.caption,
        "kinds": [
            {"name": kind, "fill": LOOKS[kind].fill, "color": LOOKS[kind].color, "shape": LOOKS[kind].shape,
             "border": LOOKS[kind].border, "meaning": LOOKS[kind].meaning} for kind in kinds
        ],
        "shown": [kinds.index(kind) for kind in drawing.kinds],
        "items": items,
        "edges": [[numbers[edge.source], numbers[edge.target], *edge.tensors] for edge in drawing.edges],
        "rules": {title: _rule(title) for title in sorted(operators)},
    }  # fmt: skip


def _flat(branch: Branch, parent: int, items: list[list[Any]]) -> Iterator[tuple[Branch, int]]:
    """Each branch with the number of the one around it, which is how many came before that."""
    number = len(items)
    yield branch, parent
    for child in branch.children:
        yield from _flat(child, number, items)


def _rule(title: str) -> str:
    """How an operator is differentiated, in words."""
    domain, _, name = title.rpartition(".")
    rule = lookup(name, domain)
    if rule is None:
        return ""
    if rule.refusal:
        return f"refused: {visible(rule.refusal)}"
    if rule.is_zero:
        return "zero by mathematics"
    return visible(f"{rule.source}; {rule.kink}" if rule.kink else rule.source)
