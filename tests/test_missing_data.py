"""Test programs fail if their data are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import conformance, intake, zoo


@pytest.mark.parametrize("program", [zoo, intake])
def test_no_folder(program: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "gone", tmp_path):
        monkeypatch.setattr(sys, "argv", ["program", str(folder)])
        assert program.main() == 1  # type: ignore[attr-defined]


def test_no_node_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conformance, "FILES", [])
    monkeypatch.setattr(sys, "argv", ["program"])
    assert conformance.main() == 1
    assert not list(tmp_path.iterdir()), "nor is a table of proofs written that has none"
