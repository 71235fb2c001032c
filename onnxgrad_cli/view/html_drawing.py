"""Write a drawing as a self-contained interactive HTML page that loads nothing from the network.

A script in the page computes the layout of the unfolded parts. It uses dagre (MIT licence), which is embedded in the
page too.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from onnxgrad_cli.autodiff.registry import lookup
from onnxgrad_cli.common.escape import escaped, escaped_lines
from onnxgrad_cli.view.drawing import LOOKS, BoxKind, Drawing
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

DIFFERENTIATED = frozenset({BoxKind.FORWARD, BoxKind.LOSS})
"""Kinds of nodes for which the page shows the differentiation rule of the operator."""


def html(drawing: Drawing, limit: int = 150, depth: int | None = None) -> str:
    """Return the drawing as an HTML page.

    Args:
        drawing: the drawing of the whole model, not folded.
        limit: the largest number of boxes for nodes when the page opens. Levels of modules are unfolded as long as this
            number is not exceeded. 0 unfolds all levels.
        depth: the number of levels that are unfolded when the page opens. It is used instead of `limit`.
    """
    style, script, dagre = (_file(name) for name in ("page.css", "page.js", "dagre.min.js"))
    dagre = f"{_file('dagre.min.js.LEGAL.txt')}{dagre}"
    return PAGE.format(
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(dagre)} {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        title=escape(escaped(drawing.caption)),
        style=style,
        body=_file("page.html").format(title=escape(escaped(drawing.title))),
        data=_in_script(_data(drawing) | {"limit": limit, "depth": depth}),
        dagre=dagre,
        script=script,
    )


def _file(name: str) -> str:
    """Return the text of a file that is embedded in the page, with its control characters escaped."""
    return escaped_lines((FOLDER / name).read_text("utf-8"))


def _hash(text: str) -> str:
    """Return the hash of a script or style in the form that a content security policy expects."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _in_script(data: object) -> str:
    """Return data as ASCII JSON with `<`, `>` and `&` escaped, so that no text in it can end the script element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})


# -- data -----------------------------------------------------------------------------------------------------------


def _data(drawing: Drawing) -> dict[str, Any]:
    """Return the data for the script. 'items' lists boxes and branches, each with the index of its parent."""
    items: list[list[Any]] = []
    numbers: dict[str, int] = {}
    kinds = list(BoxKind)
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
        "kinds": [{"name": kind, **asdict(LOOKS[kind])} for kind in kinds],
        "shown": [kinds.index(kind) for kind in drawing.kinds],
        "items": items,
        "edges": [[numbers[edge.source], numbers[edge.target], *edge.tensors] for edge in drawing.edges],
        "rules": {title: _rule(title) for title in sorted(operators)},
    }


def _flat(branch: Branch, parent: int, items: list[list[Any]]) -> Iterator[tuple[Branch, int]]:
    """Yield each branch with the index of its parent in `items`. The caller appends one item per yielded branch."""
    number = len(items)
    yield branch, parent
    for child in branch.children:
        yield from _flat(child, number, items)


def _rule(title: str) -> str:
    """Return a description of an operator's differentiation rule, or "" if it has no rule."""
    domain, _, name = title.rpartition(".")
    rule = lookup(name, domain)
    if rule is None:
        return ""
    if rule.refusal:
        return f"refused: {escaped(rule.refusal)}"
    if rule.is_zero:
        return "zero by mathematics"
    return escaped(f"{rule.source}; {rule.kink}" if rule.kink else rule.source)
