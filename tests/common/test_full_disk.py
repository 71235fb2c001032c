"""Free space is checked for all files of a disk together, and a full disk has its own words."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnxgrad_cli.common.full_disk import check_space, said
from onnxgrad_cli.errors import OnnxgradError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disks_are_told_alike(number: int) -> None:
    assert said(OSError(number, os.strerror(number))) == said(OSError(errno.ENOSPC, ""))


def test_other_errors_have_the_words_of_the_system() -> None:
    assert said(OSError(errno.EROFS, os.strerror(errno.EROFS))) == os.strerror(errno.EROFS)


def test_files_of_one_disk_share_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    check_space([(folders[0], 60), (folders[1], 40)], "")
    with pytest.raises(OnnxgradError) as caught:
        check_space([(folders[0], 60), (folders[1], 41)], "delete something")
    assert caught.value.hint == "delete something" and f"'{folders[1]}'" in caught.value.message
    assert "101" in caught.value.message and "100" in caught.value.message


def test_disks_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", lambda folder: SimpleNamespace(st_dev=str(folder)))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    check_space([(tmp_path / "a", 60), (tmp_path / "b", 60)], "")
