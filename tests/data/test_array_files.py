"""Files of arrays: what is malformed or lies is refused by what is wrong with it, and nothing is believed before."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.autodiff.kernel_variants import load_tuned
from onnxgrad_cli.data import array_files, open_data
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.leading_facts import raises_first
from tests.data.test_dataset import PORTS as TABLE, X as ROWS, Y as CLASSES, to_folder, to_npz
from tests.facts import raises

PORTS = {"x": tensor_type(TensorProto.FLOAT, ["n", 3])}
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def refused(path: Path, code: str, *expected: str) -> str:
    """Return the message of the error for a file, after checking its code, the name of the file and further facts."""
    with raises_first(OnnxgradError, code, path.name, *expected) as told:
        open_data(path, PORTS)
    return told.value.message


def npy(shape: str = "(4, 3)", descr: str = "'<f4'") -> bytes:
    """A file in numpy's format with this header, and 48 bytes."""
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + X.tobytes()


def archive(path: Path, content: bytes, how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr("x.npy", content)
    return path


HUGE = "(10000000000, 3)"
HEADERS = [HUGE, "(4,", "None", "(4, -3)", "(2**99,)", "'x'", "(1000000, 1000000, 1000000, 1000000)"]


@pytest.mark.parametrize("shape", HEADERS)
@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_headers_that_lie_in_an_archive(tmp_path: Path, shape: str, how: int) -> None:
    refused(archive(tmp_path / "d.npz", npy(shape), how), "unreadable_file", "x")


def test_what_an_array_declares_is_held_against_its_bytes(tmp_path: Path) -> None:
    path = archive(tmp_path / "d.npz", npy(HUGE))
    refused(path, "unreadable_file", "x", "120,000,000,000", "10000000000", "3", "48")
    np.testing.assert_array_equal(open_data(archive(tmp_path / "d.npz", npy()), PORTS).arrays["x"], X)


def test_what_an_archive_declares_is_held_against_its_bytes(tmp_path: Path) -> None:
    path = archive(tmp_path / "d.npz", npy(HUGE), zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02") + 24  # the size in the directory
    data[at : at + 4] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(data)
    refused(path, "unreadable_file", "x", "4,294,967,294")


def test_what_compresses_as_well_as_it_can_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((200_000, 3), np.float32))
    assert len(open_data(tmp_path / "d.npz", PORTS)) == 200_000


def test_archives_that_are_none_of_arrays(tmp_path: Path) -> None:
    refused(archive(tmp_path / "d.npz", b"no array"), "unreadable_file", "x")
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(tmp_path / "d.npz", "w") as file:
        for _ in range(2):
            file.writestr("x.npy", npy())
    assert "same name" in refused(tmp_path / "d.npz", "unreadable_file")


@pytest.mark.parametrize("shape", HEADERS)
def test_headers_that_lie_in_a_folder(tmp_path: Path, shape: str) -> None:
    (tmp_path / "x.npy").write_bytes(npy(shape))
    with raises_first(OnnxgradError, "unreadable_file", "x.npy"):
        open_data(tmp_path, PORTS)


def test_an_archive_in_place_of_an_array(tmp_path: Path) -> None:
    with (tmp_path / "x.npy").open("wb") as file:
        np.savez(file, x=X)
    with raises_first(OnnxgradError, "unreadable_file", "x.npy"):
        open_data(tmp_path, PORTS)


@pytest.mark.parametrize("descr", ["'<f4'", "'|V4'", "[('a', '<f4')]", "'<M8[s]'", "'<c8'", "'<U1'", "'garbage'"])
def test_every_byte_of_a_header(tmp_path: Path, descr: str) -> None:
    """Whatever stands there, the file is told to be at fault, or holds arrays that fit."""
    whole = npy(descr=descr)
    for at in range(8, 70, 5):
        for byte in (0, 0x22, 0x28, 0xFF):
            (tmp_path / "x.npy").write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            try:
                open_data(tmp_path, PORTS)
            except OnnxgradError as told:
                assert "x" in told.message


# -- files that are none ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="there is no such device")
@pytest.mark.parametrize("suffix", [".npz", ".csv", ".tsv", ".parquet", ".safetensors"])
def test_a_device_is_told_at_once(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    assert "a device" in refused(tmp_path / f"zero{suffix}", "unreadable_file")


@pytest.mark.skipif(os.name == "nt", reason="there is no such device")
@pytest.mark.parametrize("read", [array_files.arrays_of, load_tuned])
def test_a_device_in_place_of_what_else_is_read(read: Callable[[Path], object]) -> None:
    with pytest.raises(OnnxgradError, match=r"'/dev/zero'.* a device"):
        read(Path("/dev/zero"))


@pytest.mark.skipif(os.name == "nt", reason="there is no such device")
def test_a_device_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.npy").symlink_to("/dev/zero")
    with pytest.raises(OnnxgradError, match=r"x.npy'.* a device"):
        open_data(tmp_path, PORTS)
    (tmp_path / "test_data_set_0").mkdir()
    (tmp_path / "test_data_set_0" / "input_0.pb").symlink_to("/dev/zero")
    with pytest.raises(OnnxgradError, match=r"input_0.pb'.* a device"):
        open_data(tmp_path / "test_data_set_0", PORTS)


@pytest.mark.parametrize(("name", "code"), [("a" * 5000 + ".npz", "unreadable_file"), ("a\0.npz", "missing_file")])
def test_names_that_no_file_has(name: str, code: str) -> None:
    with raises(OnnxgradError, code, name):
        open_data(name, PORTS)


# -- the other formats ------------------------------------------------------------------------------------------------


def test_columns_of_parquet_that_hold_no_numbers(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    write = pytest.importorskip("pyarrow.parquet").write_table
    columns = {
        "map": arrow.array([[("a", 1.0)]] * 4, arrow.map_(arrow.string(), arrow.float32())),
        "struct": arrow.array([{"a": 1.0}] * 4),
        "struct<b": arrow.array([[{"b": 1.0}] * 3] * 4),
    }
    for kind, column in columns.items():
        write(arrow.table({"x": column}), tmp_path / "d.parquet")
        assert kind in refused(tmp_path / "d.parquet", "wrong_type", "x")
    for kind, column in {"text": arrow.array(["a"] * 4), "datetime64": arrow.array([datetime(2026, 1, 1)] * 4)}.items():
        write(arrow.table({"x": column}), tmp_path / "d.parquet")
        refused(tmp_path / "d.parquet", "wrong_type", "x", *([] if kind == "text" else [kind]), "3")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(40) + b"PAR1", b"PAR1" + b"\xff" * 60 + b"PAR1"])
def test_a_parquet_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "d.parquet").write_bytes(content)
    refused(tmp_path / "d.parquet", "unreadable_file")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**10, 3], "data_offsets": [0, 120 * 10**9]},
        {"dtype": "F32", "shape": [4, -3], "data_offsets": [0, 48]},
        {"dtype": "F99", "shape": [4, 3], "data_offsets": [0, 48]},
        {"dtype": "F32", "shape": [4, 3], "data_offsets": [48, 0]},
        {"dtype": "F8_E4M3", "shape": [48], "data_offsets": [0, 48]},
        [], None, "text",
    ],
)  # fmt: skip
def test_a_safetensors_file_that_lies(tmp_path: Path, entry: object) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    head = json.dumps({"x": entry}).encode()
    (tmp_path / "d.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + X.tobytes())
    refused(tmp_path / "d.safetensors", "wrong_type" if entry and "F8_E4M3" in str(entry) else "unreadable_file")


random = np.random.default_rng(0)


N = 20


def test_safetensors_of_half_floats(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    library.save_file({"x": ROWS.astype(np.float16), "y": CLASSES.astype(np.int8)}, tmp_path / "a.safetensors")
    batch = open_data(tmp_path / "a.safetensors", TABLE).batch(np.arange(N))
    np.testing.assert_array_equal(batch["x"], ROWS.astype(np.float16).astype(np.float32))
    (tmp_path / "b.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with raises(OnnxgradError, "unreadable_file", "b.safetensors"):
        open_data(tmp_path / "b.safetensors", TABLE)


def test_broken_and_pickled_arrays(tmp_path: Path) -> None:
    path = to_npz(tmp_path, {"x": ROWS, "y": CLASSES})
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(len(whole[100:140])) + whole[140:])
    with raises_first(OnnxgradError, "unreadable_file", "data.npz", "x"):
        open_data(path, TABLE)
    np.savez(path, x=ROWS, y=np.array([{}] * N, object))
    with raises_first(OnnxgradError, "unreadable_file", "data.npz", "y") as told:
        open_data(path, TABLE)
    assert "array.astype(float)" in (told.value.hint or "")
    with raises(OnnxgradError, "unreadable_file", "y.npy") as told:
        open_data(to_folder(tmp_path, {"x": ROWS, "y": CLASSES.astype(object)}), TABLE)
    assert "array.astype(float)" in (told.value.hint or "")
    with path.open("wb") as file:
        np.save(file, ROWS)
    with raises(OnnxgradError, "unreadable_file", "data.npz"):
        open_data(path, TABLE)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_compressed_as_numpy_compresses_none(tmp_path: Path, compression: int) -> None:
    """A kilobyte of such an archive may stand for gigabytes."""
    path = to_npz(tmp_path, {"x": ROWS, "y": CLASSES})
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "other.npz", "w", compression) as other:
        for name in whole.namelist():
            other.writestr(name, whole.read(name))
    with raises(OnnxgradError, "unreadable_file", "other.npz", "x"):
        open_data(tmp_path / "other.npz", TABLE)


def test_an_array_that_is_larger_than_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = to_npz(tmp_path, {"x": ROWS, "y": CLASSES})
    monkeypatch.setattr(array_files, "free_memory", lambda: 100)
    with raises(OnnxgradError, "no_memory", "data.npz"):
        open_data(path, TABLE)
