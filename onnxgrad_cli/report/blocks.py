"""Parts of a document: headings, paragraphs, tables, code, pictures. `markdown.Writer` writes them as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Name(str):
    """A word from the user's model or command line (a tensor, a file, a command), shown verbatim as code."""


class ModelName(Name):
    """The name of a module, node or value of the model. The HTML page can link it to the picture of the model."""


Inline = str | tuple[str, ...]
"""A piece of text: a string, or a tuple of strings in which each `Name` is shown as code."""

Row = tuple[Inline, ...]
"""The cells of a row of a table."""


class Paragraph(NamedTuple):
    """One or several sentences."""

    text: Inline


class Table(NamedTuple):
    """A table with a header row `head`. `right` has the positions of the columns with numbers, aligned to the right."""

    head: tuple[str, ...]
    rows: list[Row]
    right: frozenset[int] = frozenset()


class Bullets(NamedTuple):
    """A list of short texts."""

    items: list[Inline]


class CodeBlock(NamedTuple):
    """A command or a program to copy, written in `language`."""

    language: str
    text: str


class Picture(NamedTuple):
    """A picture. `draw` returns it as an `svg` element, and `words` is its caption.

    The HTML page shows the element. Markdown can't embed it. It shows `instead` if given, otherwise a link to `file`,
    which is in the folder of the document.
    """

    draw: Callable[[], str]
    words: str
    instead: Table | CodeBlock | None = None
    file: str = ""


Block = Paragraph | Table | Bullets | CodeBlock | Picture


class Section(NamedTuple):
    """A heading and the blocks below it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Page:
    """A whole document.

    Attributes:
        tone: 'good', 'warn' or 'bad', which sets the color of the verdict.
        glance: rows of the short table above the sections, as (label, text).
        appendix: sections that HTML shows collapsed and Markdown omits.
    """

    title: Inline
    verdict: Inline
    tone: str
    glance: list[tuple[str, Inline]]
    sections: list[Section]
    appendix: list[Section] = field(default_factory=list)
