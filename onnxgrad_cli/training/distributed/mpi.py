"""Communicate by MPI, through mpi4py."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import numpy as np

from onnxgrad_cli.common.launchers import Launch
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import OnnxgradError, UsageError, mismatch
from onnxgrad_cli.training.distributed.communicator import RankError


class Mpi:
    """The processes that MPI has started. This class implements `Communicator`."""

    package = "mpi4py"

    def __init__(self, launch: Launch, tell: Tell) -> None:
        """Join the other processes.

        Raises:
            UsageError: mpi4py finds no MPI, or belongs to another MPI than the launcher.
        """
        try:
            self._mpi = import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            hint = f"install {launch.launcher}, or load its module"
            raise UsageError(f"mpi4py can't load MPI: {reason}", hint, code="missing_package") from None
        self._group = self._mpi.COMM_WORLD
        self.rank, self.world = self._group.Get_rank(), self._group.Get_size()
        if self.world != launch.world:
            raise mismatch(
                f"{launch.launcher} has started {launch.world} processes, but mpi4py finds {self.world}: mpi4py "
                "belongs to another MPI",
                "start the processes with the mpirun of the MPI that mpi4py was built for",
            )

    def all_reduce(self, array: np.ndarray) -> None:
        """Replace an array by its sum over all processes."""
        self._group.Allreduce(self._mpi.IN_PLACE, array)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0; the values of other ranks are ignored."""
        return self._group.bcast(value if self.rank == 0 else None)

    def fail(self, error: OnnxgradError) -> OnnxgradError | None:
        """Return the error that this process reports to the user.

        Ranks other than 0 wait for a second first. If all processes fail with the same error, rank 0 ends the others in
        this time, so the error is reported once.
        """
        if self.rank == 0:
            return error
        time.sleep(1)
        return RankError(self.rank, error)

    def abort(self, code: int) -> None:
        """End all processes."""
        self._group.Abort(code)

    def close(self) -> None:
        """Do nothing: mpi4py ends MPI when Python exits."""
