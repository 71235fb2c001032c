"""A command runs in a child process, so that nothing in a file can end it without a word.

onnx and onnxruntime are C++: a crafted shape ends the process by an assertion in the inference of shapes, data that
don't fit by a division by zero in a kernel, and no Python code learns of it. The parent only waits, and tells
what its child died of. To fork before anything is loaded costs a millisecond; to run each thing that may die in a
process of its own would cost that with a model in memory, and again for each. Programs that use onnxgrad as a library
have threads, so they are not forked, nor is anything on systems without `sigwaitinfo`, as macOS and Windows.
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
"""Signals that somebody may send to the command, and that are for the child."""

ASKING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Those that ask for an end: the child answers between two runs, of which one may never end."""

GRACE = 3.0
"""Seconds that it has to answer the second one."""

FROM_THE_SYSTEM = 0x80
"""The code of a signal that no process has sent: one of the keyboard goes to parent and child alike."""

NO_MEMORY = 127
"""The exit code by which the C library ends a process that it has no memory for, not even for an error."""

LIBRARIES = frozenset({"numpy", "onnx", "onnxruntime"})
"""Packages of which the native code may end a process."""

KILLED = "the process was killed (SIGKILL), as systems do where the memory is full"
"""The message about a child that somebody has killed."""

_FRAME = re.compile(r'File "(.+)", line \d+ in (\S+)')


Tell = Callable[[str, str, str], None]
"""Tells an error: what happened, what to do about it, and where, as a stack."""


def watch_over_a_child(tell: Tell, apart: bool = False) -> None:
    """Go on in a child process; the parent never returns, but exits with the child's code.

    Args:
        tell: reports the cause of the child's death, with a stack that begins with the innermost frame.
        apart: put the child into a process group of its own. Launchers of several processes signal the group, and the
            child would get a signal twice.
    """
    alive, held = os.pipe()  # the parent holds an end as long as it lives
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
    """Return the exit code of a child, negative for a signal. Signals that arrive meanwhile are sent to the child.

    After two requests to end, the child is killed. Then the code is `INTERRUPTED`.
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
    """The next signal; None when a time of `time.monotonic` comes first."""
    signals = {*SENT, signal.SIGCHLD}
    if until == math.inf:
        return signal.sigwaitinfo(signals)
    return signal.sigtimedwait(signals, max(until - time.monotonic(), 0))


def _end_with_the_parent(alive: int) -> None:
    """Let the system send a signal that ends this process when the parent has ended, be it by a SIGKILL."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)


def _told(number: int, stack: str, tell: Tell) -> int:
    """Say what the child died of, and return the exit code; a signal that somebody has sent ends the parent too."""
    if number in SENT or number == signal.SIGPIPE:
        _end_by(number)
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        tell(KILLED, "use smaller data", "")
    else:
        hint = "export the model again, or check the data; --traceback shows where it happened"
        tell(f"{_where(stack)} ended the process ({name}): a file is damaged, or meets a fault there", hint, stack)
    return 1


def _end_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _where(stack: str) -> str:
    """What was being done, by a stack of which the innermost frame comes first."""
    for file, function in _FRAME.findall(stack):
        package = next((part for part in Path(file).parts if part in LIBRARIES), "")
        if package:
            return f"{package} ({Path(file).stem}.{function})"
    return "native code"
