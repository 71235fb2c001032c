"""Train in several processes: connect the processes that a launcher has started, through gloo or MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from onnxgrad_cli.common.launchers import Launch, launches
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.packages import install_command, load_package
from onnxgrad_cli.training.distributed.communicator import Alone, Communicator
from onnxgrad_cli.training.distributed.gloo import Gloo
from onnxgrad_cli.training.distributed.mpi import Mpi

ENGINES: dict[str, tuple[type[Gloo | Mpi], ...]] = {"torchrun": (Gloo,), "Slurm": (Gloo, Mpi)}
"""Launcher -> the engines that can connect its processes, the preferred one first. Other launchers use MPI."""


@contextmanager
def connected(tell: Tell = silent) -> Iterator[Communicator]:
    """Connect this process to the other processes that a launcher has started.

    The connection lasts for the `with` block.

    Args:
        tell: receives a message if this process has to wait for others.

    Raises:
        UsageError: the launcher's environment variables contradict each other, or the package of the engine is missing.
        OnnxgradError: the other processes can't be reached.
    """
    found = launches()
    if not found:
        yield Alone()
        return
    link = _join(found, tell)
    try:
        yield link
    finally:
        link.close()


def _join(found: Sequence[Launch], tell: Tell) -> Gloo | Mpi:
    """Connect with the first engine whose package is installed."""
    engines = [(launch, engine) for launch in found for engine in ENGINES.get(launch.launcher, (Mpi,))]
    for launch, engine in engines:
        if find_spec(engine.package) is not None:
            return engine(launch, tell)
    launch, engine = engines[0]
    others = dict.fromkeys(install_command(other.package) for _, other in engines[1:] if other is not engine)
    load_package(engine.package, f"a run of {launch.world} processes under {launch.launcher}", " or ".join(others))
    raise AssertionError("load_package did not report a missing package")
