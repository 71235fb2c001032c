"""Run a command in a child process, so that a crash in native code is reported instead of ending the program silently.

onnx and onnxruntime are written in C++. A crafted shape can fail an assertion in shape inference, and wrong data can
divide by zero in a kernel. Either ends the process, and Python code can't catch it. Therefore the command runs in a
child process, and the parent only waits and reports how the child ended. Forking before anything is loaded takes a
millisecond. A process for each risky call would take longer, because by then the model is in memory. Programs that use
onnxgrad as a library may have threads, so they are not forked. Systems without `sigwaitinfo`, such as macOS and
Windows, are not supported.
"""

from __future__ import annotations

import faulthandler
import fcntl
import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from onnxgrad_cli.errors import INTERRUPTED

SENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that users may send to the command. The parent passes them on to the child."""

ASKING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that request the end of the command.

The child reacts to them only between two runs of a model, and a run may never end. So the parent kills
the child `GRACE` seconds after the second such signal.
"""

GRACE = 3.0
"""Seconds that the child has to exit after the second signal in `ASKING`; then the parent kills it."""

FROM_THE_SYSTEM = 0x80
"""The `si_code` of signals that the kernel sends, such as for Ctrl-C. They reach the parent and the child."""

NO_MEMORY = 127
"""The exit code with which the C library ends a process if there is not even memory to raise an error."""

LIBRARIES = frozenset({"numpy", "onnx", "onnxruntime"})
"""Packages whose native code may crash the process."""

KILLED = "the process was killed (SIGKILL), probably because the system had no memory left"
"""The message about a child that was killed."""

_FRAME = re.compile(r'File "(.+)", line \d+ in (\S+)')


Tell = Callable[[str, str, str], None]
"""A function that reports an error: its description, a hint, and the stack trace."""


def run_in_subprocess(tell: Tell, apart: bool = False) -> None:
    """Fork, and return in the child process only. The parent waits, and exits with the exit code of the child.

    Args:
        tell: called if the child crashes, to report it. The stack trace begins with the innermost frame.
        apart: put the child into a process group of its own. Launchers of several processes send signals to the whole
            group, so that the child would otherwise get each signal twice.
    """
    alive, held = os.pipe()  # the parent keeps its end open as long as it lives
    dump, dumped = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*SENT, signal.SIGCHLD})
    child = os.fork()
    if child:
        os.close(dumped)
        status = _wait(child, apart)
        if status == NO_MEMORY:
            tell("the process ended because there was no memory left", "use smaller data", "")
            status = 1
        os._exit(status if status >= 0 else _told(-status, os.read(dump, 1 << 16).decode(errors="replace"), tell))
    if apart:
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(held)
    os.close(dump)
    _end_with_the_parent(alive)
    faulthandler.enable(dumped, all_threads=False)


def _wait(child: int, apart: bool) -> int:
    """Wait for the child, and return its exit code; negative if a signal ended it. Pass signals on to the child.

    If the child still runs `GRACE` seconds after the second signal in `ASKING`, it is killed, and the code is
    `INTERRUPTED`.
    """
    asked, until = 0, math.inf
    while True:
        info = _next(until)
        if info is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return INTERRUPTED
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            continue
        if apart or info.si_code != FROM_THE_SYSTEM:
            os.kill(child, info.si_signo)
        asked += info.si_signo in ASKING
        if asked == 2:
            until = time.monotonic() + GRACE


def _next(until: float) -> signal.struct_siginfo | None:
    """Wait for the next signal, and return it; None if there is none until `time.monotonic()` is `until`."""
    signals = {*SENT, signal.SIGCHLD}
    if until == math.inf:
        return signal.sigwaitinfo(signals)
    return signal.sigtimedwait(signals, max(until - time.monotonic(), 0))


def _end_with_the_parent(alive: int) -> None:
    """Make the kernel send this process a signal when the parent ends, even if the parent is killed.

    Args:
        alive: the read end of a pipe whose write end the parent keeps open.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)


def _told(number: int, stack: str, tell: Tell) -> int:
    """Report the signal that ended the child, and return the exit code.

    If it is a signal that users send, or SIGPIPE, the parent ends itself by the same signal instead.
    """
    if number in SENT or number == signal.SIGPIPE:
        _end_by(number)
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        tell(KILLED, "use smaller data", "")
    else:
        hint = "export the model again, or check the data; --traceback shows where it happened"
        tell(f"{_where(stack)} crashed ({name}): a file is damaged, or triggers a bug there", hint, stack)
    return 1


def _end_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _where(stack: str) -> str:
    """Return the name of the native function that crashed, given a stack trace that begins with the innermost frame."""
    for file, function in _FRAME.findall(stack):
        package = next((part for part in Path(file).parts if part in LIBRARIES), "")
        if package:
            return f"{package} ({Path(file).stem}.{function})"
    return "native code"
