"""Files of models: what is written is read again by onnx, and whole or not at all, on a full disk too."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

from onnxgrad_cli import files
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import (
    check_external_data,
    load_external_data,
    load_model,
    save_bytes,
    save_model,
    writing,
)
from onnxgrad_cli.files.external_data import external_tensors, reference_of
from onnxgrad_cli.files.outputs import is_ours
from tests.cli.test_bad_input import BUILD, _environment, refused
from tests.cli_harness import (
    PROGRAM,
    WEIGHT,
    Shell,
    save_external,
)
from tests.facts import raises

W = np.arange(12, dtype=np.float32).reshape(4, 3)


def model_of(weight: np.ndarray = W) -> ModelProto:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, w) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def saved_outside(folder: Path, data: str = "weights.bin", weight: np.ndarray = W) -> Path:
    """A model whose weight lies in a file beside it, as onnx itself writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of(weight)
    (folder / data).unlink(missing_ok=True)
    convert_model_to_external_data(model, location=data, size_threshold=0)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def data_file(model: Path, content: bytes) -> Path:
    """The file in which the data of a written model lie."""
    return model.with_name(f"{model.name}.{hashlib.sha256(content).hexdigest()[:12]}.data")


def test_what_is_saved_is_what_onnx_loads(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    model = model_of()
    assert save_model(model, out) == [out]
    found = onnx.load(out)
    assert found.graph == model_of().graph
    assert is_ours(out)
    read, path = load_model(out)
    assert read == found and path == out
    assert sorted(tmp_path.iterdir()) == [out]


def test_external_data_stay_references_and_travel_as_they_are(tmp_path: Path) -> None:
    source = saved_outside(tmp_path / "a")
    model, path = load_model(source)
    assert model.graph.initializer[0].data_location == TensorProto.EXTERNAL
    assert [(r.tensor, r.location, r.length) for r in map(reference_of, external_tensors(model))] == [
        ("w", "weights.bin", W.nbytes)
    ]
    assert check_external_data(model, path) == ["weights.bin"]
    assert save_model(model, tmp_path / "a" / "beside.onnx", path) == [tmp_path / "a" / "beside.onnx"]
    (tmp_path / "b").mkdir()
    written = save_model(model, tmp_path / "b" / "m.onnx", path)
    assert written == [tmp_path / "b" / "m.onnx", data_file(tmp_path / "b" / "m.onnx", W.tobytes())]
    assert model.graph.initializer[0].external_data[0].value == "weights.bin", "what is in memory is as it was"
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(written[0]).graph.initializer[0]), W)
    load_external_data(model, path)
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), W)


def test_weights_too_large_for_protobuf_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 1000)
    weight = np.random.default_rng(0).standard_normal((4, 5000)).astype(np.float32)
    out = tmp_path / "m.onnx"
    assert save_model(model_of(weight), out) == [out, data_file(out, weight.tobytes())]
    (reference,) = map(reference_of, external_tensors(onnx.load(out, load_external_data=False)))
    assert reference.offset % writing.ALIGNMENT == 0
    assert out.stat().st_size < 1000
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(out).graph.initializer[0]), weight)


def test_what_breaks_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved_outside(tmp_path / "a")
    model, path = load_model(source)
    out = tmp_path / "b" / "m.onnx"
    out.parent.mkdir()
    save_bytes(b"\x08onnxgrad.version before", out)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    before = {file: file.read_bytes() for file in out.parent.iterdir()}
    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr(Path, "replace", full)
    with raises(OnnxgradError, "unwritable_file", "m.onnx"):
        save_model(model, out, path, force=True)
    assert {file: file.read_bytes() for file in out.parent.iterdir()} == before


def test_disk_full_at_save(shell: Shell) -> None:
    """The limit on a file's size is met in the middle of a write, as the end of a disk is."""
    import resource

    before = shell.files()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    unwritten = {"PYTHONDONTWRITEBYTECODE": "1"}  # else Python keeps a module that was cut off, for all who follow
    done = subprocess.run(
        [*PROGRAM, "build", "mlp.onnx", *BUILD, "--no-report"],
        capture_output=True, text=True, preexec_fn=limit, env=_environment() | unwritten, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "'out/train.onnx' can't be written: no space is left" in done.stderr
    assert shell.files() == before


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no disk's copy of a folder")
def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has the bytes, then the file its name, then the disk has the name; another file waits for nothing."""
    out, seen = tmp_path / "out", []
    out.write_bytes(b"old")

    def sync(place: int) -> None:
        of = os.fstat(place)
        seen.append((stat.S_ISDIR(of.st_mode), of.st_size if stat.S_ISREG(of.st_mode) else of.st_ino, out.read_bytes()))

    monkeypatch.setattr(os, "fsync", sync)
    files.save_bytes(b"newer", out)
    assert (seen, out.read_bytes()) == ([], b"newer")
    files.save_bytes(b"the newest", out, durable=True)
    assert seen == [(False, 10, b"newer"), (True, tmp_path.stat().st_ino, b"the newest")]


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no disk's copy of a folder")
@pytest.mark.parametrize(
    ("code", "folder", "words"),
    [
        (errno.ENOSPC, False, "no space is left"),  # a file system may find its place at this moment only
        (errno.EIO, False, "Input/output error"),
        (errno.EIO, True, "Input/output error"),
        (errno.EINVAL, True, ""),  # it can't be asked for that
    ],
)
def test_a_disk_that_does_not_take_what_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, folder: bool, words: str
) -> None:
    def sync(place: int) -> None:
        if stat.S_ISDIR(os.fstat(place).st_mode) == folder:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", sync)
    out = tmp_path / "out"
    for before in (None, b"old"):
        if before:
            out.write_bytes(before)
        if words:
            with raises(OnnxgradError, "unwritable_file", "out"):
                files.save_bytes(b"new", out, durable=True)
        else:
            files.save_bytes(b"new", out, durable=True)
        expected = b"new" if not words or folder else before
        assert [file.read_bytes() for file in tmp_path.iterdir()] == ([expected] if expected else [])
        out.unlink(missing_ok=True)


@pytest.mark.parametrize("where", ["data", "model"])
def test_failure_at_save_brings_back_what_was(shell: Shell, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """External data are copied first: neither they nor the model stay when either can't be written."""
    save_external(Path("external.onnx"), "sub/weights.bin")
    Path("sub").mkdir()
    Path("sub/weights.bin").write_bytes(WEIGHT.tobytes())
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.suffix == {"data": ".data", "model": ".onnx"}[where]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    refused(shell, 1, "no space is left", command=("build", "external.onnx", *BUILD))


def test_interrupted_at_save(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    refused(shell, 130, "interrupted", command=("build", "mlp.onnx", *BUILD))
