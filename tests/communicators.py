"""Communicators for tests without MPI: threads take the place of processes and meet at a barrier."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.training.distributed.communicator import Communicator

T = TypeVar("T")


class _Room:
    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=60)
        self.said: list[Any] = [None] * world


class Thread:
    """A communicator for one of several threads; see `Communicator`."""

    def __init__(self, rank: int, room: _Room) -> None:
        self.rank, self.world, self._room = rank, len(room.said), room

    def _all(self, value: Any) -> list[Any]:
        self._room.said[self.rank] = value
        self._room.barrier.wait()
        heard = list(self._room.said)
        self._room.barrier.wait()
        return heard

    def all_reduce(self, array: np.ndarray) -> None:
        heard = self._all(array.copy())
        array[...] = np.sum(heard, axis=0)

    def broadcast(self, value: Any) -> Any:
        return pickle.loads(self._all(pickle.dumps(value))[0])

    def fail(self, error: OnnxgradError) -> OnnxgradError:
        return error

    def abort(self, code: int) -> None:
        self._room.barrier.abort()


def together(world: int, run: Callable[[Communicator], T]) -> list[T]:
    """Run a function in `world` threads and return the results by rank. The first error of a thread is raised."""
    room = _Room(world)
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = run(Thread(rank, room))
        except BaseException as error:
            errors.append(error)
            room.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
