"""Steps in threads that share the weights, and steps that are interrupted or fail."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.training.steps import sliced as sliced_steps
from onnxgrad_cli.training.steps.in_place_optimizer import InPlace
from onnxgrad_cli.training.steps.sliced import parts_of
from onnxgrad_cli.training.trainer import NotFinite, Trainer
from tests.passes.optimizer.test_slices import assert_same, batch, both, built, contents, in_slices


@pytest.mark.usefixtures("small_slices")
def test_threads_that_share_the_weights_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a and c, 88 numbers in slices of 7, each thread takes the next slice that is left; b is not sliced."""
    model = built("adamw")
    one, whole = both(model)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.model.graph.initializer}
    parts = parts_of(model.model, values)
    assert parts is not None
    assert parts.in_place == {"a", "a_m", "a_v", "c", "c_m", "c_v"}
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    several = Trainer(model)
    for _ in range(5):
        assert len({trainer.step(batch(), 0.1) for trainer in (several, one, whole)}) == 1
        assert_same(several, one)
        assert_same(several, whole)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_thread_that_breaks_off_is_told_of(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    trainer, calls = Trainer(built("adamw")), itertools.count()
    run = InPlace.run

    def broken(self: InPlace, *args: Any) -> None:
        if next(calls) == failing:
            raise RuntimeError("no memory")
        run(self, *args)

    monkeypatch.setattr(InPlace, "run", broken)
    with pytest.raises(OnnxgradError, match="no memory"):
        trainer.step(batch(), 0.1)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("name", ["MIN_SLICED_ELEMENTS", "MIN_SLICED_TOTAL"])
def test_small_models_are_left_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_steps, name, 1000)
    assert not in_slices(Trainer(built("adamw"), threads=1))


@pytest.mark.usefixtures("small_slices")
def test_weights_stay_where_they_are() -> None:
    first, second = both(built("adamw"))
    for each, stays in ((first, True), (second, False)):
        place = each.buffers["a"].array.ctypes.data
        each.step(batch(), 0.1)
        assert (each.buffers["a"].array.ctypes.data == place) is stays


@pytest.mark.usefixtures("small_slices")
def test_a_step_goes_on_from_what_is_loaded() -> None:
    first, second = both(built("adamw"))
    first.step(batch(), 0.1)
    second.load(contents(first), 1)
    assert first.step(batch(), 0.1) == second.step(batch(), 0.1)
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_a_loss_that_is_no_number_changes_nothing() -> None:
    first, second = both(built("adamw"))
    wrong = {**batch(), "x": np.full((4, 5), np.nan, np.float32)}
    for each in (first, second):
        each.step(batch(), 0.1)
        with pytest.raises(NotFinite):
            each.step(wrong, 0.1)
        each.step(batch(), 0.1)
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_an_interrupt_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = both(built("adamw"))
    run = InPlace.run

    def interrupted(self: InPlace, *args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        run(self, *args)

    monkeypatch.setattr(InPlace, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.step(batch(), 0.1)
    second.step(batch(), 0.1)
    assert first.steps == 1
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_a_step_that_breaks_off_says_that_the_weights_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = both(built("adamw"))

    def broken(self: InPlace, *args: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(InPlace, "run", broken)
    with pytest.raises(OnnxgradError, match="no memory") as caught:
        first.step(batch(), 0.1)
    assert "checkpoint" in caught.value.hint
