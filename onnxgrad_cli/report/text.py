"""The report as plain text, and its short form for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnxgrad_cli.report.blocks import Block, Bullets, Course, Inline, Listing, Paragraph, Table, Trade
from onnxgrad_cli.report.curve import bars
from onnxgrad_cli.report.document import sections, title
from onnxgrad_cli.report.glance import glance
from onnxgrad_cli.report.model import Report
from onnxgrad_cli.report.words import names, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100


def text(report: Report) -> str:
    """The report as plain text."""
    heading = plain(title(report))
    lines = [heading, "=" * len(heading), "", *textwrap.wrap(plain(report.verdict), WIDTH), ""]
    rows: list[tuple[Inline, ...]] = list(glance(report))
    if rows:
        lines += [*_table(Table(("", "at a glance"), rows)), ""]
    for section in sections(report):
        lines += [section.title, "-" * len(section.title), ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join(lines)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph(words):
            yield from textwrap.wrap(plain(words), WIDTH)
        case Bullets(items):
            for item in items:
                yield from textwrap.wrap(plain(item), WIDTH, initial_indent="- ", subsequent_indent="  ")
        case Listing(_, words):
            yield textwrap.indent(words.rstrip("\n"), "    ")
        case Course(values, words):
            yield from (*textwrap.wrap(words, WIDTH), bars(values))
        case Trade(few=few):
            yield from _table(few)
        case Table():
            yield from _table(block)


def _table(table: Table) -> Iterator[str]:
    cells = [[plain(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        padded = (
            cell.rjust(width) if i in table.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


COLORS = {"good": "green", "warn": "yellow", "bad": "red"}

MOST_REFUSALS = 25


def summary(report: Report) -> RenderableType:
    """The report in a few lines, for `rich.console.Console.print`."""
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    style = COLORS[report.tone]
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, words in _summary(report):
        grid.add_row(label, Text(plain(words)))
    return Group(Text(plain(report.verdict), style=f"bold {style}"), grid)


def _summary(report: Report) -> Iterator[tuple[str, Inline]]:
    """The lines of the short form: label and words."""
    if report.error:
        yield "error", report.error.partition("\n")[0]
    for refusal in report.refusals[:MOST_REFUSALS]:
        yield "node", str(refusal) + (f"; {refusal.hint}" if refusal.hint else "")
    if len(report.refusals) > MOST_REFUSALS:
        yield "", f"... and {len(report.refusals) - MOST_REFUSALS:,} more"
    if report.hint:
        yield "hint", report.hint
    yield from glance(report)
    for step in report.proof.steps if report.proof else ():
        if step.status == "failed":
            yield "failed", f"{step.name}: {step.detail}"
    if report.files:
        yield "files", names([file.path for file in report.files])
    for todo in report.next:
        if todo.language == "sh":
            yield "next", todo.text
