"""Text that others wrote, made visible: what a terminal would obey, or a reader would not see, becomes an escape.

Names, domains, metadata and columns come from strangers' files. They may hold escape sequences of a terminal, marks
that turn the direction of writing, line breaks, and what has no width. All that onnxgrad prints, or writes for people
to read, goes through here. Source: Unicode Standard Annex 44, General_Category and Default_Ignorable_Code_Point.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""What shows nothing although Python counts it as printable: fillers, and selectors of variants."""


def decoded(text: str | bytes) -> str:
    r"""A text of a model file: protobuf gives out what is no UTF-8 as bytes, which become escapes, `\xff`."""
    return text if isinstance(text, str) else text.decode(errors="backslashreplace")


def visible(text: str) -> str:
    r"""The text on one line, with what can't be seen as escapes of Python: `\x1b`, `\u202e`, `\n`."""
    return _replaced(text, lambda c: c.encode("unicode_escape").decode())


def visible_lines(text: str) -> str:
    """The text as `visible` has it, but for its line breaks."""
    return "\n".join(map(visible, text.split("\n")))


def visible_json(text: str) -> str:
    r"""A JSON text with what can't be seen in its strings as escapes of JSON, `\u001b`: it says the same as before."""
    return "\n".join(_replaced(line, _in_json) for line in text.split("\n"))


def table_cell(text: str) -> str:
    """The text as `visible` has it, which no spreadsheet takes for a formula: an apostrophe stands before one.

    Formulas begin with one of four characters; a number that does is a number. Source: OWASP, CSV Injection.
    """
    return f"'{visible(text)}" if text.startswith(("=", "+", "-", "@")) and not _is_number(text) else visible(text)


def python_literal(text: str) -> str:
    """The text as a literal of Python, for a program that a reader is to run."""
    return visible(repr(text))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _replaced(text: str, escape: Callable[[str], str]) -> str:
    if text.isprintable() and not _IGNORABLE.search(text):
        return text
    return "".join(c if c.isprintable() and not _IGNORABLE.match(c) else escape(c) for c in text)


def _in_json(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
