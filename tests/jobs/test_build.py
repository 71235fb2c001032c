"""`onnxgrad build`: which checks a proof has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_harness import MLP, Shell, save


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize(("mode", "compared"), [("keep", True), ("train", False)])
def test_outputs_are_compared_with_those_of_the_original_unless_the_mode_changes_them(
    shell: Shell, mode: str, compared: bool
) -> None:
    result = shell("build", "mlp.onnx", "--mode", mode, "--json")
    assert result.code == 0, result.err
    steps = {step["name"]: step["status"] for step in result.json["proof"]["steps"]}
    assert steps.get("computes what the original computes") == ("passed" if compared else None)
