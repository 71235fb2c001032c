"""Communication by MPI, with a module in place of mpi4py's. `tests/training/steps/test_parallel.py` runs mpirun."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli.common.launchers import Launch
from onnxgrad_cli.common.narration import silent
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.distributed import mpi
from onnxgrad_cli.training.distributed.communicator import RankError
from onnxgrad_cli.training.distributed.mpi import Mpi
from tests.facts import facts, raises


class World:
    """COMM_WORLD of three processes with equal arrays."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ended = rank, list[int]()

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return 3

    def Allreduce(self, place: object, array: np.ndarray) -> None:
        assert place == "in place"
        array *= 3

    def bcast(self, value: Any) -> Any:
        return value

    def Abort(self, code: int) -> None:
        self.ended.append(code)


def joined(monkeypatch: pytest.MonkeyPatch, rank: int, world: int = 3) -> tuple[Mpi, World]:
    group = World(rank)
    module = SimpleNamespace(COMM_WORLD=group, IN_PLACE="in place")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)  # type: ignore[arg-type]
    return Mpi(Launch("Open MPI", rank, world), silent), group


@pytest.mark.parametrize("rank", [0, 2])
def test_what_mpi_does(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    link, group = joined(monkeypatch, rank)
    assert (link.rank, link.world) == (rank, 3)
    array = np.array([1.0, 2.0])
    link.all_reduce(array)
    assert array.tolist() == [3.0, 6.0]
    assert link.broadcast("a") == (None if rank else "a")
    link.abort(7)
    link.close()
    assert group.ended == [7]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_process_has_a_second_to_report_an_error_of_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = joined(monkeypatch, rank)
    slept: list[float] = []
    monkeypatch.setattr(mpi.time, "sleep", slept.append)
    error = OnnxgradError("no file 'a'", "look again", code="missing_file")
    found = link.fail(error)
    if rank == 0:
        assert found is error and not slept
        return
    assert isinstance(found, RankError) and found.rank == 2 and slept == [1]
    assert facts(found) == ("missing_file", "2", "a") and found.hint == "look again"


def test_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(UsageError, "mismatch", "4", "mpi4py", "3", "mpi4py") as refused:
        joined(monkeypatch, 0, world=4)
    assert refused.value.hint and "mpirun" in refused.value.hint


def test_without_a_library_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> None:
        raise RuntimeError(f"cannot load {name}\nand more")

    monkeypatch.setattr(mpi, "import_module", failing)
    with raises(UsageError, "missing_package", "mpi4py", "mpi4py") as refused:
        Mpi(Launch("Open MPI", 0, 3), silent)
    assert refused.value.message.endswith(" mpi4py.MPI") and "Open MPI" in (refused.value.hint or "")
