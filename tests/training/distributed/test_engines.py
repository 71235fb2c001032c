"""An engine is chosen by the launcher and the packages that are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxgrad_cli.common.packages import REQUIREMENTS
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.distributed import connected
from tests.cli_harness import MLP, Shell, save
from tests.facts import raises

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


def test_without_a_launcher_no_engine_is_imported() -> None:
    program = (
        "from onnxgrad_cli.training.distributed import connected\nimport sys\n"
        "with connected(): assert not {'torch', 'mpi4py'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("environment", "launcher", "packages"),
    [
        (TORCHRUN, "torchrun", ["torch"]),
        (MPIRUN, "Open MPI", ["mpi4py"]),
        (SRUN, "Slurm", ["torch", "mpi4py"]),
        ({**SRUN, "PMI_SIZE": "2", "PMI_RANK": "0"}, "MPICH", ["mpi4py", "torch"]),
    ],
)
def test_a_missing_package_is_named_before_anything_is_read(
    environment: dict[str, str],
    launcher: str,
    packages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    for name in ("torch", "mpi4py"):
        monkeypatch.setitem(sys.modules, name, None)
    failed = Shell(tmp_path, capsys)("train", "none.onnx", "--data", "none.npz")
    assert failed.code == 2 and failed.facts[1:2] == ("2",)
    assert failed.problem is not None and f" {launcher} " in failed.problem.message
    assert failed.problem.message.endswith(f" {packages[0]}")
    commands = [f"pip install '{REQUIREMENTS[package]}'" for package in packages]
    assert f"hint: {', or '.join(commands)}\n" in failed.err
    assert not list(tmp_path.iterdir())


def test_an_incomplete_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    failed = Shell(tmp_path, capsys)("train", "none.onnx", "--data", "none.npz")
    assert failed.code == 2 and "announces 2 processes" in failed.err and "unset WORLD_SIZE" in failed.err


def test_one_announced_process_trains_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    np.savez("data.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = Shell(tmp_path, capsys)("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1")
    assert done.code == 0 and "processes" not in done.err, done.err


def test_slurm_must_say_where_rank_0_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for name, text in SRUN.items():
        monkeypatch.setenv(name, text)
    with raises(UsageError, "missing_value", "0"), connected():
        pass
