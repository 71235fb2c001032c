"""A few fixed cases of each program, in a process of its own: this one may have threads, which no fork has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.older_runtime import ROOT


def play(program: str, cases: int, seed: int) -> None:
    """Play the first cases of a seed."""
    words = [sys.executable, "-m", f"tests.fuzz.{program}", "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("program", "cases", "seed"),
    [("files", 5, 12), ("data", 2, 11), pytest.param("data", 6, 11, marks=pytest.mark.slow)],
)
def test_a_few(program: str, cases: int, seed: int) -> None:
    play(program, cases, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "cases"),
    [pytest.param("files", 20, marks=pytest.mark.long), pytest.param("data", 20, marks=pytest.mark.long), ("kills", 4)],
)
def test_more(program: str, cases: int) -> None:
    play(program, cases, 10)
