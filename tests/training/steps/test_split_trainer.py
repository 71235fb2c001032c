"""Runs that are bound once: what a device copies at that moment is never older than the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution import session as execution
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training import trainer
from onnxgrad_cli.training.steps import split_trainer as in_two
from onnxgrad_cli.training.steps.split_trainer import SplitTrainer
from onnxgrad_cli.training.trainer import Trainer

MLP = Path(__file__).parents[3] / "sample_models" / "digits_mlp.onnx"


class CopyingBinding:
    """A binding to a session of which the processor reads every input: they are copied as they are bound."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.own = session.io_binding()

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self.own.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value.numpy().copy()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class CopyingSession:
    """A session whose bindings copy."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session

    def io_binding(self) -> CopyingBinding:
        return CopyingBinding(self.session)

    def run_with_iobinding(self, binding: CopyingBinding) -> None:
        self.session.run_with_iobinding(binding.own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def losses(kind: str) -> list[float]:
    options = Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer="adamw")
    built = build(MLP, options)
    taken = Trainer(built.model) if kind == "whole" else SplitTrainer(split(built.model))
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((8, 1, 8, 8)).astype(np.float32) for name in taken.inputs if name != "y"}
    batch["y"] = rng.integers(0, 10, 8)
    return [taken.step(batch, 0.01) for _ in range(4)]


@pytest.mark.parametrize("kind", ["whole", "in two"])
def test_each_step_reads_the_weights_of_the_last_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(kind)
    assert len(set(expected)) == 4
    open_session = execution.open_session
    for module in (trainer, in_two):
        monkeypatch.setattr(module, "open_session", lambda *a, **k: CopyingSession(open_session(*a, **k)))
    monkeypatch.setitem(execution.DEVICES, execution.CPU, "cpu")
    assert losses(kind) == expected
