"""Communication between the processes of one training run.

A run needs three operations: sum an array over all processes, broadcast a value from the first process, and end all
processes if one fails.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from onnxgrad_cli.errors import OnnxgradError


class RankError(OnnxgradError):
    """The error of a process that failed, in a run of several processes. The message names the process.

    Attributes:
        rank: the rank of the process.
    """

    def __init__(self, rank: int, error: OnnxgradError, *, name: bool = True) -> None:
        """Args:
        rank: the rank of the process.
        error: the error of the process.
        name: put the rank in front of the message. False if the message contains it already.
        """
        message = f"rank {rank}: {error.message}" if name else error.message
        super().__init__(message, error.hint, error.details, code=error.code)
        self.rank, self.exit_code = rank, error.exit_code


class Communicator(Protocol):
    """A group of processes that train together. `Gloo`, `Mpi` and `Alone` implement this interface.

    Attributes:
        rank: the number of this process, from 0.
        world: the number of processes.
    """

    rank: int
    world: int

    def all_reduce(self, array: np.ndarray) -> None:
        """Replace an array by its sum over all processes.

        Args:
            array: float32 or float64, contiguous, of the same shape in all processes.

        Raises:
            OnnxgradError: another process has failed.
        """

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0; the values of other ranks are ignored.

        Raises:
            OnnxgradError: another process has failed.
        """

    def fail(self, error: OnnxgradError) -> OnnxgradError | None:
        """Announce to the other processes that this one has failed.

        Returns:
            The error that this process reports to the user: its own, or the error of another process that caused its
            own. None if another process reports the error.
        """

    def abort(self, code: int) -> None:
        """End this process, or all processes, with an exit code. Don't wait for other processes."""


class Alone:
    """A communicator for one process."""

    rank, world = 0, 1

    def all_reduce(self, array: np.ndarray) -> None:
        """Do nothing: the array is the sum already."""

    def broadcast(self, value: Any) -> Any:
        """Return `value`, because there are no other processes."""
        return value

    def fail(self, error: OnnxgradError) -> OnnxgradError | None:
        """Return `error`, because there are no other processes."""
        return error

    def abort(self, code: int) -> None:
        """Do nothing: there are no other processes."""


def any_of(communicator: Communicator, flag: bool) -> bool:
    """Return True if the flag is set in any process. All processes call it at the same time."""
    if communicator.world == 1:
        return flag
    count = np.array([flag], np.float64)
    communicator.all_reduce(count)
    return bool(count[0])
