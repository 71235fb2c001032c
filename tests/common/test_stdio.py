"""Standard streams that are closed, full, gone or small: a message and an exit code, and never a traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli_harness import MLP, PROGRAM, save

HOME = Path(__file__).parents[2]
ONNXGRAD = " ".join(PROGRAM)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(MLP, Path("mlp.onnx"))
    return tmp_path


def slow(value: object) -> object:
    """A parameter for which a test is slow."""
    return pytest.param(value, marks=pytest.mark.slow)


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of a shell, in which `onnxgrad` is the command; what both streams get is told where they end."""
    environment = {**os.environ, "PYTHONPATH": str(HOME), **variables}
    script = f'onnxgrad() {{ {ONNXGRAD} "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=environment, check=False)
    assert b"Traceback" not in done.stderr and b"internal" not in done.stderr, done.stderr
    assert b"Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize("command", ["--help", slow("list passes"), slow("build mlp.onnx -o -")])
def test_closed_stdout(command: str) -> None:
    done = shell(f"onnxgrad {command} >&-")
    assert done.returncode == 1 and b"error: stdin or stdout can't be used: Bad file descriptor" in done.stderr
    assert os.listdir() == ["mlp.onnx"]


@pytest.mark.slow
def test_closed_stdin_and_stderr() -> None:
    done = shell("onnxgrad inspect - <&-")
    assert done.returncode == 1 and b"stdin or stdout can't be used" in done.stderr
    done = shell("onnxgrad build mlp.onnx --no-verify --no-report 2>&- <&-")
    assert done.returncode == 0 and b"Built" in done.stdout and not done.stderr
    assert shell("onnxgrad biuld >&- 2>&- <&-").returncode == 2


def test_a_closed_stream_gives_its_number_to_no_file() -> None:
    """A model that is written as descriptor 1 would get what is printed."""
    import onnx

    assert shell("onnxgrad build mlp.onnx --no-verify --no-report -q >&- <&- 2>&-").returncode == 0
    onnx.checker.check_model("mlp.train.onnx")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "command", ["list passes", slow("--version"), slow("inspect mlp.onnx --json"), slow("build mlp.onnx -o -")]
)
def test_full_stdout(command: str) -> None:
    done = shell(f"onnxgrad {command} > /dev/full")
    assert done.returncode == 1 and b"can't be used: No space left on device" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.slow
def test_full_streams_after_an_error() -> None:
    done = shell("onnxgrad inspect gone.onnx --json > /dev/full")
    assert done.returncode == 1 and b"no such file" in done.stderr
    assert shell("onnxgrad inspect mlp.onnx 2> /dev/full").returncode == 0, "nobody has asked for what is narrated"


@pytest.mark.parametrize(
    "command", ["--help", *map(slow, ("view mlp.onnx --format html", "inspect mlp.onnx", "build mlp.onnx -o -"))]
)
def test_readers_that_go_away(command: str) -> None:
    done = shell(f"(sleep 0.2; onnxgrad {command}) | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 1 and not done.stderr


@pytest.mark.slow
def test_readers_that_have_read_enough() -> None:
    done = shell("onnxgrad list operators | head -1; exit ${PIPESTATUS[0]}")
    assert done.returncode in (0, 1) and done.stdout.startswith(b"operator")
    assert shell("(sleep 0.2; onnxgrad build gone.onnx) 2>&1 | true; exit ${PIPESTATUS[0]}").returncode == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "latin-1"},
        slow({"PYTHONIOENCODING": "ascii"}),
        slow({"LC_ALL": "C", "PYTHONUTF8": "0"}),
        slow({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
)
def test_encodings_that_lack_a_character(variables: dict[str, str]) -> None:
    done = shell("onnxgrad inspect 'Ω…\u202e.onnx'", **variables)
    assert done.returncode == 1 and b"no such file: '" in done.stderr
