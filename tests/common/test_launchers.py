"""Launchers are detected by the variables that they set."""

from __future__ import annotations

import pytest

from onnxgrad_cli.common.launchers import Launch, is_first_here, launches, rank_here
from onnxgrad_cli.errors import UsageError
from tests.facts import raises_as

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, []),
        (TORCHRUN, [Launch("torchrun", 1, 2, "node1", 29500)]),
        ({**SRUN, **TORCHRUN}, [Launch("torchrun", 1, 2, "node1", 29500)]),
        ({**SRUN, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, []),  # srun has started torchrun
        ({"RANK": "0", "WORLD_SIZE": "1"}, []),
        ({"WORLD_SIZE": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}, [Launch("MPICH", 1, 2)]),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, [Launch("Open MPI", 2, 4)]),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, [Launch("MVAPICH", 1, 2)]),
        ({"PMI_SIZE": "1"}, []),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, []),  # a batch script, which is one process
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[03-05,9],a1"}, [Launch("Slurm", 3, 8, "gpu03", 10_000)]),
        ({**SRUN, "SLURM_JOB_NODELIST": "rack[2-3]n[07,9]"}, [Launch("Slurm", 3, 8, "rack2n07", 10_000)]),
        (
            {**SRUN, "SLURM_STEP_NODELIST": "b,a", "SLURM_JOB_ID": "100003", "SLURM_STEP_ID": "2"},
            [Launch("Slurm", 3, 8, "b", 10_023)],
        ),
        ({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "77"}, [Launch("Slurm", 3, 8, "head", 77)]),
        (
            {**SRUN, "PMI_SIZE": "8", "PMI_RANK": "3", "SLURM_STEP_NODELIST": "a1"},
            [Launch("MPICH", 3, 8), Launch("Slurm", 3, 8, "a1", 10_000)],
        ),
        ({**SRUN, "PMI_SIZE": "16", "PMI_RANK": "3"}, [Launch("MPICH", 3, 16)]),  # srun has started MPICH's proxies
    ],
)
def test_launches(environment: dict[str, str], found: list[Launch]) -> None:
    assert launches(environment) == found
    assert rank_here(environment) == ((found[0].launcher, str(found[0].rank)) if found else ("", ""))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": ""}, ("missing_value", "2", "WORLD_SIZE", "2")),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "has no MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2"}, "RANK='2'"),
        ({"RANK": "first"}, "RANK='first'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, str], words: str | tuple[str, ...]) -> None:
    environment = {name: text for name, text in {**TORCHRUN, **changes}.items() if text}
    with raises_as(UsageError, words) as error:
        launches(environment)
    assert "unset WORLD_SIZE" in str(error.value.hint)


def test_one_process_a_machine_is_the_first() -> None:
    assert is_first_here({}) and is_first_here({**TORCHRUN, "LOCAL_RANK": "0"})
    assert not is_first_here(TORCHRUN) and not is_first_here(SRUN)
