"""The page of promises names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

HOME = Path(__file__).parents[2]
PAGE = (HOME / "docs/promises.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    for line in PAGE.splitlines():
        files = re.findall(r"`(tests/[\w/]+\.py)`", line)
        for file in files:
            assert (HOME / file).is_file(), file
        for name in re.findall(r"`(test_\w+)`", line):
            assert any(f"def {name}(" in (HOME / file).read_text() for file in files), name


def test_every_promise_names_what_holds_it() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("| promise", "| ---"))]
    assert len(rows) > 10 and all("`tests/" in row.split("|")[2] for row in rows)


def test_every_target_of_make_exists() -> None:
    rules = (HOME / "Makefile").read_text()
    for page in (PAGE, (HOME / "SECURITY.md").read_text()):
        assert all(f"\n{target}:" in rules for target in re.findall(r"`make ([\w-]+)`", page))
