"""A command line beside an MLP and its data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli_harness import MLP, Shell, save


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    np.savez("data.npz", x=x, label=np.stack([x.sum(1), x[:, 0]], 1))
    return Shell(tmp_path, capsys)
