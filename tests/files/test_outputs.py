"""Outputs are checked before any slow work: files of others, folders, devices and links."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files import (
    check_target,
    load_model,
    save_model,
)
from onnxgrad_cli.files.outputs import is_ours
from tests.cli.test_bad_input import AS_ROOT, BUILD, BUILT, refused
from tests.cli_harness import (
    NO_WEIGHTS,
    WEIGHT,
    Shell,
    save,
    save_external,
)
from tests.facts import raises
from tests.files.test_writing import model_of, saved_outside


@pytest.fixture
def trained(shell: Shell) -> tuple[object, ...]:
    """A training on data that lie there, which an output can be given to."""
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    return "train", "mlp.onnx", "--data", "d.npz", "--epochs", "1"


def test_same_file_twice(shell: Shell) -> None:
    refused(shell, 2, "written twice", command=("build", "mlp.onnx", *BUILD, "--report", "r.md", "--report", "r.md"))


def test_what_is_written_together_has_names_of_its_own(shell: Shell, trained: tuple[object, ...]) -> None:
    inputs = ("build", "mlp.onnx", "--label", "t", "--weights", "inputs", "-o", "out/w.onnx", "--report", "out/w.json")
    refused(shell, 2, "'out/w.json' would be written twice", command=inputs)
    assert shell(*trained, "--lora", "1", "-o", "l.onnx").code == 0
    export = ("export", "l.onnx.run/checkpoint.safetensors", "--model", "mlp.onnx", "-o", "a.safetensors")
    refused(shell, 2, "a.safetensors' would be written twice", command=(*export, "--adapter", "out/../a.safetensors"))


@pytest.mark.parametrize("out", ["N" * 300, "N" * 250])  # of the second the name of the report alone is too long
def test_a_name_that_no_folder_takes(shell: Shell, out: str) -> None:
    refused(shell, 1, "can't be written: File name too long", command=("build", "mlp.onnx", "--label", "t", "-o", out))


def test_foreign_file_is_kept(shell: Shell) -> None:
    save(NO_WEIGHTS, Path("out/train.onnx"))
    refused(shell, 2, "exists, and onnxgrad did not write it", "--force", command=("build", "mlp.onnx", *BUILD))
    assert shell("build", "mlp.onnx", *BUILD, "--force").code == 0
    assert shell("build", "mlp.onnx", *BUILD).code == 0, "a file of its own is replaced without asking"
    Path("out/notes.md").write_text("# Shopping\n")
    refused(shell, 2, "--force", command=("build", "mlp.onnx", *BUILD, "--report", "out/notes.md"))


@pytest.mark.parametrize("out", ["p.csv", "p.jsonl", "p.parquet"])
def test_of_a_file_that_cannot_say_who_wrote_it_nobody_else_is_told(
    shell: Shell, trained: tuple[object, ...], out: str
) -> None:
    if out == "p.parquet":
        pytest.importorskip("pyarrow")
    command = ("predict", "mlp.onnx", "--data", "d.npz", "-o", out)
    assert shell(*command).code == 0
    said = refused(shell, 2, f"error: '{out}' exists\n", "--force", command=command)
    assert "did not write" not in said
    assert shell(*command, "--force").code == 0


def test_other_data_file_is_kept(shell: Shell) -> None:
    save_external(Path("external.onnx"))
    Path("weights.bin").write_bytes(WEIGHT.tobytes())
    Path("out/weights.bin").write_bytes(b"something else")
    assert shell("build", "external.onnx", *BUILD).code == 0
    assert Path("out/weights.bin").read_bytes() == b"something else"
    assert [file.read_bytes() for file in Path("out").glob("train.onnx.*.data")] == [WEIGHT.tobytes()]


def test_output_path_not_writable(shell: Shell) -> None:
    for out, words in (
        ("gone/train.onnx", "no folder 'gone'"),
        ("out", "'out' is a directory"),
        ("mlp.onnx/train.onnx", "no folder 'mlp.onnx'"),
    ):
        refused(shell, 1, words, command=("build", "mlp.onnx", "--label", "t", "-o", out, "--no-report"))


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="it says not so of its file systems")
def test_file_system_that_is_only_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights that nobody lacks are not to be looked for."""
    trusted, asked = os.access, os.statvfs
    shut = Path("out").resolve()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != shut and trusted(path, mode))
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(f_flag=os.ST_RDONLY) if Path(path).resolve() == shut else asked(path),
    )
    refused(
        shell, 1, "'out/train.onnx' can't be written: its file system is read-only", command=("build", *BUILT, *BUILD)
    )
    adapter = ("train", "mlp.onnx", "--data", "d.npz", "--lora", "1", "--adapter", "out/peft")
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    refused(shell, 1, "'out/peft' can't be created: its file system is read-only", command=adapter)


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_folder_not_writable(shell: Shell) -> None:
    Path("out").chmod(0o555)
    refused(shell, 1, "permission denied", command=("build", "mlp.onnx", *BUILD))


@pytest.mark.skipif(os.name == "nt", reason="it has no such files")
@pytest.mark.parametrize(
    "place", ["/dev/null", "/dev/gone.onnx", "/proc/gone.onnx", "fifo", "socket", "open", "twice", "folder/1"]
)
def test_what_is_no_file_is_not_written(shell: Shell, place: str) -> None:
    """A device, a pipe, a socket, what is open in this process (as /dev/stdout is), and links to them."""
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as listener, Path("redirected").open("wb") as stream:
        listener.bind("socket")
        Path("open").symlink_to(f"/proc/self/fd/{stream.fileno()}")
        Path("twice").symlink_to("open")
        Path("folder").symlink_to("/proc/self/fd")
        links = {path for path in Path().iterdir() if path.is_symlink()}
        for force in ((), ("--force",)):
            refused(shell, 1, "is not a file", "-o - writes", command=("build", *BUILT, "-o", place, *force))
            told = refused(shell, 1, "is not a file", command=("tune", "mlp.onnx", "-o", place))
            assert "-o -" not in told, "its results go to no stream"
        assert links == {path for path in Path().iterdir() if path.is_symlink()}, "no link is replaced"


@pytest.mark.skipif(os.name == "nt", reason="it has no such files")
def test_what_is_no_file_is_none_for_any_result(shell: Shell) -> None:
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    for suffix in (".md", ".html", ".npz", ".safetensors", ".dot", ""):
        os.mkfifo(f"pipe{suffix}")
    trained = ("train", "mlp.onnx", "--data", "d.npz", "--epochs", "1")
    for command in (
        ("build", *BUILT, "-o", "t.onnx", "--report", "pipe.md"),
        ("build", *BUILT, "-o", "t.onnx", "--picture", "pipe.html"),
        ("derive", "mlp.onnx", "-o", "pipe"), ("expand", "mlp.onnx", "-o", "pipe"),
        ("view", "mlp.onnx", "-o", "pipe.dot"),
        ("predict", "mlp.onnx", "--data", "d.npz", "-o", "pipe.npz"),
        ("explain", "mlp.onnx", "--data", "d.npz", "-o", "pipe.npz"),
        ("attack", "mlp.onnx", "--data", "d.npz", "-o", "pipe.npz"),
        (*trained, "-o", "pipe"), (*trained, "--picture", "pipe.html"),
        (*trained, "--lora", "1", "--adapter", "pipe.safetensors"),
    ):  # fmt: skip
        refused(shell, 1, "is not a file: it is, or leads to, a device, a pipe or a socket", command=command)


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_a_result_goes_through_a_link_that_was_named(shell: Shell) -> None:
    Path("link.onnx").symlink_to("out/t.onnx")
    Path("report.md").symlink_to("out/r.md")
    command = ("build", *BUILT, "-o", "link.onnx", "--report", "report.md")
    assert shell(*command).code == 0, "of a link that leads to nothing, the file that it names is made"
    written = Path("out/t.onnx").read_bytes()
    Path("out/t.onnx").chmod(0o600)
    assert shell(*command, "--train", "w1").code == 0, "a file of onnxgrad's is replaced without asking"
    assert Path("out/t.onnx").read_bytes() != written and stat.S_IMODE(Path("out/t.onnx").stat().st_mode) == 0o600
    assert Path("link.onnx").is_symlink() and Path("report.md").is_symlink()
    assert sorted(path.name for path in Path("out").iterdir()) == ["r.md", "t.onnx"]
    Path("out/t.onnx").write_text("mine")
    refused(shell, 2, "onnxgrad did not write it", "--force", command=command)
    assert shell(*command, "--force").code == 0 and Path("link.onnx").is_symlink()
    Path("same.md").symlink_to("report.md")
    refused(shell, 2, "written twice", command=(*command, "--report", "same.md", "--force"))


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_weights_beside_a_model_are_found_by_its_own_name(shell: Shell) -> None:
    """onnxruntime looks for them beside the name that it is given: a link elsewhere is none to open the model by."""
    save_external(Path("external.onnx"))
    Path("weights.bin").write_bytes(WEIGHT.tobytes())
    Path("link.onnx").symlink_to("out/t.onnx")
    assert shell("build", "external.onnx", "--label", "t", "-o", "link.onnx").code == 0
    written = sorted(path.name for path in Path("out").iterdir())
    assert len(written) == 3 and {"t.onnx", "t.onnx.report.md"} < set(written)
    onnxruntime.InferenceSession("out/t.onnx")
    with pytest.raises(Exception, match="External data"):
        onnxruntime.InferenceSession("link.onnx")


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_names_that_nobody_typed_go_through_no_link(shell: Shell) -> None:
    """A stranger's folder may have links by the names that results have where none is named."""
    Path("mlp.train.onnx").symlink_to("elsewhere")
    Path("mlp.train.onnx.report.md").symlink_to("elsewhere.md")
    assert shell("build", *BUILT).code == 0
    assert not Path("elsewhere").exists() and not Path("elsewhere.md").exists()
    Path("art").mkdir()
    Path("art/training_model.onnx").symlink_to("../elsewhere")
    assert shell("build", *BUILT, "--artifacts", "art").code == 0
    assert not Path("elsewhere").exists() and not Path("art/training_model.onnx").is_symlink()


def test_a_users_files_are_never_replaced(tmp_path: Path) -> None:
    source = saved_outside(tmp_path / "a")
    model, path = load_model(source)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    with raises(UsageError, "conflict", "m.onnx"):
        check_target(source, model, path, force=True)
    with raises(UsageError, "conflict", "weights.bin"):
        check_target(tmp_path / "a" / "weights.bin", model, path, force=True)
    with raises(UsageError, "file_exists", "notes.txt"):
        save_model(model_of(), foreign)
    assert foreign.read_text() == "mine" and not is_ours(foreign)
    check_target(foreign, force=True)
    with raises(OnnxgradError, "unwritable_file", tmp_path.name):
        check_target(tmp_path)
    with raises(OnnxgradError, "unwritable_file", "no", "m.onnx"):
        check_target(tmp_path / "no" / "m.onnx")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "weights.bin").write_bytes(b"others")
    save_model(model, tmp_path / "b" / "m.onnx", path, force=True)
    assert (tmp_path / "b" / "weights.bin").read_bytes() == b"others"
