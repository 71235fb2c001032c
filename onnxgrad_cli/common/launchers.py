"""Detect, by environment variables, a launcher that has started several processes of one run, such as torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.errors import missing_value, wrong_value

RUN_ID = "TORCHELASTIC_RUN_ID"
"""An environment variable that only torchrun sets."""


class Launcher(NamedTuple):
    """The name of a launcher, and the environment variables in which it passes facts about a process.

    These are the number of processes, the rank of the process, and its rank among those on the same machine.
    """

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
"""The launchers, in the order in which they are looked for.

SLURM_NTASKS is not used for Slurm, because a batch script, which is a single process, has it, too.
"""


class Launch(NamedTuple):
    """The place of this process among the processes that a launcher has started.

    Attributes:
        launcher: the name of the launcher.
        rank: the number of this process, from 0.
        world: the number of processes.
        address, port: the address and port on which rank 0 or the launcher listens; "" and 0 if unknown.
    """

    launcher: str
    rank: int
    world: int
    address: str = ""
    port: int = 0


def launches(environment: Mapping[str, str] = os.environ) -> list[Launch]:
    """Return the place of this process in the run of each launcher that started it, from environment variables.

    Returns:
        A `Launch` for the first launcher found, and one for each other launcher that gives the same number of
        processes. [] if the process was started alone.

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
    """Return True if this process is alone, or is the first of the processes on this machine."""
    return all(environment.get(launcher.local_rank, "0") == "0" for launcher in _announced(environment)[:1])


def rank_here(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the name of the launcher and the rank of this process, as text; both are "" if the process is alone."""
    found = _announced(environment)
    return (found[0].name, environment.get(found[0].rank, "?")) if found else ("", "")


def _announced(environment: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers whose environment variables say that there are several processes."""
    if environment.get(RUN_ID) and environment.get("WORLD_SIZE") == "1":
        return []  # another launcher has started torchrun, not this process
    return [each for each in LAUNCHERS if (number_in(environment.get(each.world, "")) or 0) > 1]


def _check_torchrun(environment: Mapping[str, str]) -> None:
    """Check torchrun's variables. With invalid ones, a process would wrongly conclude that it is alone.

    Raises:
        UsageError: a variable is missing or has an invalid value.
    """
    text = environment.get("WORLD_SIZE", "")
    world = number_in(text) or 0
    if world == 1 or not text:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    hint = "start the processes with torchrun, or unset WORLD_SIZE to train in one process"
    if not world:
        raise wrong_value(f"WORLD_SIZE={text!r} in the environment is not a number of processes", hint)
    if missing:
        raise missing_value(
            f"the environment announces {world} processes (WORLD_SIZE={world}), but has no {', '.join(missing)}", hint
        )
    rank, port = (number_in(environment[name]) for name in ("RANK", "MASTER_PORT"))
    if rank is None or rank >= world:
        raise wrong_value(f"RANK={environment['RANK']!r} in the environment is not one of {world} processes", hint)
    if port is None or not 0 < port < 2**16:
        raise wrong_value(f"MASTER_PORT={environment['MASTER_PORT']!r} in the environment is not a port", hint)


def _address(launcher: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port at which the processes connect to each other.

    These are MASTER_ADDR and MASTER_PORT. Under Slurm, the defaults are the first node, and a port computed from the
    numbers of job and step, so that two steps on one node rarely share a port.
    """
    address, port = environment.get("MASTER_ADDR", ""), number_in(environment.get("MASTER_PORT", "")) or 0
    if launcher != "Slurm":
        return address, port
    job, step = (number_in(environment.get(name, "")) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]  # gpu03 for gpu[03-05,9],login
    return address or first, port or 10_000 + (7 * job + step) % 20_000
