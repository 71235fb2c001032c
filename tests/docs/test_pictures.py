"""The tutorial of pictures: its blocks run where pillow is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import run_blocks

pytest.importorskip("PIL", reason="pillow is not installed")
pytest.importorskip("safetensors", reason="checkpoints are safetensors files")


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_blocks("tutorials/pictures.md", tmp_path, monkeypatch)
    assert names["names"] == ["emerald", "ruby", "sapphire"]
