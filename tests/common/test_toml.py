"""TOML of a stranger is read in time, or refused."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path

import pytest

from onnxgrad_cli.common import toml

PARTS = ".".join("a" * toml.PARTS)


def test_what_the_parser_reads(tmp_path: Path) -> None:
    text = f'a.b."c.d" = [0.1, 0.2]\n{PARTS} = 1\nl = "{"." * 500}"\nm = \'{PARTS}.{PARTS}\'\nn = [{"0.5, " * 300}]\n'
    (tmp_path / "a.toml").write_text(text)
    assert toml.load(tmp_path / "a.toml") == tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a." * 50_000 + "a = 1", "more than 100 parts"),
        ('"a" . ' * 50_000 + "a = 1", "more than 100 parts"),
        ("'a'." * 50_000 + "a = 1", "more than 100 parts"),
        ("[" + "a." * 50_000 + "a]", "more than 100 parts"),
        ("a = {" + "a." * 50_000 + "a = 1}", "more than 100 parts"),
        ("a = " + "[" * 100_000, "recursion"),
        ("#" + "a" * toml.MAX_BYTES, "more than 4,194,304 bytes"),
        ("a" * 1_000_000, "Expected"),
        ('"' * 1_000_000, "Expected|Unterminated|Illegal|Invalid"),
        ("a = 1e", "Expected|Invalid"),
    ],
)
def test_what_takes_for_ever(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    begun = time.process_time()
    with pytest.raises((ValueError, RecursionError), match=said):
        toml.load(tmp_path / "a.toml")
    assert time.process_time() - begun < 5


def test_a_device() -> None:
    with pytest.raises(ValueError, match="more than 4,194,304 bytes"):
        toml.load("/dev/zero")
