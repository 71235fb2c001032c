"""Write the report as a single HTML page without scripts, fonts or image files, for light and dark mode.

markdown-it-py renders the Markdown of the report, with raw HTML turned off. The page adds a style sheet, links to the
sections and the pictures. If a page with the picture of the model was written too, the names of modules, nodes and
values link to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any
from urllib.parse import quote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.report.blocks import ModelName, Page, Picture
from onnxgrad_cli.report.formatting import plain
from onnxgrad_cli.report.markdown import Writer, code

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #f85149; --warn: #d29922; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.verdict { border-left: .35rem solid var(--tone); background: var(--soft); padding: .7rem 1rem; }
.good { --tone: var(--good); } .bad { --tone: var(--bad); } .warn { --tone: var(--warn); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .9rem; }
.wide { overflow: auto; max-height: 40rem; } @media print { .wide { max-height: none; } }
th { position: sticky; top: 0; background: Canvas; } table { border-collapse: collapse; margin: .8rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-size: .85rem; font-weight: 600; } td[style] { font-variant-numeric: tabular-nums; }
code, pre { font: .88em/1.5 ui-monospace, monospace; background: var(--soft); border-radius: .25rem; }
code { padding: .05rem .25rem; overflow-wrap: anywhere; } .course { width: 100%; max-width: 45rem; height: auto; }
pre { padding: .8rem 1rem; overflow-x: auto; } pre code { padding: 0; background: none; font-size: 1em; }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def html(page: Page, picture: str = "") -> str:
    """Return a document as an HTML page.

    Args:
        page: the document.
        picture: a relative link to the page with the picture of the model, to which names of its parts are linked. ""
            if that page doesn't exist.
    """
    writer = _Writer(picture)
    parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
    body = parser.render(writer.write(replace(page, appendix=[])), {"svgs": writer.svgs})
    body = body.replace("<p>", f'<p class="verdict {page.tone}">', 1)
    links = [f'<a href="#{_anchor(section.title)}">{escape(section.title)}</a>' for section in page.sections]
    body = body.replace("<h2", "\n".join(["<nav>", *links, "</nav>", "<h2"]), 1)
    if page.appendix:
        details = parser.render(writer.sections(page.appendix), {"svgs": writer.svgs})
        titles = escape(", ".join(section.title.lower() for section in page.appendix))
        body += f"<details>\n<summary>Details: {titles}</summary>\n{details}</details>\n"
    return PAGE.format(title=escape(plain(page.title)), style=STYLE, body=body)


class _Writer(Writer):
    """Writes Markdown as an intermediate step. A picture becomes an image whose address is its index in `svgs`."""

    def __init__(self, picture: str) -> None:
        self.link = picture
        self.svgs: list[str] = []

    def picture(self, picture: Picture) -> Iterator[str]:
        yield f"![]({len(self.svgs)})"
        self.svgs.append(picture.draw())

    def model_name(self, name: ModelName) -> str:
        shown = code(name)
        return f"[{shown}]({self.link}#{quote(escaped(name), safe='')})" if self.link and shown else shown


class _Renderer(RendererHTML):
    """Renders the intermediate Markdown as HTML: scrolling tables, headings with anchors, and `svg` pictures."""

    def table_open(self, *_: object) -> str:
        return '<div class="wide"><table>\n'

    def table_close(self, *_: object) -> str:
        return "</table></div>\n"

    def heading_open(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        if tokens[idx].tag == "h2":
            tokens[idx].attrSet("id", _anchor(tokens[idx + 1].content))
        return self.renderToken(tokens, idx, options, env)

    def image(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        svg: str = env["svgs"][int(str(tokens[idx].attrGet("src")))]
        return svg


def _anchor(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower())
