"""Text made visible: for every kind of character, and as JSON and Python that say the same."""

from __future__ import annotations

import ast
import json
import sys
import unicodedata

import pytest

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.escape import escaped, escaped_json, escaped_lines, python_literal, table_cell

EVERY = "".join(map(chr, [*range(0x20000), *range(0xE0000, 0xE0200), sys.maxunicode]))
"""Every character but those of Han in the second plane, and what is not assigned."""

SEEN = {"L", "M", "N", "P", "S"}
"""The major categories of what is drawn."""


def test_what_is_not_drawn_becomes_an_escape() -> None:
    shown = escaped(EVERY)
    assert {unicodedata.category(c)[0] for c in shown} - SEEN == {"Z"} and set(shown) & {" "}
    assert not {c for c in shown if unicodedata.category(c)[0] == "Z"} - {" "}
    for name in ("HANGUL FILLER", "VARIATION SELECTOR-16", "COMBINING GRAPHEME JOINER", "ZERO WIDTH SPACE"):
        assert unicodedata.lookup(name) not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0/weight é 名 😀", "layers.0/weight é 名 😀"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x9b\u202e\u200b\u3164", r"\x9b\u202e\u200b\u3164"),
        ("\udcff\U000e0041", r"\udcff\U000e0041"),
        ("\\x1b", r"\x1b"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped(shown) == shown


def test_lines_stay_lines() -> None:
    assert escaped_lines("a\n\x1b\u2028b\n") == "a\n\\x1b\\u2028b\n"


@pytest.mark.slow
def test_json_says_the_same() -> None:
    text = json.dumps(list(EVERY), ensure_ascii=False)
    assert json.loads(escaped_json(text)) == list(EVERY), "one by one: two halves of a pair become one character"
    assert escaped(escaped_json(text)) == escaped_json(text)
    assert escaped_json('{\n  "a": 1\n}') == '{\n  "a": 1\n}'
    assert strict_json.dumps({"a": float("nan"), "\x9b": "\U000e0041"}) == r'{"a": null, "\u009b": "\udb40\udc41"}'


def test_python_says_the_same() -> None:
    assert ast.literal_eval(python_literal(EVERY)) == EVERY
    assert escaped(python_literal(EVERY)) == python_literal(EVERY)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("cat", "cat"), ("=1+1", "'=1+1"), ("@sum", "'@sum"), ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-cat", "'-cat"), ("-1.5", "-1.5"), ("+3e4", "+3e4"), ("-inf", "-inf"), ("a=b", "a=b"), ("=\x1b", "'=\\x1b"),
        ("\t=1", "\\t=1"), ("", ""),
    ],
)  # fmt: skip
def test_a_cell_of_a_table_is_no_formula(text: str, cell: str) -> None:
    assert table_cell(text) == cell
