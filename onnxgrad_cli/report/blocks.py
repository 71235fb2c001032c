"""What a document consists of: headings, sentences, tables, listings, pictures; a format decides how they look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Name(str):
    """A word of the user's (a tensor, a file, a command), to be shown as it is."""


class Place(Name):
    """The name of something in the model, a module, a node or a value, to which a picture of it may be opened."""


Inline = str | tuple[str, ...]
"""A run of text: plain words and `Name`s."""


class Paragraph(NamedTuple):
    """One or several sentences."""

    text: Inline


class Table(NamedTuple):
    """Rows under a head; columns in `right` hold numbers and stand flush right."""

    head: tuple[str, ...]
    rows: list[tuple[Inline, ...]]
    right: frozenset[int] = frozenset()


class Bullets(NamedTuple):
    """A list of short texts."""

    items: list[Inline]


class Listing(NamedTuple):
    """Something to type or to run, in `language`."""

    language: str
    text: str


class Picture(NamedTuple):
    """An `svg` element that also stands in `file`, beside the document; `words` say what it shows."""

    svg: str
    file: str
    words: str


class Course(NamedTuple):
    """How a quantity goes from 0 up and down: its values in order, and what they are and how many at most, in words."""

    values: list[int]
    words: str


class Trade(NamedTuple):
    """How much of one quantity is to be had for how much of another.

    Attributes:
        axes: what the two are, with their units.
        pairs: what may be had, in order.
        taken: what was taken, which need not be one of these.
        words: what it shows.
        few: some of the pairs, where there are no pictures.
    """

    axes: tuple[str, str]
    pairs: tuple[tuple[int, int], ...]
    taken: tuple[int, int]
    words: str
    few: Table


Block = Paragraph | Table | Bullets | Listing | Picture | Course | Trade


class Section(NamedTuple):
    """A heading and what stands under it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Page:
    """A whole document.

    Attributes:
        tone: 'good', 'warn' or 'bad'.
        picture: a link to the page with the picture of the model, in which places are; "" where there is none.
    """

    title: Inline
    verdict: Inline
    tone: str
    glance: list[tuple[str, Inline]]
    sections: list[Section]
    picture: str = ""
