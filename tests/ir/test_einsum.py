"""Equations of Einsum, and texts that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxgrad_cli.ir.einsum import is_equation
from tests.cli.test_hostile_files import in_function, refused
from tests.cli_harness import Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("equation", ["[a-z", "a.b", "...a..", "a...b...", "ab->a->b", "a1", "ab;ba", "a\xe9"])
def test_an_equation_that_is_none(shell: Shell, equation: str) -> None:
    """For the first four onnx's inference of shapes never ends, and onnxruntime's, which is the same."""
    model = in_function('c = Einsum<equation = "E">(a)')
    model.functions[0].node[0].attribute[0].s = equation.encode()
    refused(shell, model, "'c' (Einsum) has the equation", "which is not valid")
    model = in_function("c = Einsum<equation: string = @e>(a)", 'y = f.m<e = "E">(x)', "<e>")
    model.graph.node[0].attribute[0].s = equation.encode()
    refused(shell, model, "(Einsum) has the equation", "which is not valid")


@pytest.mark.parametrize("equation", ["ij->ji", " i j -> j i ", "...", "...i->i...", "i...j", "ii", "ij->"])
def test_an_equation(equation: str) -> None:
    """What is one is so for numpy too."""
    np.einsum(equation, np.ones((2, 2)))
    assert is_equation(equation) and is_equation(f"{equation.partition('->')[0]},ab")
