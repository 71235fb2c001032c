"""Files of tensors: damage in any bit is an error that names the place."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onnxgrad_cli.checkpoints.tensors import load_tensors, save_tensors
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.training.run.folder import load_checkpoint
from tests.facts import facts, raises
from tests.training.run.test_folder import SAID, VALUES, written

safetensors = pytest.importorskip("safetensors.numpy", reason="checkpoints are safetensors files")


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
    with raises(OnnxgradError, "unreadable_file", "c", "w"):
        load_checkpoint(tmp_path / "c")
    data = bytearray(written(tmp_path / "c", SAID).read_bytes())
    data[data.index(b"1a2b")] ^= 1
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(OnnxgradError, match="its metadata"):
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
    assert values.keys() == VALUES.keys() and len(lines) == 1 and "no checksums" in lines[0]
    safetensors.save_file(VALUES, tmp_path / "c", {"progress": json.dumps(SAID), "checksum3": "{}"})
    with raises(OnnxgradError, "unreadable_file", "c", "checksum3"):
        load_checkpoint(tmp_path / "c")


LONG = json.dumps({"w": {"dtype": "F32", "shape": [25 * 10**9], "data_offsets": [0, 10**11]}}).encode()
"""A header that declares more bytes than the file has."""


@pytest.mark.parametrize(
    "content",
    [
        b"", b"12345", b"\xff" * 100, (10**11).to_bytes(8, "little") + b"{}", b"[]" * 40,
        len(LONG).to_bytes(8, "little") + LONG + bytes(64),
    ],
)  # fmt: skip
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(OnnxgradError, match="safetensors") as refused:
        load_tensors(tmp_path / "c")
    assert facts(refused.value)[:2] == ("unreadable_file", "c")


@pytest.mark.parametrize("place", ["/dev/zero", "/", "a\0b"])
def test_what_is_no_file_is_not_read(place: str) -> None:
    with raises(OnnxgradError, "unreadable_file", Path(place).name):
        load_tensors(Path(place))


def test_metadata_that_are_no_json(tmp_path: Path) -> None:
    for text in ("{", "[" * 100_000):
        safetensors.save_file(VALUES, tmp_path / "c", {"progress": text})
        with pytest.raises(OnnxgradError, match="not JSON"):
            load_tensors(tmp_path / "c")


def test_a_type_that_the_form_has_not(tmp_path: Path) -> None:
    """Of a model of few bits whose packed weight is an input, too, for which a checkpoint has a start value."""
    with raises(OnnxgradError, "wrong_type", "w", "uint4"):
        save_tensors(tmp_path / "c.safetensors", {"w": np.zeros(4, ml_dtypes.uint4)}, {})
    assert not list(tmp_path.iterdir())


def test_saved_tensors_are_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[object] = []
    monkeypatch.setattr("os.fsync", flushed.append)
    save_tensors(tmp_path / "t.safetensors", {"w": np.zeros(2, np.float32)}, {})
    assert flushed
