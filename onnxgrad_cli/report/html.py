"""The report as one HTML page that needs nothing else: no script, no font, no image, light and dark.

Only a picture of the model is a page of its own, which is linked where it was written too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from urllib.parse import quote

from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.report.blocks import (
    Block,
    Bullets,
    Course,
    Inline,
    Listing,
    Name,
    Page,
    Paragraph,
    Picture,
    Place,
    Table,
    Trade,
)
from onnxgrad_cli.report.curve import area, trade
from onnxgrad_cli.report.words import pieces, plain

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #f85149; --warn: #d29922; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.verdict { border-left: .35rem solid var(--tone); background: var(--soft); padding: .7rem 1rem; font-weight: 600; }
.good { --tone: var(--good); } .bad { --tone: var(--bad); } .warn { --tone: var(--warn); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .9rem; }
.wide { overflow: auto; max-height: 40rem; } @media print { .wide { max-height: none; } }
th { position: sticky; top: 0; background: Canvas; } table { border-collapse: collapse; margin: .8rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-size: .85rem; font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: .88em/1.5 ui-monospace, monospace; background: var(--soft); border-radius: .25rem; }
figure { margin: .8rem 0; max-width: 45rem; } figcaption { font-size: .85rem; } .course { width: 100%; height: auto; }
code { padding: .05rem .25rem; overflow-wrap: anywhere; } pre { padding: .8rem 1rem; overflow-x: auto; }
"""


def html(page: Page) -> str:
    """A document as a page of HTML."""
    return "\n".join(_page(page)) + "\n"


def _page(page: Page) -> Iterator[str]:
    """The lines of the HTML document."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(plain(page.title))}</title>\n<style>{STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{_inline(page.title)}</h1>"
    yield f'<p class="verdict {page.tone}">{_inline(page.verdict)}</p>'
    yield from _table(Table(("", "at a glance"), list(page.glance)))
    yield "<nav>"
    yield from (f'<a href="#{_anchor(section.title)}">{_inline(section.title)}</a>' for section in page.sections)
    yield "</nav>"
    for section in page.sections:
        yield f'<section id="{_anchor(section.title)}">\n<h2>{_inline(section.title)}</h2>'
        for block in section.blocks:
            yield from _block(block, page.picture)
        yield "</section>"
    yield "</body>\n</html>"


def _anchor(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower())


def _block(block: Block, picture: str) -> Iterator[str]:
    match block:
        case Paragraph(text):
            yield f"<p>{_inline(text)}</p>"
        case Bullets(items):
            yield f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in items)}</ul>"
        case Listing(_, text):
            yield f"<pre>{escape(text)}</pre>"
        case Picture(svg):
            yield f'<div class="wide">{svg}</div>'
        case Course(values, words):
            yield f"<figure>{area(values, words)}<figcaption>{escape(words)}</figcaption></figure>"
        case Trade(axes, pairs, taken, words):
            yield f"<figure>{trade(axes, pairs, taken, words)}<figcaption>{escape(words)}</figcaption></figure>"
        case Table():
            yield from _table(block, picture)


def _table(table: Table, picture: str = "") -> Iterator[str]:
    def line(kind: str, row: tuple[Inline, ...]) -> str:
        side = (' class="n"' if i in table.right else "" for i in range(len(row)))
        return (
            f"<tr>{''.join(f'<{kind}{s}>{_inline(c, picture)}</{kind}>' for s, c in zip(side, row, strict=True))}</tr>"
        )

    yield f'<div class="wide"><table>\n<thead>{line("th", table.head)}</thead>\n<tbody>'
    yield from (line("td", row) for row in table.rows)
    yield "</tbody></table></div>"


def _inline(text: Inline, picture: str = "") -> str:
    return "".join(_piece(piece, picture) for piece in pieces(text) if piece)


def _piece(piece: str, picture: str) -> str:
    """A word, a name, or a place with the way to it in the picture of the model."""
    shown = escape(visible(piece))
    if not isinstance(piece, Name):
        return shown
    if picture and isinstance(piece, Place):
        shown = f'<a href="{escape(picture)}#{quote(visible(piece), safe="")}">{shown}</a>'
    return f"<code>{shown}</code>"
