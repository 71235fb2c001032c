"""A process that fails or dies is found through the store."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.distributed import liveness
from onnxgrad_cli.training.distributed.communicator import RankError
from onnxgrad_cli.training.distributed.liveness import Liveness
from tests.facts import facts, raises


class Memory:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self.gone:
            raise RuntimeError("Connection was closed")
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(liveness, "PERIOD", 0.01)
    monkeypatch.setattr(liveness, "SILENT", 0.1)
    return Memory()


@pytest.fixture
def three(store: Memory) -> Iterator[list[Liveness]]:
    processes = [Liveness(store, rank, 3) for rank in range(3)]
    for process in processes:
        process.start(1)
    yield processes
    for process in processes:
        process.close()


def test_all_alive(three: list[Liveness]) -> None:
    time.sleep(0.3)
    assert all(process.failure() is None and process.cause(0.3) is None for process in three)


def test_an_announced_error_is_found_with_its_hint_and_code(three: list[Liveness]) -> None:
    three[1].announce(RankError(1, UsageError("no file 'a'", "name another", ["one", "two"], code="missing_value")))
    for rank in (0, 2):
        error = three[rank].cause(1)
        assert error and (error.rank, *facts(error), error.hint) == (1, "missing_value", "1", "a", "name another")
        assert error.details == ("one", "two") and error.exit_code == 2
    assert three[0].has_announced(1) and not three[0].has_announced(2)


def test_a_dead_process_is_named(three: list[Liveness]) -> None:
    three[2].close()
    time.sleep(0.05)
    error = three[0].cause(1)
    assert error and error.rank == 2 and facts(error) == ("failed", "2")
    three[0].announce(error)
    told = three[1].cause(1)
    assert told and told.message == error.message


def test_an_interrupt_is_not_the_cause_of_others(three: list[Liveness]) -> None:
    interrupt = OnnxgradError("interrupted")
    interrupt.exit_code = 130
    three[1].announce(RankError(1, interrupt))
    three[2].close()
    error = three[0].cause(1)
    assert error and error.rank == 2
    three[2].announce(RankError(2, interrupt))
    time.sleep(0.1)
    begun = time.monotonic()
    assert three[0].cause(30) is None  # somebody has interrupted all
    assert time.monotonic() - begun < 10
    error = three[0].failure()
    assert error and error.exit_code == 130


def test_a_process_that_is_silent_for_minutes_is_lost(three: list[Liveness], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOST", 0.2)
    assert three[0].failure() is None
    three[1].close()
    time.sleep(0.4)
    error = three[0].failure()
    assert error and error.rank == 1


def test_several_that_are_silent_are_all_named(three: list[Liveness]) -> None:
    three[1].close()
    three[2].close()
    error = three[0].cause(0.3)
    assert error and facts(error) == ("failed", "1", "2")


def test_a_store_that_has_gone_is_noticed(store: Memory, three: list[Liveness]) -> None:
    store.gone = True
    time.sleep(0.1)
    assert all(process.unreachable for process in three)


def test_processes_that_do_not_come_are_named(store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Liveness(store, 0, 3)
    monkeypatch.setattr(liveness, "PATIENCE", 0.05)
    told: list[str] = []
    with raises(OnnxgradError, "failed", "0", "2", "3", "1", "2") as failed:
        first.start(0.3, lambda text, level: told.append(text))
    assert failed.value.hint and " errors " in failed.value.hint
    assert told == ["waiting for 2 of 3 processes: rank 1, 2"]
