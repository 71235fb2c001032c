"""A command in a child process: crashes, signals and the end of its parent are reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_hostile_files import PATHS, SUPERVISED
from tests.cli_harness import PROGRAM

DIES = """
import os, signal, sys
from onnxgrad_cli import __main__, cli
cli.run = lambda arguments: os.kill(os.getpid(), int(arguments[0])) or signal.pause()
sys.argv[1:] = ["NUMBER"]
__main__.main()
"""


@SUPERVISED
def test_the_want_of_memory_is_told(tmp_path: Path) -> None:
    """The C library ends a process by itself where an error needs memory that is not there."""
    program = DIES.replace("os.kill(os.getpid(), int(arguments[0]))", "os._exit(127)")
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **PATHS}
    )
    assert result.returncode == 1 and "memory" in result.stderr and "hint: " in result.stderr


@SUPERVISED
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGKILL])
def test_the_death_of_a_command_is_told(tmp_path: Path, number: signal.Signals) -> None:
    program = DIES.replace("NUMBER", str(int(number)))
    environment = {**os.environ, **PATHS}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 1 and number.name in result.stderr and "hint: " in result.stderr


@SUPERVISED
def test_a_run_that_never_ends_is_ended_by_a_second_interrupt(tmp_path: Path) -> None:
    """Native code does not look whether Python was interrupted."""
    program = """
import itertools, os
from onnxgrad_cli import __main__, cli
from onnxgrad_cli.common import supervision
supervision.GRACE = 0.2
begun = map(os.write, [1], [b"."])  # no code of Python runs any more, which a signal could come before
cli.run = lambda arguments: sum(itertools.chain(begun, itertools.repeat(0)))
__main__.main()
"""
    environment = {**os.environ, **PATHS}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as running:
        assert running.stdout is not None and running.stdout.read(1) == b"."
        running.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.4)
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130


@SUPERVISED
def test_a_signal_that_ends_a_command_ends_its_parent(tmp_path: Path) -> None:
    program = DIES.replace("NUMBER", str(int(signal.SIGUSR1)))
    environment = {**os.environ, **PATHS}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=False)
    assert result.returncode == -signal.SIGUSR1


@SUPERVISED
def test_a_command_ends_with_its_parent(tmp_path: Path) -> None:
    """Killed at once, the parent can't hand on anything: the system ends the child, which waits for stdin here."""
    with subprocess.Popen([*PROGRAM, "inspect", "-"], stdin=subprocess.PIPE, env={**os.environ, **PATHS}) as parent:
        assert parent.stdin is not None
        parent.stdin.write(b"\x08" * (1 << 17))  # more than a pipe holds: now it reads
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
        parent.wait()
        assert len(children) == 1
        for _ in range(100):
            state = Path(f"/proc/{children[0]}/stat")
            if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
            time.sleep(0.05)
        pytest.fail("the child goes on")
