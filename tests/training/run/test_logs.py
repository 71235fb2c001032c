"""The log in other forms: a table and TensorBoard's events, whole after a run that went on from a checkpoint."""

from __future__ import annotations

import csv
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.run.folder import run_folder
from onnxgrad_cli.training.run.logs import sinks
from tests.cli_harness import Shell
from tests.facts import facts, raises
from tests.jobs.train.test_train import shell as shell

RUN = ("train", "mlp.onnx", "--data", "data.npz", "--val", "data.npz", "--batch-size", "20", "--threads", "1")


def table(folder: str) -> list[dict[str, str]]:
    with Path(folder, "train.csv").open(newline="") as stream:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(stream)]


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "train.jsonl").read_text().splitlines()]


def as_row(line: dict[str, Any]) -> dict[str, str]:
    names = {} if "rate" in line else {"loss": "epoch_loss"}
    return {names.get(name, name): str(value) for name, value in line.items() if value is not None}


def test_the_table_says_what_the_log_says_also_of_a_run_that_went_on(shell: Shell) -> None:
    assert shell(*RUN, "--epochs", "2", "--max-steps", "4", "--log", "csv", "-o", "t.onnx").code == 0
    assert table("t.onnx.run") == list(map(as_row, lines("t.onnx.run")))
    with Path("t.onnx.run/train.csv").open("a") as stream:
        stream.write("5,2,1.0,0.001,0.1,,,\n6,2,0.")  # of steps that come again, and cut off
    with Path("t.onnx.run/train.csv").open("ab") as stream:
        stream.write(b"\xff\n")  # no UTF-8
    assert shell(*RUN, "--epochs", "2", "--log", "csv", "--resume", "-o", "t.onnx").code == 0
    found = table("t.onnx.run")
    assert found == list(map(as_row, lines("t.onnx.run")))
    assert [row["step"] for row in found if "rate" in row] == list("123456")
    assert [row["step"] for row in found if "epoch_loss" in row] == list("346")


def test_names_of_results_are_made_visible_and_stay_one_column(tmp_path: Path) -> None:
    """Metrics are called by outputs, of which a stranger's file says the names."""
    name = "val_mae:\x1b[31m,\u202e=1\n"
    for steps in (0, 1):  # begun, and gone on with
        (sink,) = sinks(tmp_path, ["csv"], steps, ["loss", name])
        sink.add({"step": 1 + steps, "epoch": 1, "loss": 2.0, name: 0.5})
        sink.write()
    text = (tmp_path / "train.csv").read_text()
    assert text.replace("\n", "").isprintable()
    found = [row[r"val_mae:\x1b[31m,\u202e=1\n"] for row in table(tmp_path)]
    assert found == ["0.5", "0.5"]


def test_a_run_of_more_steps_goes_on_bit_for_bit(shell: Shell) -> None:
    assert shell(*RUN, "--epochs", "3", "-o", "whole.onnx").code == 0
    for steps in ("2", "4"):
        done = shell(*RUN, "--epochs", "3", "--max-steps", steps, "-o", "t.onnx", *(["--resume"] * (steps == "4")))
        assert done.code == 0, done.err
        report = Path("t.onnx.run/report.md").read_text()
        assert "the requested number of steps" in report
    assert shell(*RUN, "--epochs", "3", "--eval-every", "1", "--resume", "-o", "t.onnx").code == 0
    assert Path("t.onnx").read_bytes() == Path("whole.onnx").read_bytes()


def events(folder: Path) -> Iterator[Any]:
    """The events of a folder, by the layout of a TFRecord: length, its check, data, their check."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    from tensorboardX.record_writer import masked_crc32c

    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked_crc32c(data[12 : 12 + size])
            yield proto.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


STEPS = [{"step": i, "epoch": 1, "loss": 1 / i, "rate": 0.5, "seconds": 0.1} for i in (1, 2, 3)]
EPOCH = {"step": 3, "epoch": 1, "loss": 0.6, "val_loss": 0.75, "val_accuracy:threshold=0": float("nan")}


def test_tensorboard_gets_scalars_and_is_told_which_steps_come_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with run_folder(tmp_path) as folder:
        with folder.log(0, ["tensorboard"]) as log:
            for line in (*STEPS, EPOCH):
                log.add(line)
        with folder.log(2, ["tensorboard"]) as log:
            log.add(STEPS[2])
    found = list(events(tmp_path / "tensorboard"))
    assert [event.session_log.status for event in found if event.HasField("session_log")] == [1]
    assert next(event.step for event in found if event.HasField("session_log")) == 3
    scalars = [(event.step, value.tag, value.simple_value) for event in found for value in event.summary.value]
    assert scalars[:2] == [(1, "train/loss", 1.0), (1, "train/rate", 0.5)]
    assert scalars[6:8] == [(3, "train/epoch_loss", pytest.approx(0.6)), (3, "val/loss", 0.75)]
    assert scalars[8][1] == "val/accuracy:threshold=0" and scalars[8][2] != scalars[8][2]
    assert scalars[9:] == [(3, "train/loss", pytest.approx(1 / 3)), (3, "train/rate", 0.5)]


def test_what_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.csv").mkdir()
    with pytest.raises(OnnxgradError, match=r"train\.csv"):
        sinks(tmp_path, ["csv"], 0, ["loss"])
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(UsageError, match="tensorboardX") as missing:
        sinks(tmp_path, ["tensorboard"], 0, ["loss"])
    assert missing.value.hint == "pip install 'tensorboardX>=2.6.1'"


@pytest.mark.parametrize("text", ["9" * 5000 + ",1\n", "1," + "9" * 200_000, '1,"\0', ""])
def test_a_table_that_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "train.csv"
    file.write_text("step,loss\n" + text)
    if not text:
        file.unlink()
        file.symlink_to("/dev/zero")
    try:
        sinks(tmp_path, ["csv"], 1, [])
    except OnnxgradError as error:
        assert facts(error)[:2] == ("unreadable_file", "train.csv")
    else:
        assert "\0" in text  # which some versions of Python read


@pytest.mark.parametrize("name", ["lock", "tensorboard"])
def test_a_link_in_a_strangers_folder_leads_nowhere(tmp_path: Path, name: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / name).symlink_to(elsewhere / "new" if name == "lock" else elsewhere)
    with raises(OnnxgradError, "unwritable_file", *(["run", "run"] if name == "lock" else [name])), run_folder(run):
        sinks(run, ["tensorboard"], 0, [])
    assert not list(elsewhere.iterdir())


def test_a_log_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").mkdir()
    with run_folder(tmp_path) as folder, raises(OnnxgradError, "unreadable_file", "train.jsonl"):
        folder.history()


@pytest.mark.skipif(os.name == "nt", reason="it has neither pipes with names nor such devices")
@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "best.safetensors", "report.md", "any other"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_in_the_folder_of_a_run(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with raises(OnnxgradError, "unreadable_file", "run", name), run_folder(tmp_path):
        pass
