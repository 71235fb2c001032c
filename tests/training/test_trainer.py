"""The trainer, its evaluation and the way back to a model: held against PyTorch and plain sessions of onnxruntime."""

from __future__ import annotations

import io
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, parser

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.checkpoints.stored_weights import with_weights
from onnxgrad_cli.errors import ARGUMENT, OnnxgradError, UsageError
from onnxgrad_cli.execution.session import find_provider
from onnxgrad_cli.files import save_model
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.steps.full_batch import FullBatchTrainer
from onnxgrad_cli.training.trainer import Trainer
from tests.facts import raises

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


def test_a_file_is_trained_as_the_model_in_it_is(tmp_path: Path) -> None:
    built = training(exported(network()))
    save_model(built.model, tmp_path / "train.onnx")
    trainers = [Trainer(source, threads=1) for source in (built, str(tmp_path / "train.onnx"))]
    for batch in batches(3):
        assert len({trainer.step(batch, 0.05) for trainer in trainers}) == 1
    with raises(OnnxgradError, "missing_file", "gone.onnx"):
        Trainer(tmp_path / "gone.onnx")


def test_a_model_in_memory_has_its_weights_beside_its_file(tmp_path: Path) -> None:
    built, file = training(exported(network())), tmp_path / "train.onnx"
    onnx.save(deepcopy(built.model), file, save_as_external_data=True, size_threshold=64, location="train.bin")
    sources = (built, file, onnx.load(file, load_external_data=False), file.read_bytes())
    trainers = [Trainer(source, path=None if source is built else file, threads=1) for source in sources]
    for batch in batches(2):
        assert len({trainer.step(batch, 0.05) for trainer in trainers}) == 1


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


def test_labels_of_tokens_where_classes_are_looked_for_on_another_axis() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, t, 2] x) => (float[n, t, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }""")
    feeds = {"x": np.zeros((4, 5, 2), np.float32), "label": np.zeros((4, 5), np.int64)}
    with pytest.raises(OnnxgradError) as raised:
        Trainer(training(model), threads=1).step(feeds)
    assert raised.value.hint and "'y'" in raised.value.hint and "class-axis=-1" in raised.value.hint
    Trainer(training(model, loss_options={"class_axis": -1}), threads=1).step(feeds)


def test_what_does_not_fit_is_refused() -> None:
    model = exported(network())
    trainer = Trainer(training(model), threads=1)
    whole = FullBatchTrainer(build(model, Options(losses=(LossSpec("cross-entropy"),))), threads=1)
    feeds = {"x": np.zeros((2, 5), np.float32), "label": np.zeros(2, np.int64)}
    for step in (lambda: trainer.step(feeds, 0.1), lambda: whole.loss_and_gradient([feeds])):
        with pytest.raises(OnnxgradError) as failed:
            step()
        assert failed.value.hint and "x float32[2, 5]" in failed.value.hint
    with raises(UsageError, "unknown_name", "4.wait"):
        trainer.load({"4.wait": np.zeros(3)})
    with raises(UsageError, "mismatch", "4.bias", "float64", "3", "float32", "3"):
        trainer.load({"4.bias": np.zeros(3)})
    with raises(UsageError, "missing_value"):
        Trainer(build(exported(network()), Options(losses=(LossSpec("cross-entropy"),))))
    with raises(OnnxgradError, "mismatch", "other"):
        with_weights(model, {"other": np.zeros(1, np.float32)}, {})
    with raises(OnnxgradError, "mismatch", "4.bias", "float32", "3", "float32", "4"):
        with_weights(model, {"4.bias": np.zeros(4, np.float32)}, {})
    with raises(UsageError, "unknown_name", "provider", "quantum"):
        find_provider("quantum")
    assert find_provider("cpu") == "CPUExecutionProvider"


def test_a_schedule_of_the_momentum_needs_a_model_that_keeps_it_as_state() -> None:
    cycle = parse_schedule("one-cycle:cycle-momentum=true", 0.01, 5)
    trainer = Trainer(training(exported(network()), cycle_momentum=True))
    trainer.step(batches(1)[0], cycle)
    assert trainer.state()["beta1"] == np.float32(0.95)
    trainer.step(batches(1)[0], 0.01)
    assert trainer.state()["beta1"] == np.float32(0.95)
    fixed = Trainer(training(exported(network())))
    with raises(UsageError, "conflict") as refused:
        fixed.step(batches(1)[0], cycle)
    assert refused.value.hint and ARGUMENT.findall(refused.value.hint) == [("cycle_momentum", "True")]
    assert fixed.steps == 0
