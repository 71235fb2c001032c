"""Damage in a checkpoint: whichever bit is turned, it is an error and never another model."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli.checkpoints.tensors import save_tensors
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.training.run.folder import BEST, CHECKPOINT, LOG, RunFolder, load_checkpoint, run_folder
from tests.cli_harness import MLP, Shell, save
from tests.facts import raises

SAID: dict[str, Any] = {
    "steps": 3, "weights": ["w"], "adapters": [], "averages": {"w": "m"}, "model": "1a2b", "watched": "loss",
    "data": {"training": "cafe"},
    "batches": {"epoch": 1, "position": 1, "samples": 4, "shuffle": True}, "schedule": {},
    "run": {"epochs": [{"loss": 0.5}], "best": 1, "total": 0.25, "seen": 2},
}  # fmt: skip
VALUES = {"w": np.arange(3, dtype=np.float32), "m": np.ones((2, 1), np.float16)}


def written(path: Path, said: Any, values: dict[str, np.ndarray] | None = None) -> Path:
    save_tensors(path, VALUES if values is None else values, {"progress": said})
    return path


def test_the_best_checkpoint_and_the_last_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, left = RunFolder(tmp_path), [1]
    folder.save(VALUES, SAID, best=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def second_fails(file: int) -> None:
        if not left.pop():
            raise OSError(errno.ENOSPC, "full")
        left.append(0)

    monkeypatch.setattr("os.fsync", second_fails)
    with raises(OnnxgradError, "unwritable_file", CHECKPOINT):
        folder.save({**VALUES, "w": np.zeros(3, np.float32)}, SAID, best=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert {*before} == {BEST, CHECKPOINT}


@pytest.mark.parametrize("name", ["batches", "schedule", "run", "model", "data", "watched"])
def test_a_run_does_not_go_on_from_what_is_no_run(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    folder.save(VALUES, {key: value for key, value in SAID.items() if key != name})
    with raises(OnnxgradError, "unreadable_file", CHECKPOINT, name):
        folder.load()


def test_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    events = tmp_path / "tensorboard"
    events.mkdir()
    for name in (CHECKPOINT, BEST, LOG, "other", "tensorboard/events.out.tfevents.1", "tensorboard/other"):
        (tmp_path / name).write_text("a")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    RunFolder(tmp_path).clear([tmp_path / name for name in (BEST, LOG, "gone", "missing")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "tensorboard"]
    assert [path.name for path in events.iterdir()] == ["other"]
    (events / "other").unlink()
    RunFolder(tmp_path).clear([])
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_other_tensors_are_no_checkpoint(tmp_path: Path) -> None:
    save_tensors(tmp_path / "c", VALUES, {})
    with raises(OnnxgradError, "unreadable_file", "c") as refused:
        load_checkpoint(tmp_path / "c")
    assert refused.value.hint == "`onnxgrad train` writes them"
    with raises(OnnxgradError, "no_data", "c"):
        load_checkpoint(written(tmp_path / "c", {**SAID, "nominal": True}))


@pytest.mark.parametrize(
    "line",
    ['{"step": null}', "{}", '{"step": 1, "rate": 1, "loss": "x"}', '{"step": 2, "val_loss": []}', "{nonsense}", "[{}"],
)
def test_a_bad_line_in_the_log_is_named(tmp_path: Path, line: str) -> None:
    with run_folder(tmp_path) as folder:
        (tmp_path / LOG).write_text(f'{{"step": 1, "rate": 0.1, "loss": 2.0}}\n{line}}}\n'.replace("}}\n", "}\n"))
        with raises(OnnxgradError, "unreadable_file", "train.jsonl", "2"):
            folder.history()


# -- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    data()
    return Shell(tmp_path, capsys)


def data(seed: int = 0, count: int = 20) -> None:
    rng = np.random.default_rng(seed)
    np.savez("data.npz", **{n: rng.standard_normal((count, k)).astype(np.float32) for n, k in (("x", 4), ("label", 2))})


RUN = ("train", "mlp.onnx", "--data", "data.npz", "--batch-size", "10", "-o", "t.onnx")


def test_a_run_goes_on_with_its_own_data_alone(shell: Shell) -> None:
    assert shell(*RUN, "--epochs", "1").code == 0
    data(seed=1)
    refused = shell(*RUN, "--epochs", "2", "--resume")
    assert refused.code == 2 and refused.facts == ("mismatch",) and "--new-data" in refused.err
    assert shell(*RUN, "--epochs", "2", "--resume", "--new-data").code == 0
    refused = shell(*RUN, "--epochs", "2", "--new-data", "--run", "other")
    assert refused.code == 2 and refused.facts == ("conflict", "new_data", "resume")


def test_other_validation_data_are_another_run(shell: Shell) -> None:
    assert shell(*RUN, "--epochs", "1", "--val", "0.5").code == 0
    refused = shell(*RUN, "--epochs", "2", "--val", "0.45", "--resume", "--new-data")
    assert refused.code == 2 and refused.facts == ("mismatch",)


def test_a_damaged_checkpoint_is_neither_resumed_nor_exported(shell: Shell) -> None:
    assert shell(*RUN, "--epochs", "1", "--val", "0.5").code == 0
    for name in ("checkpoint", "best"):
        file = Path(f"t.onnx.run/{name}.safetensors")
        content = bytearray(file.read_bytes())
        content[-3] ^= 0x40
        file.write_bytes(content)
        told = shell("export", file, "--model", "mlp.onnx", "-o", "e.onnx")
        assert told.code == 1 and "is damaged" in told.err and not Path("e.onnx").exists()
        told = shell(*RUN, "--epochs", "1", "--val", "0.5", "--resume")
        assert told.code == 1 and "is damaged" in told.err and "Traceback" not in told.err
        content[-3] ^= 0x40
        file.write_bytes(content)


def test_a_best_checkpoint_of_another_run_is_not_taken(shell: Shell) -> None:
    assert shell(*RUN, "--epochs", "2", "--val", "0.5", "--run", "a", "--optimizer", "sgd").code == 0
    assert shell(*RUN, "--epochs", "1", "--val", "0.5", "--run", "b").code == 0
    Path("b/best.safetensors").write_bytes(Path("a/best.safetensors").read_bytes())
    told = shell(*RUN, "--epochs", "1", "--val", "0.5", "--run", "b", "--resume")
    assert told.code == 1 and told.facts == ("mismatch", "b", "1")
