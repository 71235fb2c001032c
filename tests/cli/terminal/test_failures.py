"""What an error is to the user, whatever it was raised from; and an interrupt at any moment."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgrad_cli.cli.terminal.failures import failure
from onnxgrad_cli.errors import OnnxgradError, UsageError
from tests.cli_harness import MLP, Shell, save

HOME = Path(__file__).parents[3]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


def raised(error: BaseException, cause: BaseException | None = None, hidden: bool = False) -> BaseException:
    """The error as it is when it was raised while its cause was handled."""
    try:
        try:
            raise cause or error
        except BaseException as first:
            if cause is None:
                raise
            raise error from (None if hidden else first)
    except BaseException as found:
        return found


@pytest.mark.parametrize(
    "error",
    [
        raised(MemoryError()),
        raised(np._core._exceptions._ArrayMemoryError((2**40,), np.dtype(float))),  # type: ignore[attr-defined]
        raised(UsageError("'d.npz' is damaged"), MemoryError()),
        raised(OnnxgradError("'m.onnx' can't be decoded"), MemoryError(), hidden=True),
        raised(RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc")),
        raised(OnnxgradError("the step fails: Failed to allocate memory for requested buffer of size 99")),
    ],
)
def test_memory_that_ends_is_told_as_such(error: BaseException) -> None:
    found, code = failure(error)
    assert (found.code, code) == ("no_memory", 1) and "smaller" in (found.hint or "")


def test_nesting_that_is_too_deep() -> None:
    for error in (RecursionError("maximum recursion depth exceeded"), raised(KeyError("x"), RecursionError())):
        assert failure(error)[0].message == "the input is nested too deeply"
    assert failure(raised(UsageError("no such weight"), RecursionError()))[0].message == "no such weight"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG])
def test_a_file_out_of_reach_is_no_fault_of_ours(number: int) -> None:
    found, code = failure(OSError(number, os.strerror(number), Path("shut", "c.toml")))
    assert found.message == f"'{Path('shut', 'c.toml')}' can't be reached: {os.strerror(number)}"
    assert (found.code, code) == ("unreadable_file", 1) and "permissions" in (found.hint or "")
    assert "internal" in failure(OSError(number, "of no file"))[0].message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_what_can_not_be_written_is_no_fault_of_ours(number: int) -> None:
    words = os.strerror(number) if number == errno.EROFS else "no space is left"
    unnamed = OSError(number, os.strerror(number))
    for error in (unnamed, raised(ValueError("Can't close the ZIP file"), unnamed)):
        found, code = failure(error)
        assert (found.message, code) == (f"a file can't be written: {words}", 1)
        assert "TMPDIR" in (found.hint or "")
    found, _ = failure(OSError(number, os.strerror(number), "full/x"))
    assert found.message == f"'full/x' can't be written: {words}"


def test_no_folder_takes_temporary_files(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez("d.npz", x=np.zeros((4, 4), np.float32), label=np.zeros((4, 2), np.float32))
    command = ("train", "mlp.onnx", "--data", "d.npz", "--memory", "900MB", "--epochs", "1", "-o", "t.onnx")

    def refuse(folder: str, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), folder)

    with monkeypatch.context() as broken:
        broken.setattr(os, "mkdir", refuse)
        result = shell(*command)
    assert result.code == 1 and result.facts[0] == "unwritable_file" and os.strerror(errno.EROFS) in result.err
    with monkeypatch.context() as broken:
        broken.setattr(tempfile, "tempdir", None)
        broken.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
        result = shell(*command)
    assert result.code == 1 and result.facts == ("unwritable_file", "nowhere"), result.err


@pytest.mark.parametrize(
    "options",
    [
        ("--data", "shut/d.npz"),
        ("--adapter-from", "shut/a.safetensors"),
        ("--lora", "2", "--adapter", "shut/peft"),
        ("--tokenizer", "shut/tokenizer"),
        ("--tuned", "shut/c.toml"),
        ("--rules", "shut/r.py"),
    ],
)
def test_a_folder_that_may_not_be_searched(
    options: tuple[str, ...], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Path.stat

    def stat(path: Path, *arguments: Any, **keywords: Any) -> os.stat_result:
        if path.parts[:1] == ("shut",) and len(path.parts) > 1:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return asked(path, *arguments, **keywords)

    Path("shut").mkdir()
    np.savez("d.npz", x=np.zeros((4, 3), np.float32), label=np.zeros(4, np.int64))
    monkeypatch.setattr(Path, "stat", stat)
    data = () if "--data" in options else ("--data", "d.npz")
    result = shell("train", "mlp.onnx", *data, *options, "--loss", "cross-entropy", "-o", "t.onnx")
    assert result.code == 1, result.err
    assert re.search("'shut/.*' can't be (read|reached): Permission denied", result.err), result.err
    result = shell("build", "mlp.onnx", "--label", "t", "-O", "shut/o")
    assert result.code == 1 and result.facts == ("unreadable_file", "mlp.train.onnx"), result.err


def test_end_of_a_file_is_no_interrupt(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """click takes an EOFError, as numpy raises it, for the end of what is typed."""
    from onnxgrad_cli.jobs import build

    def fail(*_: object, **__: object) -> None:
        raise EOFError("No data left in file")

    monkeypatch.setattr(build, "run_build", fail)
    result = shell("build", "mlp.onnx")
    assert result.code == 1 and result.facts == ("internal",) and "EOFError" in result.err


def test_a_full_memory_ends_a_command(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrad_cli.jobs import build

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(build, "run_build", fail)
    result = shell("build", "mlp.onnx", "--json")
    assert result.code == 1 and result.document["error"]["message"] == "not enough memory"


def test_warnings_are_narrated(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries', which go past the console and name files of theirs; numpy's of a model's numbers are not."""
    import warnings

    from onnxgrad_cli.jobs import build

    original = build.run_build

    def warn(*arguments: object, **how: object) -> object:
        warnings.warn("too old\x1b[31m", DeprecationWarning, stacklevel=1)
        warnings.warn("overflow in cast", RuntimeWarning, stacklevel=1)
        return original(*arguments, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "run_build", warn)
    command = ("build", "mlp.onnx", "--no-verify", "--no-report")
    assert "too old" not in shell(*command).err
    told = shell(*command, "-v").err
    assert "DeprecationWarning: too old\\x1b[31m\n" in told and "overflow" not in told


def test_names_of_files_that_are_no_text(shell: Shell) -> None:
    name = "\udcff\x1b\u202e.onnx"
    os.rename("mlp.onnx", name)
    result = shell("build", name, "--report", "r.json", "--report", "r.md", "--json", "--no-verify")
    assert result.code == 0, result.err
    assert r"\udcff\x1b\u202e" in Path("r.md").read_text()
    assert r"\udcff\x1b\u202e" in shell("build", f"no-{name}").err
    assert result.json["asked"]["model"] == name


@pytest.mark.parametrize("command", ["build", "train"])
def test_what_is_written_to_names_that_are_no_text_is_opened(command: str, shell: Shell) -> None:
    folder = Path("\udcff")
    Path("plain").mkdir()
    onnx.save(onnx.load("mlp.onnx"), "plain/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    Path("plain").rename(folder)
    (folder / "m.onnx").rename(folder / "\udcfe.onnx")
    np.savez("data.npz", x=np.ones((8, 4), np.float32), label=np.ones((8, 2), np.float32))
    data = {"build": (), "train": ("--data", "data.npz", "--epochs", "1")}[command]
    result = shell(command, folder / "\udcfe.onnx", *data, "-o", folder / "t\udcfe.onnx", "--force")
    assert result.code == 0, result.err
    assert (folder / "t\udcfe.onnx").exists()


def test_links_that_lead_to_themselves(shell: Shell) -> None:
    for name in ("loop", "loop.npz", "loop.toml", "loop.py", "loop.onnx"):
        Path(name).symlink_to(name)
    build = ("build", "mlp.onnx", "--no-verify", "--no-report")
    for command in (
        ("build", "loop.onnx"), ("view", "loop.onnx"), ("check", "loop.onnx"),
        ("export", "loop", "--model", "mlp.onnx"),
        (*build, "-o", "loop"), (*build, "-o", "loop/x.onnx"), (*build, "--report", "loop.json"),
        (*build, "--test-data", "loop.npz", "--verify"), (*build, "--config", "loop.toml"),
        (*build, "--rules", "loop.py"), (*build, "--tuned", "loop.toml"), (*build, "--dump-passes", "loop"),
        (*build, "--artifacts", "loop"), (*build, "--loss", "loop.onnx"), ("tune", "mlp.onnx", "-o", "loop.toml"),
        ("train", "mlp.onnx", "--data", "loop.npz"), ("train", "mlp.onnx", "--data", "loop"),
        ("view", "mlp.onnx", "-o", "loop.dot", "--force"), ("derive", "mlp.onnx", "-o", "loop"),
    ):  # fmt: skip
        result = shell(*command)
        assert "internal" not in result.err, (command, result.err)
        assert result.code in (0, 1, 2), (command, result.err)


def test_threads_beyond_reason(shell: Shell) -> None:
    np.savez("d.npz", x=np.zeros((4, 4), np.float32), label=np.zeros((4, 2), np.float32))
    for command in (("train", "mlp.onnx", "--data", "d.npz"), ("tune", "mlp.onnx")):
        result = shell(*command, "--threads", "100000")
        assert result.code == 2 and "--threads" in result.err and "hint: " in result.err


# -- interrupts -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_interrupt_during_an_import(tmp_path: Path) -> None:
    """It waits for the end of the import, and is not lost in it."""
    (tmp_path / "slow_module.py").write_text(
        "import signal, time\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "try:\n    time.sleep(0.1)\nexcept KeyboardInterrupt:\n    print('in the middle')\n"
        "print('imported')\n"
    )
    program = (
        "import sys\nfrom onnxgrad_cli import __main__\nfrom onnxgrad_cli import cli\n"
        "def run(arguments):\n    import slow_module, time\n    time.sleep(5)\n    print('too late')\n"
        "cli.run = run\n__main__.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HOME}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env=environment, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "imported\n", "error: interrupted\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_at_any_moment(shell: Shell, number: int) -> None:
    """After Python itself has started, which answers with a traceback of its own."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    ready = "import sys, os; from onnxgrad_cli.__main__ import main; os.write(1, b'.'); main()"
    command = [sys.executable, "-c", ready, "build", "mlp.onnx", "-o", "t.onnx", "--no-report", "-q"]
    moments = random.Random(0)
    for _ in range(6):
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        assert program.stdout and program.stdout.read(1) == b"."
        time.sleep(moments.uniform(0, 1.0))
        program.send_signal(number)
        error = program.communicate(timeout=60)[1].decode()
        assert "Traceback" not in error and program.returncode in (0, 130, -number), error
        assert {path.name for path in Path().iterdir()} <= {"mlp.onnx", "t.onnx"}
