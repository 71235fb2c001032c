"""How a run hears that it is to end: by an interrupt, by an end that is asked for, by a terminal that closes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxgrad_cli.common.narration import silent
from onnxgrad_cli.training.distributed.communicator import Alone
from onnxgrad_cli.training.run.interrupt import asked_to_stop, uninterrupted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has neither SIGTERM nor SIGHUP to be asked with")

SIGNALS = ["SIGINT", "SIGTERM", "SIGHUP"]


@pytest.fixture(params=SIGNALS)
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    found = getattr(signal, request.param)
    before = signal.signal(found, lambda number, frame: None)  # else one that is not heard would end the tests
    yield found
    signal.signal(found, before)


def test_a_signal_asks_and_a_second_one_ends(number: int) -> None:
    before = signal.getsignal(number)
    with asked_to_stop(Alone(), Path("run"), silent) as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
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


def test_a_signal_waits_for_what_must_not_be_broken_off(number: int) -> None:
    came: list[int] = []
    signal.signal(number, lambda number, frame: came.append(number))
    with uninterrupted():
        signal.raise_signal(number)
        assert not came
    assert came == [number]
