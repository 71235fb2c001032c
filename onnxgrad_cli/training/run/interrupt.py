"""Handle signals that interrupt a run: the run finishes its current step, writes a checkpoint and ends."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.training.distributed.communicator import Communicator, any_of

WAIT = 0.3
"""Seconds that the main thread has to handle a signal before another thread reports it.

Open MPI kills a process one second after sending SIGTERM, so the report must come earlier.
"""

REPEATED = 0.5
"""Seconds in which a second signal is ignored.

`timeout` signals the process and then its whole group, so one stop may arrive as two signals.
"""


@contextmanager
def asked_to_stop(link: Communicator, folder: Path, tell: Tell) -> Iterator[Callable[[], bool]]:
    """Turn the first interrupt into a request to stop after the current step. A second interrupt stops at once.

    Until the training loop calls the returned function for the first time, an interrupt stops at once too. There is
    nothing to save then, and opening a file such as a pipe may block forever.

    If several processes train together, all stop at the same step. If one of them has died, the others may wait for it
    in C code, where Python runs no signal handler. A thread then reports the interrupt.

    Args:
        link: connects the processes.
        folder: the folder of the run, for messages.
        tell: receives a message and its verbosity.

    Yields:
        A function that returns True if any process was asked to stop. All processes must call it at the same time.
    """
    heard, asked, handled = False, False, threading.Event()
    asked_at = -math.inf

    def ask(number: int, frame: Any) -> None:
        nonlocal asked, asked_at
        handled.set()
        if not heard or (asked and time.monotonic() - asked_at > REPEATED):
            raise KeyboardInterrupt
        asked, asked_at = True, time.monotonic()

    def stop() -> bool:
        nonlocal heard
        heard = True
        return any_of(link, asked)

    try:
        before = {number: signal.signal(number, ask) for number in _heard()}
    except ValueError:  # this is not the main thread, so no signal can be handled
        before = {}
    ears = _told_by_thread(handled, folder, tell) if link.world > 1 and before else nullcontext()
    try:
        with ears:
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> list[int]:
    """Return the signals that request a stop, without signals that the process ignores, such as SIGHUP under nohup."""
    named = (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP"))
    return [number for number in named if number is not None and signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay interrupts until the end of the block. An in-place update, for example, must not stop halfway."""
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in _heard():
            if signal.getsignal(number) is not None:  # None: the handler was not installed from Python
                before[number] = signal.signal(number, lambda number, frame: came.append(number))
    except ValueError:  # this is not the main thread, and only the main thread is interrupted
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


@contextmanager
def _told_by_thread(handled: threading.Event, folder: Path, tell: Tell) -> Iterator[None]:
    """Report a signal from a thread, if the main thread does not handle it within `WAIT` s.

    The main thread may be waiting for a process that has died.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)

    def listen() -> None:
        with open(reader, "rb", buffering=0) as heard:
            if heard.read(1) and not handled.wait(WAIT):
                tell(
                    f"the run is being stopped, or another of its processes has died: '{folder}' has the last "
                    "checkpoint, and `resume` continues from it",
                    0,
                )
            while heard.read(64):  # keep reading, because a further signal would fail to write to a closed pipe
                pass

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        listener.join(1)
