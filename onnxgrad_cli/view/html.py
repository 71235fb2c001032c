"""A drawing as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from html import escape

from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.view.drawing import Drawing
from onnxgrad_cli.view.svg import picture

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="onnxgrad">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ margin: 0; background: #fff; }} svg {{ display: block; margin: 0 auto; }}</style>
</head>
<body>
{picture}
</body>
</html>
"""


def html(drawing: Drawing) -> str:
    """The drawing as a page."""
    return PAGE.format(title=escape(visible(drawing.caption)), picture=picture(drawing))
