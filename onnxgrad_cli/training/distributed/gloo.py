"""Communicate by gloo, through torch.distributed.

A process polls each collective operation, so that it can handle signals, and notices within a second that another
process failed.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import numpy as np

from onnxgrad_cli.common.launchers import Launch
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import INTERRUPTED, OnnxgradError, missing_value
from onnxgrad_cli.training.distributed.communicator import RankError
from onnxgrad_cli.training.distributed.liveness import PERIOD, Liveness, ended

CONNECT = 600.0
"""Seconds that the processes have to connect to each other at the start."""

COLLECTIVE = timedelta(days=30)
"""Timeout of one collective operation.

The timeout is long because other processes wait while rank 0 validates, which may take hours. `Liveness` detects dead
processes much earlier.
"""

REPORT = 5.0
"""Seconds that a failed process waits for a process of lower rank to announce the error, before reporting it itself."""


class Gloo:
    """The processes that a launcher has started, connected by gloo. This class implements `Communicator`."""

    package = "torch"

    def __init__(self, launch: Launch, tell: Tell) -> None:
        """Join the other processes.

        Raises:
            UsageError: the launcher does not set the address of rank 0.
            OnnxgradError: the other processes can't be reached.
        """
        self.rank, self.world = launch.rank, launch.world
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hide warnings and errors with C++ stack traces
        torch, distributed = import_module("torch"), import_module("torch.distributed")
        self._tensor = torch.from_numpy
        if not launch.address:
            hint = "set MASTER_ADDR to the host name of rank 0"
            raise missing_value(f"{launch.launcher} does not set the address of rank 0", hint)
        self._hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # by rank 0, not torchrun
        try:
            store = self._connected(distributed.TCPStore, launch)
            # torchrun's store outlives the processes that it restarts after a failure
            store = distributed.PrefixStore(f"onnxgrad/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            self._liveness = Liveness(store, self.rank, self.world)
            self._liveness.start(CONNECT, tell)
            self._group = distributed.ProcessGroupGloo(store, self.rank, self.world, timedelta(seconds=CONNECT))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            message = f"rank {self.rank} can't connect through {launch.address}:{launch.port}: {reason}"
            hint = "check MASTER_ADDR, MASTER_PORT and the firewall; GLOO_SOCKET_IFNAME chooses a network interface"
            raise OnnxgradError(message, hint) from None
        self._sum, self._from_first = distributed.AllreduceOptions(), distributed.BroadcastOptions()
        self._from_first.rootRank = self._from_first.rootTensor = 0
        self._sum.timeout = self._from_first.timeout = COLLECTIVE

    def _connected(self, store: Any, launch: Launch) -> Any:
        """Connect to the key-value store and return it.

        Calls have short timeouts, so that Python can handle signals between them.

        Raises:
            RuntimeError: the store can't be created or reached.
        """
        hosts = self._hosted and self.rank == 0
        until, short = time.monotonic() + CONNECT, timedelta(seconds=5)
        while True:
            try:
                found = store(launch.address, launch.port, is_master=hosts, timeout=short, wait_for_workers=False)
                found.set_timeout(timedelta(seconds=CONNECT))  # a store that answers late has not failed
                return found
            except RuntimeError:
                if hosts or time.monotonic() > until:
                    raise

    def all_reduce(self, array: np.ndarray) -> None:
        """Replace an array by its sum over all processes."""
        self._finish(self._group.allreduce, array, self._sum)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0; the values of other ranks are ignored."""
        data = np.frombuffer(bytearray(pickle.dumps(value)) if self.rank == 0 else bytearray(), np.uint8)
        size = np.array([len(data)])
        self._finish(self._group.broadcast, size, self._from_first)
        if self.rank:
            data = np.empty(int(size[0]), np.uint8)
        self._finish(self._group.broadcast, data, self._from_first)
        return value if self.rank == 0 else pickle.loads(data.data)

    def _finish(self, collective: Any, array: np.ndarray, options: Any) -> None:
        """Run a collective operation on an array, and wait for its end.

        Raises:
            RankError: another process has failed.
        """
        pause = 0.0
        try:
            work = collective([self._tensor(array)], options)
            while not work.is_completed():
                error = self._liveness.failure()
                if error is not None or self._liveness.unreachable:
                    raise self._liveness.cause(REPORT) or error or self._lost()
                time.sleep(pause)  # almost no pause at first: most collectives of small models take less than 1 ms
                pause = min(pause + 1e-6, 1e-3)
            work.wait()
        except RuntimeError:  # a connection was closed
            raise self._liveness.cause(REPORT) or self._lost() from None

    def _lost(self) -> RankError:
        host = "rank 0" if self._hosted else "torchrun or its machine"
        host = host if self._liveness.unreachable else "another process"
        return RankError(0, ended(host), name=False)

    def fail(self, error: OnnxgradError) -> OnnxgradError | None:
        """Announce an error to the other processes. The living process with the lowest rank reports it to the user."""
        cause: OnnxgradError = error
        if error.exit_code == INTERRUPTED:  # possibly by the launcher, because another process has failed
            cause = self._liveness.cause(2) or error
        shared = cause if isinstance(cause, RankError) else RankError(self.rank, cause)
        self._liveness.announce(shared)
        until = time.monotonic() + REPORT
        while time.monotonic() < until:
            if self._liveness.unreachable:
                return shared if self.rank == int(self._hosted) else None
            if any(map(self._liveness.has_announced, range(self.rank))):
                return None
            if not set(range(self.rank)) - {shared.rank}:  # rank 0 has ended, and reports nothing
                break
            time.sleep(PERIOD / 5)
        return shared if self.rank else cause

    def abort(self, code: int) -> None:
        """End this process. Its connections are not shut down first, because that might wait for other processes."""
        time.sleep(2 * PERIOD)  # let the others read the error, as the store may end with this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:
        """Leave the group."""
        self._liveness.close()
