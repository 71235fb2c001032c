"""How the processes of one training hear of each other: by MPI, where mpirun or its like has started them.

A training on several machines needs no more than three things: a sum over all processes, what the first of them
says, and an end of all when one fails.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.common.packages import install_command
from onnxgrad_cli.errors import OnnxgradError, UsageError

LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPICH",
    "MV2_COMM_WORLD_SIZE": "MVAPICH",
    "SLURM_STEP_NUM_TASKS": "Slurm",
}
"""What a launcher tells each process of how many there are, and which launcher that is."""


class Communicator(Protocol):
    """Who takes part, and how they speak.

    Attributes:
        rank: which process this is, from 0.
        world: how many there are.
    """

    rank: int
    world: int

    def add(self, array: np.ndarray) -> None:
        """Replace an array by its sum over all processes: float32 or float64, contiguous, the same shape everywhere."""

    def told(self, value: Any) -> Any:
        """What the process of rank 0 has given; what the others give is ignored."""

    def end(self, code: int) -> None:
        """End all processes, with this exit code."""


class Alone:
    """One process, with nobody to speak to."""

    rank, world = 0, 1

    def add(self, array: np.ndarray) -> None:
        """Leave the array as it is."""

    def told(self, value: Any) -> Any:
        """The value."""
        return value

    def end(self, code: int) -> None:
        """Nobody else is to be ended."""


class Mpi:
    """The processes that MPI has started together."""

    def __init__(self, world: Any) -> None:
        """Args:
        world: mpi4py's communicator.
        """
        self._world = world
        self.rank, self.world = world.Get_rank(), world.Get_size()

    def add(self, array: np.ndarray) -> None:
        """See `Communicator.add`."""
        from mpi4py import MPI

        self._world.Allreduce(MPI.IN_PLACE, array)

    def told(self, value: Any) -> Any:
        """See `Communicator.told`."""
        return self._world.bcast(value if self.rank == 0 else None)

    def end(self, code: int) -> None:
        """See `Communicator.end`; it does not return."""
        self._world.Abort(code)


def any_of(communicator: Communicator, flag: bool) -> bool:
    """Whether the flag is set in any process; all of them ask at the same time."""
    if communicator.world == 1:
        return flag
    count = np.array([flag], np.float64)
    communicator.add(count)
    return bool(count[0])


def launched(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The launcher that has started this process as one of several, and how many these are; ("", 1) for none."""
    for variable, launcher in LAUNCHERS.items():
        count = number_in(environment.get(variable, "")) or 0
        if count > 1:
            return launcher, count
    return "", 1


def communicator() -> Communicator:
    """What connects this process to those that were started with it.

    Raises:
        OnnxgradError: it was started as one of several, and mpi4py is missing, or belongs to another MPI.
    """
    launcher, count = launched()
    if count == 1:
        return Alone()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # it raises the latter where it finds no MPI
        raise OnnxgradError(
            f"{launcher} has started {count} processes, which can't speak to each other: {str(error).splitlines()[0]}",
            f"{install_command('mpi4py')}, for the MPI whose mpirun this is",
        ) from None
    size = MPI.COMM_WORLD.Get_size()
    if size != count:
        raise UsageError(
            f"{launcher} has started {count} processes, mpi4py knows of {size}: it belongs to another MPI",
            "start them with the mpirun of the MPI that mpi4py was made for",
        )
    return Mpi(MPI.COMM_WORLD)
