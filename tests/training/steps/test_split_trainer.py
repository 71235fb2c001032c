"""Trainers on the two halves of a step: the steps are those of PyTorch, and read the weights of the last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution import session as execution
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training import trainer
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.steps import split_trainer as in_two
from onnxgrad_cli.training.steps.split_trainer import SplitTrainer
from onnxgrad_cli.training.trainer import NotFinite, Trainer
from tests.cli_harness import MLP
from tests.passes.optimizer.test_split import batch, digits

DIGITS = Path(__file__).parents[3] / "sample_models" / "digits_mlp.onnx"


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
    built = build(DIGITS, options)
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


def test_a_trainer_on_the_halves_is_the_trainer() -> None:
    built = digits("adamw", mode="train")
    whole, halves = Trainer(built, threads=1), SplitTrainer(split(built.model), threads=1)
    assert halves.inputs.keys() == whole.inputs.keys()
    for _ in range(5):
        assert halves.step(batch(), 0.01) == whole.step(batch(), 0.01)
    assert halves.weights().keys() == whole.weights().keys() and halves.state().keys() == whole.state().keys()
    for name, array in {**whole.weights(), **whole.state()}.items():
        np.testing.assert_array_equal({**halves.weights(), **halves.state()}[name], array)
    bad = batch()
    bad["x"] = np.full_like(bad["x"], np.nan)
    with pytest.raises(NotFinite):
        halves.step(bad, 0.01)
    assert halves.steps == 5
    np.testing.assert_array_equal(halves.weights()["fc2.bias"], whole.weights()["fc2.bias"])


def test_a_momentum_that_changes_is_that_of_the_whole() -> None:
    built = digits("adamw", cycle_momentum=True)
    whole, halves = Trainer(built, threads=1), SplitTrainer(split(built.model), threads=1)
    cycle = parse_schedule("one-cycle:cycle-momentum=true,base-momentum=0.1", 0.01, 5)
    for step in range(5):
        assert halves.step(batch(), cycle) == whole.step(batch(), cycle)
        assert halves.state()["beta1"] == whole.state()["beta1"] == np.float32(cycle.momentum(step))
    for name, array in whole.weights().items():
        np.testing.assert_array_equal(halves.weights()[name], array)


def test_a_step_is_that_of_pytorch() -> None:
    model = parser.parse_model(MLP)
    tensors = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
    weights = [tensors[name].requires_grad_() for name in ("w1", "b1", "w2")]
    adam = torch.optim.AdamW(weights, lr=0.01)
    trainer = SplitTrainer(split(build(model, Options(optimizer="adamw")).model), threads=1)
    rng = np.random.default_rng(0)
    for _ in range(10):
        x, y = rng.standard_normal((8, 4)).astype(np.float32), rng.standard_normal((8, 2)).astype(np.float32)
        hidden = torch.sigmoid(torch.tensor(x) @ weights[0] + weights[1])
        loss = torch.mean((hidden @ weights[2] - torch.tensor(y)) ** 2)
        adam.zero_grad()
        loss.backward()
        assert abs(trainer.step({"x": x, "label": y}, 0.01) - loss.item()) < 1e-4 * loss.item()
        adam.step()
    for name, weight in zip(("w1", "b1", "w2"), weights, strict=True):
        np.testing.assert_allclose(trainer.weights()[name], weight.detach(), atol=1e-4)
