"""`onnxgrad list operators`, and patterns that match no operator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli_harness import MLP, Shell, save


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONNXGRAD_")]:
        monkeypatch.delenv(name)
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


def test_operators(shell: Shell) -> None:
    rows = {row["op"]: row for row in shell("list", "operators", "--json").json}
    assert rows["Relu"]["derivative"] == "rule" and rows["Relu"]["kink"]
    assert rows["Shape"]["derivative"] == "zero"
    assert [row["op"] for row in shell("list", "operators", "relu", "--json").json] == ["Relu"]


def test_a_pattern_that_names_no_operator(shell: Shell) -> None:
    result = shell("list", "operators", "Rellu*")
    assert (result.code, result.out) == (2, "") and result.facts == ("unknown_name", "Rellu*")
    assert "did you mean Relu" in result.err
