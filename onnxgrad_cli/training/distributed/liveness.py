"""Detect failed processes of a run, and share their errors, through a key-value store.

A thread of each process regularly increments a count in the store (a heartbeat), and reads the counts of the other
processes. A process that fails writes its error in place of its count. The count of a killed process stops.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Protocol

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import INTERRUPTED, OnnxgradError
from onnxgrad_cli.training.distributed.communicator import RankError

PERIOD = 0.25
"""Seconds between two heartbeats of a process, which are increments of its count in the store."""

PATIENCE = 10.0
"""Seconds that a process waits for others at the start before it reports which ones are missing."""

SILENT = 1.5
"""Seconds without a heartbeat after which a process is considered dead, after a lost connection or an interrupt."""

LOST = 300.0
"""Seconds without a heartbeat after which a process is considered dead, even if no connection was lost.

A single library call, such as one that reads a large model, may block the counting thread for a long time.
"""


class Store(Protocol):
    """A key-value store that all processes reach, such as TCPStore of torch.distributed."""

    def set(self, key: str, value: str) -> object:
        """Set the value of a key."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys. Every key must have a value."""

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys have values."""


class Liveness:
    """Writes this process's heartbeats (an increasing count) to the store, and reads heartbeats and errors of others.

    Attributes:
        others: the ranks of the other processes.
        unreachable: True after a call to the store has failed.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        """Write the first heartbeat."""
        self._store, self._rank = store, rank
        self.others = [other for other in range(world) if other != rank]
        self.unreachable = False
        self._counts = dict.fromkeys(self.others, b"")
        self._times = dict.fromkeys(self.others, time.monotonic())
        self._errors: dict[int, RankError] = {}
        self._announced = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        store.set(_key(rank), "0")

    def start(self, seconds: float, tell: Tell = silent) -> None:
        """Wait for the first heartbeats of all processes, and start the thread that exchanges heartbeats.

        Args:
            seconds: the longest time to wait.
            tell: receives a message if the wait takes long.

        Raises:
            OnnxgradError: some processes are missing after this time.
        """
        start, told = time.monotonic(), False
        missing = self.others
        while missing := [rank for rank in missing if not self._store.check([_key(rank)])]:
            waited = time.monotonic() - start
            which = f"{len(missing)} of {len(self.others) + 1} processes: rank {', '.join(map(str, missing))}"
            if waited > seconds:
                hint = "look for errors of these processes, and start all with the same number of processes"
                raise OnnxgradError(f"after {seconds:.0f} s there is no connection to {which}", hint)
            if waited > PATIENCE and not told:
                tell(f"waiting for {which}", 0)
                told = True
            time.sleep(0.05)
        self._times = dict.fromkeys(self.others, time.monotonic())
        self._thread.start()

    def _count(self) -> None:
        count = 0
        while not self._closed.wait(PERIOD):
            count += 1
            try:
                if not self._announced:
                    self._store.set(_key(self._rank), str(count))
                values = self._store.multi_get([_key(rank) for rank in self.others])
            except RuntimeError:
                self.unreachable = True
                return
            for rank, value in zip(self.others, values, strict=True):
                self._read(rank, value)

    def _read(self, rank: int, value: bytes) -> None:
        if value != self._counts[rank]:
            self._counts[rank], self._times[rank] = value, time.monotonic()
        if value.startswith(b"{") and rank not in self._errors:
            fields: dict[str, Any] = json.loads(value)
            error = OnnxgradError(fields["message"], fields["hint"], fields["details"], code=fields["code"])
            error.exit_code = fields["exit_code"]
            self._errors[rank] = RankError(fields["rank"], error, name=False)

    def announce(self, error: RankError) -> None:
        """Write an error to the store: the error of this process, or the error of another process that caused it."""
        self._announced = True
        names = ("rank", "message", "hint", "details", "code", "exit_code")
        try:
            self._store.set(_key(self._rank), json.dumps({name: getattr(error, name) for name in names}))
        except RuntimeError:
            self.unreachable = True

    def has_announced(self, rank: int) -> bool:
        """Return True if another process has announced an error."""
        return rank in self._errors

    def failure(self) -> RankError | None:
        """Return an announced error, or an error for a process without a heartbeat for `LOST` seconds.

        Return None if all processes are alive.
        """
        if self._errors:
            return self._cause() or next(iter(self._errors.values()))
        now = time.monotonic()
        lost = [rank for rank in self.others if now - self._times[rank] > LOST]
        return _ended(lost) if lost else None

    def cause(self, seconds: float) -> RankError | None:
        """Wait for the error that led to a lost connection or to an interrupt of this process.

        Args:
            seconds: the longest time to wait.

        Returns:
            The error; None if all other processes are alive, or were interrupted as well.
        """
        start = time.monotonic()
        while True:
            found, now = self._cause(), time.monotonic()
            if found is not None or self.unreachable or all(map(self.has_announced, self.others)):
                return found
            silent = [rank for rank in self.others if rank not in self._errors and now - self._times[rank] > SILENT]
            if now - start > seconds:
                return _ended(silent) if silent else None
            if len(silent) == 1 and now - start > SILENT + 2 * PERIOD:  # a dead process is silent by now
                return _ended(silent)
            time.sleep(0.05)

    def _cause(self) -> RankError | None:
        """Return an announced error that is not an interrupt, or None.

        Interrupts are effects: launchers send them after a failure.
        """
        return next((each for each in list(self._errors.values()) if each.exit_code != INTERRUPTED), None)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join(5)


def _key(rank: int) -> str:
    return f"alive/{rank}"


def _ended(ranks: list[int]) -> RankError:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    return RankError(ranks[0], ended(which), name=False)


def ended(which: str) -> OnnxgradError:
    """Return the error for a process that ended without announcing one."""
    message = f"{which} ended without an error message: it was killed, or its machine or network failed"
    hint = "systems kill a process when memory is full; `resume` continues from the last checkpoint of the run"
    return OnnxgradError(message, hint)
