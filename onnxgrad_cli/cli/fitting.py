"""Lines that fit the terminal: what is longer is broken between words, and goes on under where its text begins."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from typing import TextIO

_GAP = re.compile(r"(?<=\S)  +(?=\S)")
"""What stands between two columns of a line."""


def is_dumb() -> bool:
    """Whether the terminal, if there is one, shows all that it is sent, and obeys nothing."""
    return os.environ.get("TERM") == "dumb"


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream leads to; None where it leads to none, and lines may have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fitting(text: str, stream: TextIO) -> str:
    """Lines, broken where a terminal would break them within a word."""
    width = width_of(stream)
    return text if width is None else "\n".join(_broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    columns = [gap.end() for gap in _GAP.finditer(line) if gap.end() <= width // 2]
    begin = columns[-1] if columns else 0
    indent = begin or len(line) - len(line.lstrip()) + 2
    close = line[:begin] + _GAP.sub("  ", line[begin:])
    return textwrap.fill(close, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
