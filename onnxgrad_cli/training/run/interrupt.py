"""How a run hears that it is to end: an interrupt asks for it, and the run ends after its step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.training.distributed.communicator import Communicator, any_of

WAIT = 0.3
"""Seconds that the main thread has to handle a signal. Open MPI kills a process one second after it sent SIGTERM."""


@contextmanager
def asked_to_stop(link: Communicator, folder: Path, tell: Tell) -> Iterator[Callable[[], bool]]:
    """Let an interrupt ask for an end instead of making one; a second one does make it.

    Before the first step there is nothing to be kept, and a file that is opened may let this process wait for ever: an
    interrupt makes an end until whoever takes the steps asks for the first time.

    Several processes end at the same step. If one of them has died, another may wait for it in C code, where no handler
    runs: the request is then told by a thread.

    Args:
        link: connects the processes.
        folder: of the run, which is named in what is told.
        tell: takes a line of narration and the verbosity it belongs to.

    Returns:
        Whether any process was asked, as a function that all of them call at the same time.
    """
    heard, asked, handled = False, False, threading.Event()

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        handled.set()
        if asked or not heard:
            raise KeyboardInterrupt
        asked = True

    def stop() -> bool:
        nonlocal heard
        heard = True
        return any_of(link, asked)

    try:
        before = {number: signal.signal(number, ask) for number in _heard()}
    except ValueError:  # not the main thread: nobody can ask
        before = {}
    ears = _told_by_thread(handled, folder, tell) if link.world > 1 and before else nullcontext()
    try:
        with ears:
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> list[int]:
    """The signals that ask for an end; a terminal that closes sends SIGHUP, unless nohup has it ignored."""
    named = (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP"))
    return [number for number in named if number is not None and signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt wait for the end of what would be lost if it came between."""
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in _heard():
            if signal.getsignal(number) is not None:  # else it is not Python that hears it
                before[number] = signal.signal(number, lambda number, frame: came.append(number))
    except ValueError:  # not the main thread, which alone is interrupted
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
    """Tell of a signal that the main thread does not handle within `WAIT`, as it waits for another process."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)

    def listen() -> None:
        with open(reader, "rb", buffering=0) as heard:
            if heard.read(1) and not handled.wait(WAIT):
                tell(
                    f"the run is being ended, or another of its processes has died: '{folder}' has the last "
                    "checkpoint, `resume` goes on from it",
                    0,
                )
            while heard.read(64):  # a signal more would fail to write to a closed pipe
                pass

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        listener.join(1)
