"""The report as Markdown (CommonMark with GitHub's tables), laid out so that it reads well unrendered too."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
    Table,
    Trade,
)
from onnxgrad_cli.report.curve import bars
from onnxgrad_cli.report.words import pieces

WIDEST = 90
"""Columns are padded up to this width."""


def markdown(page: Page) -> str:
    """A document as Markdown."""
    lines = [f"# {_inline(page.title)}", "", f"**{_inline(page.verdict)}**", ""]
    rows: list[tuple[Inline, ...]] = list(page.glance)
    if rows:
        lines += [*_table(Table(("", "at a glance"), rows)), ""]
    for section in page.sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join(lines)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph(text):
            yield _line(text)
        case Bullets(items):
            yield from (f"- {_line(item)}" for item in items)
        case Listing(language, text):
            longest = max((len(run) for run in re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            yield from (fence + language, text.rstrip("\n"), fence)
        case Picture(_, file, words):
            yield f"![{_words(words)}]({file})"
        case Course(values, words):
            yield from (_line(words), "", "```text", bars(values), "```")
        case Trade(few=few):
            yield from _table(few)
        case Table():
            yield from _table(block)


def _table(table: Table) -> Iterator[str]:
    """The lines of a table, its columns as wide as their widest cell."""
    cells = [[_cell(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [min(WIDEST, max(3, *(len(cell) for cell in column))) for column in zip(*cells, strict=True)]

    def line(row: list[str]) -> str:
        padded = [
            cell.rjust(width) if i in table.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    yield line(cells[0])
    rules = (("-" * (w - 1) + ":") if i in table.right else "-" * w for i, w in enumerate(widths))
    yield f"| {' | '.join(rules)} |"
    yield from map(line, cells[1:])


def _cell(text: Inline) -> str:
    return _inline(text).replace("|", "\\|")


def _line(text: Inline) -> str:
    """A run of text at the beginning of a line, where it must not begin a heading, a list or a rule."""
    return re.sub(r"^(\s*\d*)([-+=#.)])", r"\1\\\2", _inline(text))


def _inline(text: Inline) -> str:
    return "".join(_name(piece) if isinstance(piece, Name) else _words(piece) for piece in pieces(text))


def _name(name: str) -> str:
    """A code span, fenced by more backticks than any run in it."""
    text = visible(name)
    if not text.strip():
        return f"`{text or ' '}`" if text else ""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _words(text: str) -> str:
    """Plain words, with what Markdown would take for markup escaped."""
    text = re.sub(r"([\\`*\[\]<>&~])", r"\\\1", visible(text))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
