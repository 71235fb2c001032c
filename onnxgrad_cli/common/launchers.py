"""Detect launchers that start several processes of one training run, by their environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.errors import UsageError

RUN_ID = "TORCHELASTIC_RUN_ID"
"""The variable that only torchrun sets."""


class Launcher(NamedTuple):
    """The variables in which a launcher passes the number of processes, the rank, and the rank on this machine."""

    name: str
    world: str
    rank: str
    local_rank: str


LAUNCHERS = (
    Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    Launcher("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    Launcher("MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    Launcher("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""Launchers in the order in which they are looked for. A batch script of Slurm is one process, and has SLURM_NTASKS."""


class Launch(NamedTuple):
    """One process of several that a launcher has started.

    Attributes:
        launcher: the name of the launcher.
        rank: the number of this process, from 0.
        world: the number of processes.
        address, port: where rank 0 or the launcher listens; "" and 0 if that isn't known.
    """

    launcher: str
    rank: int
    world: int
    address: str = ""
    port: int = 0


def launches(environment: Mapping[str, str] = os.environ) -> list[Launch]:
    """Return the rank and the number of processes from each launcher's variables.

    Returns:
        The launchers that agree with the first one about the number of processes. The list is empty if the process
        was started alone.

    Raises:
        UsageError: the variables of torchrun contradict each other, or some of them are missing.
    """
    _check_torchrun(environment)
    found = []
    for launcher in _announced(environment):
        rank, world = (number_in(environment.get(name, "")) or 0 for name in (launcher.rank, launcher.world))
        found.append(Launch(launcher.name, rank, world, *_address(launcher.name, environment)))
    return [launch for launch in found if launch.world == found[0].world]


def is_first_here(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process is alone, or the first of those that a launcher has started on this machine."""
    return all(environment.get(launcher.local_rank, "0") == "0" for launcher in _announced(environment)[:1])


def rank_here(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the launcher of this process and its rank, both "" if the process is alone."""
    found = _announced(environment)
    return (found[0].name, environment.get(found[0].rank, "?")) if found else ("", "")


def _announced(environment: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers that announce several processes."""
    if environment.get(RUN_ID) and environment.get("WORLD_SIZE") == "1":
        return []  # another launcher has started torchrun, not this process
    return [each for each in LAUNCHERS if (number_in(environment.get(each.world, "")) or 0) > 1]


def _check_torchrun(environment: Mapping[str, str]) -> None:
    """Refuse an environment from which a process would wrongly conclude that it is alone.

    Raises:
        UsageError: a variable is missing or makes no sense.
    """
    text = environment.get("WORLD_SIZE", "")
    world = number_in(text) or 0
    if world == 1 or not text:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    hint = "start the processes with torchrun, or unset WORLD_SIZE to train in one process"
    if not world:
        raise UsageError(f"WORLD_SIZE={text!r} in the environment is no number of processes", hint)
    if missing:
        raise UsageError(
            f"the environment announces {world} processes (WORLD_SIZE={world}), but has no {', '.join(missing)}", hint
        )
    rank, port = (number_in(environment[name]) for name in ("RANK", "MASTER_PORT"))
    if rank is None or rank >= world:
        raise UsageError(f"RANK={environment['RANK']!r} in the environment is none of {world} processes", hint)
    if port is None or not 0 < port < 2**16:
        raise UsageError(f"MASTER_PORT={environment['MASTER_PORT']!r} in the environment is no port", hint)


def _address(launcher: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return where the processes meet: MASTER_ADDR and MASTER_PORT, or under Slurm the first node and a port.

    The port follows from the numbers of job and step, so that two steps on one node rarely share it.
    """
    address, port = environment.get("MASTER_ADDR", ""), number_in(environment.get("MASTER_PORT", "")) or 0
    if launcher != "Slurm":
        return address, port
    job, step = (number_in(environment.get(name, "")) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]  # gpu[03-05,9],login is gpu03 at first
    return address or first, port or 10_000 + (7 * job + step) % 20_000
