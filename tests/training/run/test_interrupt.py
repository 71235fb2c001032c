"""How a run hears that it is to end: by an interrupt, by an end that is asked for, by a terminal that closes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnxgrad_cli.common.narration import silent
from onnxgrad_cli.training.distributed.communicator import Alone
from onnxgrad_cli.training.run import interrupt
from onnxgrad_cli.training.run.interrupt import asked_to_stop, uninterrupted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has neither SIGTERM nor SIGHUP to be asked with")

SIGNALS = ["SIGINT", "SIGTERM", "SIGHUP"]


@pytest.fixture(params=SIGNALS)
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    found = getattr(signal, request.param)
    before = signal.signal(found, lambda number, frame: None)  # else one that is not heard would end the tests
    yield found
    signal.signal(found, before)


def test_a_signal_asks_and_a_later_one_ends(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends two at once, which are one request."""
    monkeypatch.setattr(interrupt, "REPEATED", 0.2)
    before = signal.getsignal(number)
    with asked_to_stop(Alone(), Path("run"), silent) as stop:
        assert not stop()
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop()
        time.sleep(0.25)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_before_the_first_step_one_signal_ends(number: int, tmp_path: Path) -> None:
    """Even while a file is opened that lets the process wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    later = threading.Timer(0.2, os.kill, (os.getpid(), number))
    with asked_to_stop(Alone(), Path("run"), silent), pytest.raises(KeyboardInterrupt):
        later.start()
        (tmp_path / "pipe").open()
    later.join()


def test_what_nohup_has_ignored_stays_ignored(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with asked_to_stop(Alone(), Path("run"), silent) as stop:
        signal.raise_signal(number)
        assert not stop()


@pytest.mark.parametrize("blocked", [True, False], ids=["blocked", "free"])
def test_a_thread_tells_of_a_signal_that_the_main_thread_can_not_handle(
    number: int, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C code that waits for another process runs no handler; the signal comes to another thread, and ends no wait."""
    monkeypatch.setattr(interrupt, "WAIT", 0.05)
    told: list[str] = []
    link: Any = SimpleNamespace(world=2)
    other = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), number))
    with asked_to_stop(link, Path("run"), lambda text, _: told.append(text)), pytest.raises(KeyboardInterrupt):
        other.start()
        if blocked:
            ctypes.CDLL(None).usleep(300_000)
        for _ in range(300):
            time.sleep(0.001)
    other.join()
    assert [text for text in told if "'run'" in text] == told and len(told) == blocked


def test_a_signal_waits_for_what_must_not_be_broken_off(number: int) -> None:
    came: list[int] = []
    signal.signal(number, lambda number, frame: came.append(number))
    with uninterrupted():
        signal.raise_signal(number)
        assert not came
    assert came == [number]
