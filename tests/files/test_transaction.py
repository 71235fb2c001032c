"""Files that take their names together: whatever ends a process, and at whatever point, what stands there is whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import (
    AtomicWriteGroup,
    check_target,
    load_model,
    save_bytes,
    save_model,
    told,
    transaction,
    writing,
)
from tests.facts import raises
from tests.files.test_writing import model_of, saved_outside

pytestmark = pytest.mark.skipif(os.name == "nt", reason="it has neither modes nor these signals")

HOME = str(Path(__file__).parents[2])


def dies_at(call: int, write: Callable[[], object]) -> bool:
    """Let a copy of this process end, as if killed, before the n-th change of a name; whether there were so many."""
    child = os.fork()
    if not child:
        left = [call]

        def counted(change: Callable[..., object]) -> Callable[..., object]:
            def counting(*arguments: object, **options: object) -> object:
                if not left[0]:
                    os._exit(9)
                left[0] -= 1
                return change(*arguments, **options)

            return counting

        for name in ("replace", "unlink", "chmod"):
            setattr(Path, name, counted(getattr(Path, name)))
        write()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def weight_of(path: Path) -> np.ndarray:
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@contextmanager
def another_process(folder: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code` in a folder, says 'there', and then waits to be ended."""
    text = f"from pathlib import Path\nfrom onnxgrad_cli.files import AtomicWriteGroup, save_bytes\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", text], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": HOME},
    )  # fmt: skip
    try:
        assert process.stdout and process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


WRITING = """
with AtomicWriteGroup(Path("m.onnx")) as switch:
    switch.stage(Path("m.onnx"), lambda file: file.write(b"half"))
    print("there", flush=True)
    input()
"""


@pytest.mark.parametrize("large", [True, False], ids=["weights too large for the model", "data copied"])
@pytest.mark.thinned(2)
def test_a_kill_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 1000 if large else 1 << 40)
    old, new = (np.full((4, 700), value, np.float32) for value in (1, 2))

    def save(weight: np.ndarray, out: Path) -> list[Path]:
        if large:
            return save_model(model_of(weight), out)
        source = saved_outside(tmp_path / "source", weight=weight)
        return save_model(load_model(source)[0], out, source)

    seen = set()
    for call in range(100):
        folder = tmp_path / f"out{call}"
        folder.mkdir()
        before = save(old, folder / "m.onnx")
        (folder / "m.onnx").chmod(0o600)
        killed = dies_at(call, lambda folder=folder: save(new, folder / "m.onnx"))  # type: ignore[misc]
        found = weight_of(folder / "m.onnx")
        assert (found == old).all() or (found == new).all(), call
        seen.add(float(found[0, 0]))
        after = save(new, folder / "m.onnx")
        assert names(folder) == {file.name for file in after} and set(before) != set(after), call
        assert {stat.S_IMODE(file.stat().st_mode) for file in after} == {0o600}
        if not killed:
            break
    assert not killed and call > 3 and seen == {1, 2}


def test_a_bound_head_never_stands_beside_parts_that_are_not_its_own(tmp_path: Path) -> None:
    head, part = tmp_path / "head", tmp_path / "part"

    def save(what: bytes) -> None:
        with AtomicWriteGroup(head, bound=True) as files:
            for out in (head, part):
                files.stage(out, lambda file: file.write(what))
            files.commit()

    for call in range(20):
        save(b"old")
        killed = dies_at(call, lambda: save(b"new"))
        assert not head.exists() or head.read_bytes() == part.read_bytes(), call
        if not killed:
            break
    assert not killed and call > 2 and head.read_bytes() == b"new"
    save(b"newer")
    assert names(tmp_path) == {"head", "part"}


def test_two_processes_write_one_output_one_after_the_other(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    with another_process(tmp_path, WRITING) as process:
        with raises(OnnxgradError, "unwritable_file", "m.onnx"):
            save_bytes(b"onnxgrad", out)
        save_bytes(b"onnxgrad", tmp_path / "other.onnx")
        assert len(names(tmp_path)) == 3, "a writer that lives keeps its lock and its file"
        process.send_signal(signal.SIGKILL)
        process.wait()
        save_bytes(b"onnxgrad", out)
    assert names(tmp_path) == {"m.onnx", "other.onnx"}


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    theirs = {".x.tmp", ".m.onnx.4711.tmp", "m.onnx.tmp", ".m.onnx.lock", "m.onnx.data", "m.onnx.weights.data"}
    for name in theirs:
        (tmp_path / name).write_bytes(b"theirs")
    with another_process(tmp_path, WRITING) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(names(tmp_path) - theirs) == 2
    save_bytes(b"onnxgrad", tmp_path / "other.onnx")
    assert names(tmp_path) == {"other.onnx", *theirs}


def test_a_lock_that_its_last_holder_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has opened it by then would else hold what nobody else sees."""
    hold, out, seen = transaction.hold, tmp_path / "m.onnx", []

    def late(file: IO[str]) -> bool:
        if not seen:
            Path(file.name).unlink()
        seen.append(file.name)
        return hold(file)

    monkeypatch.setattr(transaction, "hold", late)
    with AtomicWriteGroup(out):
        assert len(seen) == 2
        with pytest.raises(OnnxgradError, match="another process"):
            save_bytes(b"", out)


def test_an_interruption_after_the_heads_new_name_keeps_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 1000)
    replace = Path.replace

    def interrupt(self: Path, target: Path) -> None:
        replace(self, target)
        if target.name == "m.onnx":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_model(model_of(np.full((4, 700), 3, np.float32)), tmp_path / "m.onnx")
    assert (weight_of(tmp_path / "m.onnx") == 3).all() and len(names(tmp_path)) == 2


def test_equal_process_ids_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks two write at once, each its own file: one of the two is there, whole."""

    def without(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without)
    monkeypatch.setattr("os.getpid", lambda: 1)
    out = tmp_path / "m.onnx"
    with AtomicWriteGroup(out) as one, AtomicWriteGroup(out) as other:
        one.stage(out, lambda file: file.write(b"one"))
        other.stage(out, lambda file: file.write(b"other"))
        one.commit()
        assert out.read_bytes() == b"one"
        other.commit()
    assert out.read_bytes() == b"other" and names(tmp_path) == {"m.onnx"}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_modes(tmp_path: Path, umask: int) -> None:
    source = saved_outside(tmp_path / "a")
    (tmp_path / "a" / "weights.bin").chmod(0o640)
    model, path = load_model(source)
    out = tmp_path / "b" / "m.onnx"
    out.parent.mkdir()
    before = os.umask(umask)
    try:
        _, data = save_model(model, out, path)
        assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask
        assert stat.S_IMODE(data.stat().st_mode) == 0o640 & ~umask, "no wider than what it is a copy of"
        for mode in (0o600, 0o664, 0o444):
            out.chmod(mode)
            save_model(model, out, path)
            assert stat.S_IMODE(out.stat().st_mode) == mode
    finally:
        os.umask(before)


def test_old_data_go_when_no_model_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 1000)
    out, copy = tmp_path / "m.onnx", tmp_path / "copy.onnx"
    theirs = tmp_path / "other.onnx.0123456789ab.data"
    theirs.write_bytes(b"theirs")
    _, first = save_model(model_of(np.full((4, 700), 1, np.float32)), out)
    shutil.copy(out, copy)
    _, second = save_model(model_of(np.full((4, 700), 2, np.float32)), out)
    assert {first, second, theirs, out, copy} == set(tmp_path.iterdir()), "the copy reads the first"
    assert (weight_of(copy) == 1).all() and (weight_of(out) == 2).all()
    copy.unlink()
    save_model(model_of(), out)
    assert set(tmp_path.iterdir()) == {out, theirs}


def refuse(file: Path) -> None:
    raise OnnxgradError("no")


def test_damaged_data_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 1000)
    out, weight = tmp_path / "m.onnx", np.full((4, 700), 1, np.float32)
    _, data = save_model(model_of(weight), out)
    for check in (refuse, None):
        data.write_bytes(bytes(weight.nbytes))
        with suppress(OnnxgradError):
            save_model(model_of(weight), out, check=check)
        assert (weight_of(out) == 1).all()


def test_what_a_check_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 1000)

    def refuse(file: Path) -> None:
        assert (weight_of(file) == 3).all(), "the data are in their place by then"
        raise OnnxgradError("no")

    with pytest.raises(OnnxgradError, match="no"):
        save_model(model_of(np.full((4, 700), 3, np.float32)), tmp_path / "m.onnx", check=refuse)
    assert not names(tmp_path)


def test_data_that_are_a_link_out_of_the_folder_are_copied(tmp_path: Path) -> None:
    """A model in a store of blobs is a link, and so are its data: beside the link no runtime would follow them."""
    saved_outside(tmp_path / "blobs")
    links = tmp_path / "links"
    links.mkdir()
    for name in ("m.onnx", "weights.bin"):
        (links / name).symlink_to(f"../blobs/{name}")
    model, path = load_model(links / "m.onnx")
    out, data = save_model(model, links / "out.onnx", path)
    assert data.name.startswith("out.onnx.") and not data.is_symlink()
    import onnxruntime

    onnxruntime.InferenceSession(str(out))


def test_long_names_do_not_meet(tmp_path: Path) -> None:
    """Temporary names are longer than what they stand for, and are cut."""
    one, other = (tmp_path / f"{'ä' * 110}{end}" for end in ("", ".report.md"))
    with AtomicWriteGroup(one) as files:
        for out in (one, other):
            files.stage(out, lambda file: file.write(b"onnxgrad"))
        files.commit()
    assert set(tmp_path.iterdir()) == {one, other}


@pytest.mark.parametrize("make", [os.mkfifo, lambda lock: lock.symlink_to("elsewhere")])
def test_a_lock_that_a_stranger_has_left_leads_nowhere(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / ".out.onnx.onnxgrad.lock")
    before = names(tmp_path)
    with raises(OnnxgradError, "unwritable_file", "out.onnx"):
        save_model(model_of(np.ones(3, np.float32)), tmp_path / "out.onnx")
    assert names(tmp_path) == before


def test_no_option_is_named_where_a_file_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the file of any."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OnnxgradError, match="permission denied") as found:
        check_target(tmp_path / "m.onnx")
    assert found.value.hint == "choose another place"
    hints = {errno.EACCES: "choose another place", errno.ENOSPC: "free some space, or choose another place"}
    for number, hint in hints.items():
        with raises(OnnxgradError, "unwritable_file", "m.onnx") as found, told(tmp_path / "m.onnx"):
            raise OSError(number, os.strerror(number))
        assert found.value.hint == hint
