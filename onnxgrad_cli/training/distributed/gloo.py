"""Communicate by gloo, through torch.distributed.

A collective is polled, so that a process notices within a second that another one has failed, and answers signals.
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
from onnxgrad_cli.errors import INTERRUPTED, OnnxgradError, UsageError
from onnxgrad_cli.training.distributed.communicator import RankError
from onnxgrad_cli.training.distributed.liveness import PERIOD, Liveness, ended

CONNECT = 600.0
"""Seconds that processes have to connect."""

COLLECTIVE = timedelta(days=30)
"""The limit of one collective. `Liveness` notices lost processes; a validation by rank 0 may take hours."""

REPORT = 5.0
"""Seconds in which a process of a lower rank has to announce that it reports an error."""


class Gloo:
    """The processes that a launcher has started, connected by gloo; see `Communicator`."""

    package = "torch"

    def __init__(self, launch: Launch, tell: Tell) -> None:
        """Join the other processes.

        Raises:
            UsageError: the launcher does not say where the processes meet.
            OnnxgradError: they can't be reached.
        """
        self.rank, self.world = launch.rank, launch.world
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its warnings and errors come with stacks of C++
        torch, distributed = import_module("torch"), import_module("torch.distributed")
        self._tensor = torch.from_numpy
        if not launch.address:
            raise UsageError(
                f"{launch.launcher} does not say where rank 0 runs", "set MASTER_ADDR to the name of its machine"
            )
        self._hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # by rank 0, and not by torchrun
        try:
            store = self._connected(distributed.TCPStore, launch)
            # torchrun's store outlives the processes that it restarts after a failure
            store = distributed.PrefixStore(f"onnxgrad/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            self._liveness = Liveness(store, self.rank, self.world)
            self._liveness.start(CONNECT, tell)
            self._group = distributed.ProcessGroupGloo(store, self.rank, self.world, timedelta(seconds=CONNECT))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise OnnxgradError(
                f"rank {self.rank} can't connect through {launch.address}:{launch.port}: {reason}",
                "check MASTER_ADDR, MASTER_PORT and the firewall; GLOO_SOCKET_IFNAME chooses a network interface",
            ) from None
        self._sum, self._from_first = distributed.AllreduceOptions(), distributed.BroadcastOptions()
        self._from_first.rootRank = self._from_first.rootTensor = 0
        self._sum.timeout = self._from_first.timeout = COLLECTIVE

    def _connected(self, store: Any, launch: Launch) -> Any:
        """Return the store. It is waited for in short calls, between which Python answers signals.

        Raises:
            RuntimeError: there is none.
        """
        hosts = self._hosted and self.rank == 0
        until = time.monotonic() + CONNECT
        while True:
            try:
                found = store(
                    launch.address, launch.port, is_master=hosts, timeout=timedelta(seconds=5), wait_for_workers=False
                )
                found.set_timeout(timedelta(seconds=CONNECT))  # a store that answers late has not failed
                return found
            except RuntimeError:
                if hosts or time.monotonic() > until:
                    raise

    def all_reduce(self, array: np.ndarray) -> None:
        """See `Communicator.all_reduce`."""
        self._finish(self._group.allreduce, array, self._sum)

    def broadcast(self, value: Any) -> Any:
        """See `Communicator.broadcast`."""
        data = np.frombuffer(bytearray(pickle.dumps(value)) if self.rank == 0 else bytearray(), np.uint8)
        size = np.array([len(data)])
        self._finish(self._group.broadcast, size, self._from_first)
        if self.rank:
            data = np.empty(int(size[0]), np.uint8)
        self._finish(self._group.broadcast, data, self._from_first)
        return value if self.rank == 0 else pickle.loads(data.data)

    def _finish(self, collective: Any, array: np.ndarray, options: Any) -> None:
        """Run a collective on an array, and wait for it.

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
                time.sleep(pause)  # without a pause at first: most collectives of small models take less than 1 ms
                pause = min(pause + 1e-6, 1e-3)
            work.wait()
        except RuntimeError:  # a connection was closed
            raise self._liveness.cause(REPORT) or self._lost() from None

    def _lost(self) -> RankError:
        host = "rank 0" if self._hosted else "torchrun or its machine"
        host = host if self._liveness.unreachable else "another process"
        return RankError(0, ended(host), name=False)

    def fail(self, error: OnnxgradError) -> OnnxgradError | None:
        """See `Communicator.fail`. The lowest rank that is alive reports."""
        cause: OnnxgradError = error
        if error.exit_code == INTERRUPTED:  # perhaps by a launcher, as another process has failed
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
        """End this process. Its connections are not closed in order, which might wait for others."""
        time.sleep(2 * PERIOD)  # the others read its error, perhaps from a store that ends with it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:
        """Leave the group."""
        self._liveness.close()
