"""Steps of a trainer: what is fed, what is drawn, and losses that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.distributed.communicator import Alone
from onnxgrad_cli.training.steps.base import TrainerBase
from onnxgrad_cli.training.steps.full_batch import FullBatchTrainer
from onnxgrad_cli.training.steps.parallel import ParallelTrainer
from onnxgrad_cli.training.trainer import NotFinite, Trainer
from tests.facts import raises
from tests.training.test_trainer import batches, exported, network, training


def test_dropout_is_drawn_anew_at_each_step_and_again_by_the_same_seed() -> None:
    built = training(exported(network(0.5)), "sgd")
    (batch,) = batches(1)

    def losses(trainer: Trainer, count: int) -> list[float]:
        return [trainer.step(batch, 0.0) for _ in range(count)]

    first = losses(Trainer(built, threads=1, seed=1), 6)
    assert len(set(first)) == 6
    assert losses(Trainer(built, threads=1, seed=1), 6) == first
    assert losses(Trainer(built, threads=1, seed=2), 6) != first
    late = Trainer(built, threads=1, seed=1)
    late.load({}, steps=4)
    assert losses(late, 2) == first[4:]


def test_what_a_step_drops_says_nothing_of_the_next() -> None:
    """Where the weight of a unit stays as it is, the unit was dropped."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 500] x) => (float[n, 500] y) { k = Mul(x, w) y = Dropout(k) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(500, np.float32), "w"))
    trainer = Trainer(build(model, Options(losses=(LossSpec("mse"),), optimizer="sgd", mode="train")), threads=1)
    feeds = {"x": np.ones((1, 500), np.float32), "label": np.zeros((1, 500), np.float32)}
    weights = [trainer.weights()["w"]]
    for _ in range(400):
        trainer.step(feeds, 0.1)
        weights.append(trainer.weights()["w"])
    kept = np.where(np.diff(weights, axis=0) != 0, 1.0, -1.0)
    assert abs(kept.mean()) < 0.01
    assert (kept[1:] * kept[:-1]).mean(0).std() == pytest.approx(1 / 20, rel=0.2)  # of 400 coins


def test_a_loss_that_is_no_number_takes_no_step() -> None:
    trainer = Trainer(training(exported(network()), "sgd"), threads=1)
    good, bad = batches(2)
    trainer.step(good, 0.1)
    before = trainer.weights()
    bad["x"][3, 2] = np.nan
    with raises(NotFinite, "not_finite"):
        trainer.step(bad, 0.1)
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.weights()[name], array)
    assert trainer.steps == 1
    assert np.isfinite(trainer.step(good, 0.1))


@pytest.mark.parametrize(
    ("feeds", "code", "name"),
    [
        ({"x": np.zeros((2, 6), np.float32)}, "missing_value", "label"),
        ({"x": np.zeros((2, 6), np.float32), "label": np.zeros(2, np.int64), "z": np.zeros(1)}, "unknown_name", "z"),
    ],
)
def test_a_batch_of_other_inputs_is_refused(feeds: dict[str, np.ndarray], code: str, name: str) -> None:
    with raises(UsageError, code, name):
        Trainer(training(exported(network())), threads=1).step(feeds, 0.1)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.ones((4, 6), ">f4"), ("wrong_type", "x", "f4")),
        (np.ones((1, 6), np.float32), ("wrong_shape", "1", "6", "4", "6")),
        ([[1.0] * 6] * 4, ("wrong_type", "x")),
    ],
)
def test_what_would_be_read_as_other_numbers_is_refused(x: Any, expected: tuple[str, ...]) -> None:
    """onnxruntime reads bytes as they lie, and one sample beside four labels as four."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 6] x) => (float[n, 6] y) <float[6] w = {1, 1, 1, 1, 1, 1}> { y = Mul(x, w) }""")
    trainer = Trainer(build(model, Options(losses=(LossSpec("mse"),), optimizer="sgd")), threads=1)
    with raises(UsageError, *expected):
        trainer.step({"x": x, "label": np.zeros((4, 6), np.float32)})


def test_what_a_model_draws_itself_follows_from_the_seed() -> None:
    """RandomNormalLike begins anew in each session, and onnxruntime seeds it by the clock where nobody says."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 6] x) => (float[n, 6] y) <float[6] w = {1, 1, 1, 1, 1, 1}>
        { e = RandomNormalLike(x) f = Mul(e, w) y = Add(x, f) }"""

    def losses(seed: int) -> list[float]:
        built = build(parser.parse_model(text), Options(losses=(LossSpec("mse"),), optimizer="sgd"))
        trainer = Trainer(built, threads=1, seed=seed)
        return [trainer.step({name: np.ones((4, 6), np.float32) for name in trainer.inputs}) for _ in range(3)]

    assert losses(0) == losses(0) != losses(1)
    assert len(set(losses(0))) == 3


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(Trainer, "sgd"), (lambda built: ParallelTrainer(built, Alone()), "sgd"), (FullBatchTrainer, "")],
    ids=["whole", "parallel", "full batch"],
)
def test_weights_outside_of_the_file_are_read(
    make: Callable[[TrainingModel], TrainerBase], optimizer: str, tmp_path: Path
) -> None:
    """One weight is trained, the other one is frozen."""
    options = Options(losses=(LossSpec("cross-entropy"),), optimizer=optimizer, freeze=("0.weight",))
    model, feeds = exported(network()), batches(1)[0]
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")

    def loss(source: onnx.ModelProto | Path) -> float:
        trainer = make(build(source, options))
        if isinstance(trainer, FullBatchTrainer):
            return trainer.loss_and_gradient([feeds])[0]
        return [trainer.step(feeds, 0.1) for _ in range(2)][-1]

    assert loss(tmp_path / "m.onnx") == loss(exported(network()))


def test_what_is_saved_is_the_model_with_the_weights_found(tmp_path: Path) -> None:
    model = exported(network())
    onnx.save(model, tmp_path / "model.onnx")
    trainer = Trainer(training(model))
    for batch in batches(3):
        trainer.step(batch)
    assert trainer.save(tmp_path / "trained.onnx", tmp_path / "model.onnx") == [tmp_path / "trained.onnx"]
    saved = onnx.load(tmp_path / "trained.onnx")
    assert [node for node in saved.graph.node] == [node for node in model.graph.node]
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in saved.graph.initializer}
    held = {**trainer.weights(), **trainer.state()}
    names = [name for name in stored if name in held]
    assert any("running_mean" in name for name in names) and len(names) == len(trainer.weights()) + 2
    assert all(np.array_equal(stored[name], held[name]) for name in names)
    with raises(UsageError, "conflict", "model.onnx"):
        trainer.save(tmp_path / "model.onnx", tmp_path / "model.onnx")
