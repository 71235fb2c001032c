"""Steps in slices are the steps of the whole in one run, to the last bit, and their two sides share memory."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.options import Group, Options
from onnxgrad_cli.passes.optimizer.slices import slice_optimizer
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training import trainer
from onnxgrad_cli.training.steps import sliced as sliced_steps
from onnxgrad_cli.training.steps.overlapping_buffers import overlapping_buffers
from onnxgrad_cli.training.steps.sliced import parts_of
from onnxgrad_cli.training.trainer import NotFinite, Trainer

DTYPES = {"float16": TensorProto.FLOAT16, "float": TensorProto.FLOAT, "double": TensorProto.DOUBLE}

SLICED: list[tuple[str, dict[str, Any]]] = [
    *((each.name, {}) for each in OPTIMIZERS if each.name != "lamb"),
    ("adam", {"optimizer_options": {"amsgrad": True, "weight_decay": 0.1}}),
    ("rmsprop", {"optimizer_options": {"centered": True, "momentum": 0.5}}),
    ("adagrad", {"optimizer_options": {"lr_decay": 0.1, "initial_accumulator_value": 0.3}}),
    ("adamw", {"clip_norm": 0.1}),
    ("adamw", {"clip_value": 0.01}),
    ("adamw", {"ema": 0.9}),
    ("adamw", {"loss_scale": 8.0}),
    ("adamw", {"embed_state": True}),
]  # fmt: skip


def network(dtype: str = "float") -> onnx.ModelProto:
    """Weights of two layers, and those that end in an axis of size one."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g ({dtype}[N, 5] x) => ({dtype}[N, 3, 11, 1] y) <int64[2] axes = {{1, 3}}> {{
            h = MatMul(x, a) i = Add(h, b) j = Tanh(i) k = Unsqueeze(j, axes) y = Mul(k, c)
        }}""")
    rng, kind = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(DTYPES[dtype])
    shapes = {"a": (5, 11), "b": (11,), "c": (3, 11, 1)}
    tensors = {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


def built(optimizer: str, dtype: str = "float", **options: Any) -> TrainingModel:
    return build(network(dtype), Options(losses=(LossSpec("mse"),), optimizer=optimizer, **options))


def batch(dtype: str = "float") -> dict[str, np.ndarray]:
    rng, kind = np.random.default_rng(1), helper.tensor_dtype_to_np_dtype(DTYPES[dtype])
    return {"x": rng.standard_normal((4, 5)).astype(kind), "label": np.ones((4, 3, 11, 1), kind)}


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_steps, "SLICE", 7)
    monkeypatch.setattr(sliced_steps, "LARGE", 12)  # b is not sliced
    monkeypatch.setattr(sliced_steps, "MANY", 12)
    monkeypatch.setattr(trainer, "SHIFT", 7 * 8)


def both(model: TrainingModel) -> tuple[Trainer, Trainer]:
    """The model in slices, and whole."""
    first = Trainer(model, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "parts_of", lambda *_: None)
        return first, Trainer(model, threads=1)


def in_slices(trainer: Trainer) -> bool:
    """Whether the optimizer has sessions of its own: one of what is not sliced, and those of slices."""
    return len(trainer.sessions) > 1


def updates(trainer: Trainer) -> list[onnxruntime.InferenceSession]:
    """The sessions that update slices of weights."""
    return trainer.sessions[2:]


def contents(of: Trainer) -> dict[str, np.ndarray]:
    return {**of.weights(), **of.state()}


def assert_same(first: Trainer, second: Trainer) -> None:
    found, wanted = contents(first), contents(second)
    assert list(found) == list(wanted)
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], name)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("optimizer", "options"), SLICED, ids=str)
def test_steps_are_those_of_the_whole(optimizer: str, options: dict[str, Any]) -> None:
    first, second = both(built(optimizer, **options))
    assert in_slices(first)
    assert not in_slices(second)
    for rate in (0.1, 0.05, 0.02):
        assert first.step(batch(), rate) == second.step(batch(), rate)
        assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_threads_that_share_the_weights_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three threads two have a weight, for b is not sliced; each has rows of its own, which it goes along alone."""
    model = built("adamw")
    one, whole = both(model)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.model.graph.initializer}
    shared = parts_of(model.model, values, 3)
    assert shared is not None
    assert shared.rows == [["a"], ["a_m"], ["a_v"], ["c"], ["c_m"], ["c_v"]]
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
    run = onnxruntime.InferenceSession.run_with_iobinding

    def broken(self: onnxruntime.InferenceSession, *args: Any) -> None:
        if self in updates(trainer) and next(calls) == failing:
            raise RuntimeError("no memory")
        run(self, *args)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", broken)
    with pytest.raises(OnnxgradError, match="no memory"):
        trainer.step(batch(), 0.1)


@pytest.mark.usefixtures("small_slices")
def test_of_doubles() -> None:
    first, second = both(built("adamw", "double"))
    assert in_slices(first)
    for _ in range(4):
        assert first.step(batch("double"), 0.1) == second.step(batch("double"), 0.1)
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_of_halves() -> None:
    """Where gradients are results they are rounded; the whole in one run takes them as they were before."""
    first, second = both(built("sgd", "float16"))
    assert in_slices(first)
    for _ in range(4):
        assert first.step(batch("float16"), 0.1) == pytest.approx(second.step(batch("float16"), 0.1), rel=1e-3)
    found, wanted = contents(first), contents(second)
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype
        np.testing.assert_allclose(array, wanted[name], atol=2e-3)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("lamb", {}), ("adamw", {"accumulate": 2}), ("adamw", {"loss_scale": "dynamic"})],
    ids=str,
)
def test_what_is_no_step_of_each_element_is_left_whole(optimizer: str, options: dict[str, Any]) -> None:
    """A norm of the whole update would compute it twice; what stands in a branch is one node."""
    assert slice_optimizer(split(built(optimizer, **options).model).optimizer, 2) is None


def test_weights_that_are_alike_share_a_model() -> None:
    parts = slice_optimizer(split(built("adamw").model).optimizer, 2)
    assert parts is not None
    assert [update.weight for update in parts.updates] == ["a", "b", "c"]
    assert len({update.model.SerializeToString() for update in parts.updates}) == 1
    grouped = built("adamw", group=(Group("a", {"weight_decay": 0.0}),))
    parts = slice_optimizer(split(grouped.model).optimizer, 12)
    assert parts is not None
    assert [update.weight for update in parts.updates] == ["a", "c"]
    assert len({update.model.SerializeToString() for update in parts.updates}) == 2


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("name", ["LARGE", "MANY"])
def test_small_models_are_left_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_steps, name, 1000)
    assert not in_slices(Trainer(built("adamw"), threads=1))


def test_two_places_of_a_row_overlap() -> None:
    tensors = {f"t{i}": ((3, i), np.dtype(kind)) for i, kind in enumerate(("f4", "f2", "f8", "i8", "f4"), 1)}
    far, near = overlapping_buffers(tensors, 100)
    for name, (shape, dtype) in tensors.items():
        for places in (far, near):
            assert (places[name].shape, places[name].dtype) == (shape, dtype)
            assert places[name].ctypes.data % 64 == 0
        assert far[name].ctypes.data - near[name].ctypes.data == 128
    assert np.shares_memory(far["t2"], near["t3"])


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
    run = onnxruntime.InferenceSession.run_with_iobinding

    def interrupted(self: onnxruntime.InferenceSession, *args: Any) -> None:
        if self in updates(first):
            signal.raise_signal(signal.SIGINT)
        run(self, *args)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.step(batch(), 0.1)
    second.step(batch(), 0.1)
    assert first.steps == 1
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_a_step_that_breaks_off_says_that_the_weights_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = both(built("adamw"))
    run = onnxruntime.InferenceSession.run_with_iobinding

    def broken(self: onnxruntime.InferenceSession, *args: Any) -> None:
        if self in updates(first):
            raise RuntimeError("no memory")
        run(self, *args)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", broken)
    with pytest.raises(OnnxgradError, match="no memory") as caught:
        first.step(batch(), 0.1)
    assert "checkpoint" in caught.value.hint
