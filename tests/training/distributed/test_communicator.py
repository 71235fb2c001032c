"""A process alone, and programs that start several."""

from __future__ import annotations

import pytest

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.jobs.train import run_train
from onnxgrad_cli.training.distributed import connected
from onnxgrad_cli.training.distributed.communicator import Alone, any_of
from tests.facts import raises
from tests.training.distributed.test_engines import TORCHRUN


def test_alone() -> None:
    with connected() as link:
        assert (link.rank, link.world, link.broadcast(3), any_of(link, True)) == (0, 1, 3, True)


def test_several_processes_of_a_python_program_require_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train alone and write the same files."""
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    with raises(UsageError, "missing_value", "2", "run_train"):
        run_train("none.onnx", "none.npz")
    with pytest.raises(OnnxgradError, match=r"none\.onnx"):
        run_train("none.onnx", "none.npz", communicator=Alone())
