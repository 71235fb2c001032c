"""The trainer, its evaluation and the way back to a model: held against PyTorch and plain sessions of onnxruntime."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, parser

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.checkpoints.stored_weights import with_weights
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.session import find_provider
from onnxgrad_cli.files import save_model
from onnxgrad_cli.training.evaluate import EvalSession, make_eval_model
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.trainer import NotFinite, Trainer
from tests.facts import raises, raises_as

RANDOM = np.random.default_rng(0)


def network(dropout: float = 0.0) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(dropout)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))


def exported(net: torch.nn.Module) -> ModelProto:
    """The net in inference, with a Dropout if it has one: PyTorch leaves that out, unless it exports for training."""
    file = io.BytesIO()
    torch.onnx.export(
        net, (torch.zeros(2, 6),), file, dynamo=False, opset_version=17, input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}, do_constant_folding=False,
        training=torch.onnx.TrainingMode.TRAINING,
    )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]
            for attribute in [a for a in node.attribute if a.name == "training_mode"]:
                node.attribute.remove(attribute)
        if node.op_type == "Dropout":
            del node.input[2:]
    return model


def batches(count: int) -> list[dict[str, np.ndarray]]:
    return [
        {"x": RANDOM.standard_normal((16, 6)).astype(np.float32), "label": RANDOM.integers(0, 3, 16)}
        for _ in range(count)
    ]


def training(model: ModelProto, optimizer: str = "adam", **more: object) -> TrainingModel:
    copy = ModelProto()
    copy.CopyFrom(model)
    losses = (LossSpec("cross-entropy"),)
    return build(copy, Options(losses=losses, optimizer=optimizer, mode="train", **more))  # type: ignore[arg-type]


def test_steps_are_those_of_pytorch() -> None:
    net = network()
    trainer = Trainer(training(exported(net)), threads=1)
    net.train()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    for batch in batches(20):
        loss = trainer.step(batch, 0.01)
        adam.zero_grad()
        wanted = torch.nn.functional.cross_entropy(net(torch.tensor(batch["x"])), torch.tensor(batch["label"]))
        wanted.backward()
        adam.step()
        assert abs(loss - wanted.item()) < 1e-4
    assert trainer.steps == 20
    named = dict(net.named_parameters())
    found = trainer.weights()
    assert found.keys() == named.keys()
    for name, weight in found.items():
        np.testing.assert_allclose(weight, named[name].detach(), atol=2e-4)
    assert trainer.state()["step"] == 20


def test_evaluation_and_the_exported_model_agree(tmp_path: Path) -> None:
    model = exported(network(0.5))
    built = training(model)
    trainer = Trainer(built, threads=1)
    found = make_eval_model(model, built.options, trainer.buffers, counted=True)
    evaluator = EvalSession(found, None, "CPUExecutionProvider", 1)
    for batch in batches(5):
        trainer.step(batch, 0.05)
    (batch,) = batches(1)
    judged = evaluator(batch, trainer.buffers)
    final = with_weights(model, trainer.weights(), trainer.state())
    assert [node.op_type for node in final.graph.node] == [node.op_type for node in model.graph.node]
    assert final.opset_import == model.opset_import
    onnx.save(final, tmp_path / "trained.onnx")
    (y,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": batch["x"]})
    np.testing.assert_allclose(judged.outputs["y"], y, atol=1e-5)
    wanted = torch.nn.functional.cross_entropy(torch.tensor(y), torch.tensor(batch["label"]))
    assert abs(judged.values[0] - wanted.item()) < 1e-5
    mean = next(name for name in trainer.state() if name.endswith("running_mean"))
    assert np.any(trainer.state()[mean] != 0)  # what a step has found of the data goes back too


def test_a_file_is_trained_as_the_model_in_it_is(tmp_path: Path) -> None:
    built = training(exported(network()))
    save_model(built.model, tmp_path / "train.onnx")
    trainers = [Trainer(source, threads=1) for source in (built, str(tmp_path / "train.onnx"))]
    for batch in batches(3):
        assert len({trainer.step(batch, 0.05) for trainer in trainers}) == 1
    with pytest.raises(OnnxgradError, match="no such file"):
        Trainer(tmp_path / "gone.onnx")


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


def test_going_on_from_weights_and_state_is_bit_for_bit_the_same() -> None:
    built, data = training(exported(network(0.3)), "adamw"), batches(10)
    whole = Trainer(built, threads=1)
    halves = [Trainer(built, threads=1) for _ in range(2)]
    for batch in data:
        whole.step(batch, 0.02)
    for batch in data[:5]:
        halves[0].step(batch, 0.02)
    halves[1].load({**halves[0].weights(), **halves[0].state()}, halves[0].steps)
    for batch in data[5:]:
        halves[1].step(batch, 0.02)
    for name, array in {**whole.weights(), **whole.state()}.items():
        np.testing.assert_array_equal(array, {**halves[1].weights(), **halves[1].state()}[name])


def test_a_loss_that_is_no_number_takes_no_step() -> None:
    trainer = Trainer(training(exported(network()), "sgd"), threads=1)
    good, bad = batches(2)
    trainer.step(good, 0.1)
    before = trainer.weights()
    bad["x"][3, 2] = np.nan
    with pytest.raises(NotFinite, match="the loss is nan"):
        trainer.step(bad, 0.1)
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.weights()[name], array)
    assert trainer.steps == 1
    assert np.isfinite(trainer.step(good, 0.1))


HALF = """
<ir_version: 9, opset_import: ["": 22]>
half (bfloat16[batch, 2] x) => (bfloat16[batch, 1] y) <bfloat16[2, 1] w = {0, 0}> { y = MatMul(x, w) }
"""


def test_bfloat16_weights() -> None:
    import ml_dtypes

    options = Options(losses=(LossSpec("mse"),), optimizer="sgd")
    try:
        trainer = Trainer(build(parser.parse_model(HALF), options), threads=1)
        trainer.step({name: np.ones((4, 2 if name == "x" else 1), ml_dtypes.bfloat16) for name in trainer.inputs}, 0.25)
    except OnnxgradError as error:
        pytest.skip(f"this onnxruntime does not compute in bfloat16: {error}")
    np.testing.assert_array_equal(trainer.weights()["w"].astype(float), [[0.5], [0.5]])


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({"x": np.zeros((2, 6), np.float32)}, "the batch has no 'label'"),
        ({"x": np.zeros((2, 6), np.float32), "label": np.zeros(2, np.int64), "z": np.zeros(1)}, "no input 'z'"),
    ],
)
def test_a_batch_of_other_inputs_is_refused(feeds: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Trainer(training(exported(network())), threads=1).step(feeds, 0.1)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.ones((4, 6), ">f4"), ("usage", "x", "f4")),
        (np.ones((1, 6), np.float32), ("usage", "1", "6", "4", "6")),
        ([[1.0] * 6] * 4, "'x' must be an array, but is of type list"),
    ],
)
def test_what_would_be_read_as_other_numbers_is_refused(x: Any, words: str | tuple[str, ...]) -> None:
    """onnxruntime reads bytes as they lie, and one sample beside four labels as four."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 6] x) => (float[n, 6] y) <float[6] w = {1, 1, 1, 1, 1, 1}> { y = Mul(x, w) }""")
    trainer = Trainer(build(model, Options(losses=(LossSpec("mse"),), optimizer="sgd")), threads=1)
    with raises_as(UsageError, words):
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


def test_a_copy_that_becomes_a_weight_of_its_own_in_an_old_file() -> None:
    """Before IR version 4 an initializer must be an input too."""
    model = parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        g (float[n, 2] x, float[2] m) => (float[n, 2] y) <float[2] m = {1, 2}>
        { k = Identity(m) a = Add(x, m) y = Add(a, k) }""")
    trained = with_weights(model, {"k": np.array([10, 20], np.float32)}, {})
    onnx.checker.check_model(trained)
    session = onnxruntime.InferenceSession(trained.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": np.zeros((1, 2), np.float32)})[0], [[11, 22]])


def test_labels_of_tokens_where_classes_are_looked_for_on_another_axis() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, t, 2] x) => (float[n, t, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }""")
    feeds = {"x": np.zeros((4, 5, 2), np.float32), "label": np.zeros((4, 5), np.int64)}
    with pytest.raises(OnnxgradError) as raised:
        Trainer(training(model), threads=1).step(feeds)
    assert raised.value.hint and "the last axis of 'y'" in raised.value.hint
    assert "class-axis=-1" in raised.value.hint
    Trainer(training(model, loss_options={"class_axis": -1}), threads=1).step(feeds)


def test_what_does_not_fit_is_refused() -> None:
    model = exported(network())
    trainer = Trainer(training(model), threads=1)
    with pytest.raises(OnnxgradError, match="the step fails"):
        trainer.step({"x": np.zeros((2, 5), np.float32), "label": np.zeros(2, np.int64)}, 0.1)
    with pytest.raises(UsageError, match=r"no weight or state '4\.wait'"):
        trainer.load({"4.wait": np.zeros(3)})
    with raises(UsageError, "usage", "4.bias", "float64", "3", "float32", "3"):
        trainer.load({"4.bias": np.zeros(3)})
    with pytest.raises(UsageError, match="no optimizer"):
        Trainer(build(exported(network()), Options(losses=(LossSpec("cross-entropy"),))))
    with pytest.raises(OnnxgradError, match="no weight 'other'"):
        with_weights(model, {"other": np.zeros(1, np.float32)}, {})
    with raises(OnnxgradError, "failed", "4.bias", "float32", "3", "float32", "4"):
        with_weights(model, {"4.bias": np.zeros(4, np.float32)}, {})
    with raises(UsageError, "usage", "provider", "quantum"):
        find_provider("quantum")
    assert find_provider("cpu") == "CPUExecutionProvider"


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
    with pytest.raises(UsageError, match="is an input"):
        trainer.save(tmp_path / "model.onnx", tmp_path / "model.onnx")


def test_a_schedule_of_the_momentum_needs_a_model_that_keeps_it_as_state() -> None:
    cycle = parse_schedule("one-cycle:cycle-momentum=true", 0.01, 5)
    trainer = Trainer(training(exported(network()), cycle_momentum=True))
    trainer.step(batches(1)[0], cycle)
    assert trainer.state()["beta1"] == np.float32(0.95)
    trainer.step(batches(1)[0], 0.01)
    assert trainer.state()["beta1"] == np.float32(0.95)
    fixed = Trainer(training(exported(network())))
    with pytest.raises(UsageError, match=r"a constant\nhint: build it with `cycle_momentum=True`"):
        fixed.step(batches(1)[0], cycle)
    assert fixed.steps == 0
