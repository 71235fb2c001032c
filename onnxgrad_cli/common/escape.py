"""Escape untrusted text: replace characters that control a terminal, or that a reader can't see, by escapes.

Names, domains, metadata and columns come from untrusted files. They may contain escape sequences for terminals, marks
that change the direction of text, line breaks, and characters without width. All text that onnxgrad prints, or writes
for people to read, passes through this module. Source: Unicode Standard Annex 44, General_Category and
Default_Ignorable_Code_Point.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Invisible characters that Python counts as printable: fillers and variation selectors."""


def decoded(text: str | bytes) -> str:
    r"""Return a text from a model as str. protobuf returns bytes if it is not UTF-8; invalid bytes become `\xff`."""
    return text if isinstance(text, str) else text.decode(errors="backslashreplace")


def escaped(text: str) -> str:
    r"""Replace line breaks and invisible characters in a text by Python escapes: `\n`, `\x1b`, `\u202e`."""
    return _replaced(text, lambda c: c.encode("unicode_escape").decode())


def escaped_lines(text: str) -> str:
    """Return a text as `escaped` does, but keep its line breaks."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(text: str) -> str:
    r"""Replace invisible characters in the strings of a JSON text by JSON escapes, such as `\u001b`."""
    return "\n".join(_replaced(line, _in_json) for line in text.split("\n"))


def table_cell(text: str) -> str:
    """Return a text as `escaped` does. Put an apostrophe in front if a spreadsheet could take the text for a formula.

    Formulas begin with one of four characters. Numbers that begin with one of them are not changed. Source: OWASP, CSV
    Injection.
    """
    return f"'{escaped(text)}" if text.startswith(("=", "+", "-", "@")) and not _is_number(text) else escaped(text)


def python_literal(text: str) -> str:
    """Return a text as a Python literal, to be used in a program that the reader may run."""
    return escaped(repr(text))


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
