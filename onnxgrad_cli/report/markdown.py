"""Write the report as Markdown (CommonMark with GitHub's tables) that is also readable as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from onnxgrad_cli.common.escape import escaped, escaped_lines
from onnxgrad_cli.report.blocks import (
    Block,
    Bullets,
    CodeBlock,
    Inline,
    ModelName,
    Name,
    Page,
    Paragraph,
    Picture,
    Section,
    Table,
)
from onnxgrad_cli.report.formatting import pieces

WIDEST = 90
"""Cells are padded to the widest cell of their column, but to at most this many characters."""


class Writer:
    """Writes a document as Markdown. The HTML report uses a subclass that shows pictures and links."""

    def write(self, page: Page) -> str:
        """Return the whole document."""
        lines = [f"# {self._inline(page.title)}", "", f"**{self._inline(page.verdict)}**", ""]
        if page.glance:
            lines += [*self._table(Table(("", "at a glance"), list(page.glance))), ""]
        lines.append(self.sections(page.sections))
        if page.appendix:
            titles = ", ".join(section.title.lower() for section in page.appendix)
            lines += [f"A report in HTML or JSON also contains: {titles}.", ""]
        return "\n".join(lines)

    def sections(self, sections: Sequence[Section]) -> str:
        """Return sections with their headings."""
        lines = []
        for section in sections:
            lines += [f"## {section.title}", ""]
            for block in section.blocks:
                lines += [*self._block(block), ""]
        return "\n".join(lines)

    def picture(self, picture: Picture) -> Iterator[str]:
        """Yield the lines for a picture."""
        if picture.instead:
            yield from self._block(picture.instead)
        else:
            yield f"![{_words(picture.words)}]({picture.file})"

    def model_name(self, name: ModelName) -> str:
        """Return the Markdown for the name of a module, node or value of the model."""
        return code(name)

    def _block(self, block: Block) -> Iterator[str]:
        match block:
            case Paragraph(text):
                yield _at_line_start(self._inline(text))
            case Bullets(items):
                yield from (f"- {_at_line_start(self._inline(item))}" for item in items)
            case CodeBlock(language, text):
                fence = _fence(text, 3)
                yield from (fence + language, escaped_lines(text).rstrip("\n"), fence)
            case Picture(words=words, file=file):
                if not file:
                    yield from (_at_line_start(_words(words)), "")
                yield from self.picture(block)
            case Table():
                yield from self._table(block)

    def _table(self, table: Table) -> Iterator[str]:
        """Yield the lines of a table. Columns are padded to their widest cell, or to `WIDEST` if that is smaller."""
        cells = [[self._inline(cell).replace("|", "\\|") for cell in row] for row in (table.head, *table.rows)]
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

    def _inline(self, text: Inline) -> str:
        shown = []
        for piece in pieces(text):
            if isinstance(piece, ModelName):
                shown.append(self.model_name(piece))
            else:
                shown.append(code(piece) if isinstance(piece, Name) else _words(piece))
        return "".join(shown)


def code(name: str) -> str:
    """Return a name as a code span. Its fences are longer than any sequence of backticks in the name."""
    text = escaped(name)
    if not text.strip():
        return f"`{text or ' '}`" if text else ""
    fence = _fence(text, 1)
    space = " " if text[0] in "` " or text[-1] in "` " else ""  # a parser removes one space from each end
    return f"{fence}{space}{text}{space}{fence}"


def _fence(text: str, least: int) -> str:
    """Return a fence of at least `least` backticks that is longer than any sequence of backticks in the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _words(text: str) -> str:
    """Return plain text in which the characters that Markdown would read as markup are escaped."""
    text = re.sub(r"([\\`*\[\]<>&~]|!$)", r"\\\1", escaped(text))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def _at_line_start(text: str) -> str:
    """Return a text, escaped so that Markdown does not read its start as a code block, heading, list or rule."""
    return re.sub(r"^(\d*)([-+=#.)])", r"\1\\\2", text.lstrip())
