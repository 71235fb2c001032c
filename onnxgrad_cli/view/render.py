"""From a drawing to text: one module a format."""

from __future__ import annotations

from collections.abc import Callable

from onnxgrad_cli.common.visible import visible_lines
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.view.dot import dot
from onnxgrad_cli.view.drawing import Drawing
from onnxgrad_cli.view.html import html
from onnxgrad_cli.view.mermaid import mermaid
from onnxgrad_cli.view.svg import svg

FORMATS: dict[str, Callable[[Drawing], str]] = {"dot": dot, "svg": svg, "mermaid": mermaid, "html": html}
"""The formats of a drawing."""

SUFFIXES = {".dot": "dot", ".gv": "dot", ".svg": "svg", ".mmd": "mermaid", ".mermaid": "mermaid", ".html": "html",
            ".htm": "html"}  # fmt: skip
"""The format that a file's suffix stands for."""


def render(drawing: Drawing, kind: str) -> str:
    """The drawing in one of `FORMATS`.

    Raises:
        UsageError: no such format.
    """
    if kind not in FORMATS:
        raise UsageError(f"no format '{kind}' for drawings", suggest(kind, FORMATS, "formats"))
    return visible_lines(FORMATS[kind](drawing))
