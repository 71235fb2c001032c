"""Damage in a checkpoint: whichever bit is turned, it is an error and never another model."""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxgrad_cli.checkpoints.tensors import load_tensors, save_tensors
from onnxgrad_cli.checkpoints.validate_checkpoint import is_log_line
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.training.run.folder import BEST, CHECKPOINT, LOG, RunFolder, load_checkpoint, run_folder
from tests.cli_harness import MLP, Shell, save

safetensors = pytest.importorskip("safetensors.numpy", reason="checkpoints are safetensors files")

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
    with pytest.raises(OnnxgradError, match="no space is left"):
        folder.save({**VALUES, "w": np.zeros(3, np.float32)}, SAID, best=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert {*before} == {BEST, CHECKPOINT}


@pytest.mark.parametrize("every", [53, pytest.param(1, marks=pytest.mark.slow)])
def test_each_bit_of_a_checkpoint_counts(tmp_path: Path, every: int) -> None:
    whole = written(tmp_path / "whole", SAID).read_bytes()
    assert load_checkpoint(tmp_path / "whole")[1] == SAID
    passed = []
    for bit in range(0, 8 * len(whole), every):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "turned").write_bytes(data)
        try:
            load_checkpoint(tmp_path / "turned")
            passed.append(bit)
        except OnnxgradError:
            pass
    assert passed == []


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    data = bytearray(written(tmp_path / "c", SAID).read_bytes())
    data[data.index(VALUES["w"].tobytes()) + 7] ^= 0x40  # an exponent
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(OnnxgradError, match="is damaged: the checksum of 'w' does not match"):
        load_checkpoint(tmp_path / "c")
    data = bytearray(written(tmp_path / "c", SAID).read_bytes())
    data[data.index(b"1a2b")] ^= 1
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(OnnxgradError, match="damaged: the checksum of its metadata does not match"):
        load_checkpoint(tmp_path / "c")


def test_other_readers_read_it_and_test_it_by_crc32(tmp_path: Path) -> None:
    file = written(tmp_path / "c", SAID)
    arrays = safetensors.load_file(file)
    np.testing.assert_array_equal(arrays["w"], VALUES["w"])
    data = file.read_bytes()
    said = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    head = b"<f4[3]"
    assert json.loads(said["checksums"])["tensors"]["w"] == f"{zlib.crc32(head + VALUES['w'].tobytes()):08x}"


def test_what_another_program_wrote_is_believed_and_said(tmp_path: Path) -> None:
    safetensors.save_file(VALUES, tmp_path / "c", {"progress": json.dumps(SAID)})
    lines: list[str] = []
    values, _ = load_checkpoint(tmp_path / "c", lambda text, level: lines.append(text))
    assert values.keys() == VALUES.keys() and len(lines) == 1 and "has no checksums" in lines[0]
    safetensors.save_file(VALUES, tmp_path / "c", {"progress": json.dumps(SAID), "checksum3": "{}"})
    with pytest.raises(OnnxgradError, match="damaged: its metadata have an unknown entry 'checksum3'"):
        load_checkpoint(tmp_path / "c")


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
    with pytest.raises(OnnxgradError, match=f"its entry '{name}' is invalid|refers to 'gone', but does not contain it"):
        load_checkpoint(file)


@pytest.mark.parametrize("said", [[], 3, None, "text", {}])
def test_progress_that_is_no_object(tmp_path: Path, said: Any) -> None:
    with pytest.raises(OnnxgradError, match="not a valid checkpoint"):
        load_checkpoint(written(tmp_path / "c", said))


@pytest.mark.parametrize("name", ["batches", "schedule", "run", "model", "data", "watched"])
def test_a_run_does_not_go_on_from_what_is_no_run(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    folder.save(VALUES, {key: value for key, value in SAID.items() if key != name})
    with pytest.raises(OnnxgradError, match=f"not a checkpoint of a run: its entry '{name}' is missing"):
        folder.load()


@pytest.mark.parametrize("content", [b"", b"12345", b"\xff" * 100, (10**11).to_bytes(8, "little") + b"{}", b"[]" * 40])
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(OnnxgradError, match="is not a safetensors file, or is broken"):
        load_tensors(tmp_path / "c")


def test_a_header_that_declares_more_than_there_is(tmp_path: Path) -> None:
    head = json.dumps({"w": {"dtype": "F32", "shape": [25 * 10**9], "data_offsets": [0, 10**11]}}).encode()
    (tmp_path / "c").write_bytes(len(head).to_bytes(8, "little") + head + bytes(64))
    with pytest.raises(OnnxgradError, match="is not a safetensors file, or is broken"):
        load_tensors(tmp_path / "c")


@pytest.mark.parametrize("place", ["/dev/zero", "/", "a\0b"])
def test_what_is_no_file_is_not_read(place: str) -> None:
    with pytest.raises(OnnxgradError, match=r"is not a file of tensors|can't be read"):
        load_tensors(Path(place))


def test_metadata_that_are_no_json(tmp_path: Path) -> None:
    for text in ("{", "[" * 100_000):
        safetensors.save_file(VALUES, tmp_path / "c", {"progress": text})
        with pytest.raises(OnnxgradError, match="damaged: its metadata are not JSON"):
            load_tensors(tmp_path / "c")


@pytest.mark.parametrize(
    "line",
    ['{"step": null}', "{}", '{"step": 1, "rate": 1, "loss": "x"}', '{"step": 2, "val_loss": []}', "{nonsense}", "[{}"],
)
def test_a_bad_line_in_the_log_is_named(tmp_path: Path, line: str) -> None:
    with run_folder(tmp_path) as folder:
        (tmp_path / LOG).write_text(f'{{"step": 1, "rate": 0.1, "loss": 2.0}}\n{line}}}\n'.replace("}}\n", "}\n"))
        with pytest.raises(OnnxgradError, match="line 2 is not a line of a log"):
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
    assert refused.code == 2 and "started with other training data" in refused.err and "--new-data" in refused.err
    assert shell(*RUN, "--epochs", "2", "--resume", "--new-data").code == 0
    refused = shell(*RUN, "--epochs", "2", "--new-data", "--run", "other")
    assert refused.code == 2 and "--new-data requires --resume" in refused.err


def test_other_validation_data_are_another_run(shell: Shell) -> None:
    assert shell(*RUN, "--epochs", "1", "--val", "0.5").code == 0
    refused = shell(*RUN, "--epochs", "2", "--val", "0.45", "--resume", "--new-data")
    assert refused.code == 2


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
    assert told.code == 1 and "is not from epoch 1" in told.err


def test_a_type_that_the_form_has_not(tmp_path: Path) -> None:
    """Of a model of few bits whose packed weight is an input, too, for which a checkpoint has a start value."""
    with pytest.raises(OnnxgradError, match="'w' has the type uint4, which safetensors does not support"):
        save_tensors(tmp_path / "c.safetensors", {"w": np.zeros(4, ml_dtypes.uint4)}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["step", "loss", "rate", "val_loss", "accuracy"])
def test_a_line_of_a_log_holds_no_number_that_is_none(name: str) -> None:
    line = {"step": 1, "loss": 0.5, "rate": 0.1}
    assert is_log_line(line) and not is_log_line({**line, name: 10**400})
