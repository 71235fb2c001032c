"""Names that are identifiers, for programs that make parameters of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli.ir.node_values import node_names
from tests.cli_harness import Shell, save
from tests.jobs.test_derive import SQUARES, X, run


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(SQUARES, tmp_path / "squares.onnx")
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("command", ["build", "derive"])
def test_identifiers(shell: Shell, command: str) -> None:
    arguments = {"build": ("--output", "y", "--no-report"), "derive": ("--of", "y")}[command]
    assert shell(command, "squares.onnx", *arguments, "-o", "plain.onnx").code == 0
    assert shell(command, "squares.onnx", *arguments, "--identifiers", "-o", "named.onnx").code == 0
    own = set(node_names(onnx.load("squares.onnx").graph))
    names = [name for name in node_names(onnx.load("named.onnx").graph) if name and name not in own]
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names)
    assert {"layer.scale", "layer_scale_grad"} <= {"layer.scale", *names}
    extra = {"label": X * 0} if command == "build" else {"y_grad": X}
    plain, named = (run(f"{name}.onnx", x=X, z=X, **extra) for name in ("plain", "named"))
    assert [name.replace(".", "_") for name in plain] == list(named)
    for a, b in zip(plain.values(), named.values(), strict=True):
        np.testing.assert_array_equal(a, b)
    if command == "build":
        assert shell("check", "named.onnx").code == 0
