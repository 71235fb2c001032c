"""Errors of libraries that read data are reported as what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxgrad_cli.data import open_data
from onnxgrad_cli.errors import OnnxgradError, UsageError
from tests.data.test_array_files import PORTS, X
from tests.facts import raises


def test_a_lack_of_memory_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=X)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with raises(OnnxgradError, "no_memory", "d.npz") as told:
        open_data(tmp_path / "d.npz", PORTS)
    assert not isinstance(told.value, UsageError)
