"""What a checkpoint says of a run is checked before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxgrad_cli.checkpoints.validate_checkpoint import is_log_line
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.training.run.folder import load_checkpoint
from tests.facts import facts, raises
from tests.training.run.test_folder import SAID, written


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 10**30), ("steps", None), ("steps", -1), ("steps", 1.5), ("steps", True), ("weights", "w"),
        ("weights", ["gone"]), ("weights", [[]]), ("adapters", {}), ("adapters", [{"weight": "w"}]), ("averages", [1]),
        ("averages", {"w": "gone"}), ("batches", []), ("batches", {"epoch": None}), ("schedule", 3), ("run", []),
        ("run", {**SAID["run"], "best": 2}), ("run", {**SAID["run"], "epochs": [3]}), ("run", {}),
        ("run", {**SAID["run"], "total": None}), ("run", {**SAID["run"], "more": 1}), ("model", 5), ("data", None),
        ("run", {**SAID["run"], "total": 10**400}), ("run", {**SAID["run"], "epochs": [{"loss": 10**400}]}),
        ("steps", 10**400),
    ],
)  # fmt: skip
def test_what_no_checkpoint_says_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    file = written(tmp_path / "c", {**SAID, name: value})
    with pytest.raises(OnnxgradError) as refused:
        load_checkpoint(file)
    absent = value in (["gone"], {"w": "gone"})
    assert facts(refused.value)[:3] == ("unreadable_file", "c", "gone" if absent else name)


@pytest.mark.parametrize(("said", "entry"), [([], ()), (3, ()), (None, ()), ("text", ()), ({}, ("steps",))])
def test_progress_that_is_no_object(tmp_path: Path, said: Any, entry: tuple[str, ...]) -> None:
    with raises(OnnxgradError, "unreadable_file", "c", *entry):
        load_checkpoint(written(tmp_path / "c", said))


@pytest.mark.parametrize("name", ["step", "loss", "rate", "val_loss", "accuracy"])
def test_a_line_of_a_log_holds_no_number_that_is_none(name: str) -> None:
    line = {"step": 1, "loss": 0.5, "rate": 0.1}
    assert is_log_line(line) and not is_log_line({**line, name: 10**400})
