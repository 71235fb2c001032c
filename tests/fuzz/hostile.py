"""Strings, numbers and bytes that programs stumble over."""

from __future__ import annotations

from random import Random

NOT_UTF8 = "NOT-UTF-8"
"""Stands for as many bytes that are no UTF-8, which protobuf lets nobody set: `with_broken_text` puts them in."""

STRINGS = (
    "", " ", ".", "..", "/", "-", "--force", "\x00", "a\x00b", "\n", "a\nb", "a\r\nb\x1b[2J",
    "\x1b]0;title\x07", "\x1b[31mred\x1b[0m", "\x9b31m", "\x85", "\u202eevil\u202c", "\u2066x\u2069", "\u2028",
        "\ufeff", "\x7f",
    "\u0661\u0662", "\U0001f600", "e\u0301", "<script>alert(1)</script>", "</title><b>", "\"'`", "a|b", "|", "`x`",
    "[x](y)", "{0}", "%s%n",
    "$(id)", "a/b", "../x", "a\\b", "C:\\x", "label", "label_0", "loss", "w_grad", "x_grad", "batch", "onnx::Add_0",
    "[bold]x[/bold]", "[/]", "*", "?", "[a-z", "~", "nan", "inf", "1e999", "N" * 5000, NOT_UTF8, "\ud7ff", "]]>",
    "-->", "node|x=1",
)  # fmt: skip

LOCATIONS = (
    "", ".", "..", "/", "../evil.bin", "../../evil.bin", "../in/data.bin", "./data.bin", "data.bin", "sub/data.bin",
    "sub/../data.bin",
    "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "loop", "folder", "C:\\data.bin", "\\\\host\\x",
    "data.bin\x00", "\x1b]0;t\x07",
    "model.onnx", "a\nb", "d" * 5000, "data.bin ", "DATA.BIN", "~/data.bin", "file:///etc/passwd", "link.bin",
    NOT_UTF8, "out.onnx", "pipe",
)  # fmt: skip

FILES = (
    "a b.onnx", "-m.onnx", "\udcff\udcfe.onnx", "a\nb.onnx", "\x1b]0;title\x07.onnx", "\u202etxt.onnx", "m", ".onnx",
    "..onnx", "'m'.onnx",
    "$(id).onnx", "<b>.onnx", "[bold]m.onnx", "%s.onnx", "\U0001f600.onnx", "m.ONNX", "N" * 240 + ".onnx", "|.onnx",
    "*.onnx", "model.onnx.onnx",
)  # fmt: skip
"""What files may be called, bytes that are no UTF-8 among them."""

INTEGERS = (
    0, 1, -1, 2, 3, -2, 4, 7, 8, 16, 17, 27, 28, 29, 100, 127, 128, 255, 1000, 65535, 10**6, 2**30, 2**31 - 1, 2**31,
    -(2**31), 2**32, 2**33,
    2**40, 2**62, 2**63 - 1, -(2**63),
)  # fmt: skip

FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-8, 0.5, 2.0, 1e30, -1e30, 3.4e38, float("inf"), float("-inf"), float("nan"))

NUMERALS = ("0", "-1", "8", "1e3", "0x10", " 4", "4 ", "\u0664", "1_0", "", "+4", "9" * 30, "2.5", "nan",
    "9223372036854775807", "9" * 5000, "4096")  # fmt: skip


def string(rng: Random) -> str:
    """A name that nobody should give."""
    return rng.choice(STRINGS)


def integer(rng: Random, low: int, high: int) -> int:
    """A number at some edge, inside the bounds of its type."""
    return min(max(rng.choice(INTEGERS) + rng.choice((0, 0, 0, 1, -1)), low), high)


def with_broken_text(data: bytes) -> bytes:
    """The bytes of a message in which texts that stand for broken ones are broken."""
    return data.replace(NOT_UTF8.encode(), b"\xff\xfe\x80bad\xc3(\xa0")
