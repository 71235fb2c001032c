"""Each story begins in an empty folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli_harness import Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONNXGRAD_")]:
        monkeypatch.delenv(name)
    return Shell(tmp_path, capsys)
