"""A model that comes in training mode, as onnxruntime's tutorial exports it: what is written of it is for inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli import Options, build
from onnxgrad_cli.compat.artifacts import LossType, OptimType, generate_artifacts
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.jobs.inspect import inspect
from onnxgrad_cli.jobs.train import Course, run_train
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import LoraSpec
from onnxgrad_cli.training.trainer import Trainer

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((64, 3)).astype(np.float32) * 3 + 2
W = RANDOM.standard_normal((3, 4)).astype(np.float32)


def network(layer: str = "", names: str = "s, b, m, v", again: str = "") -> ModelProto:
    """x -> MatMul -> BatchNormalization in training mode -> Dropout that drops nothing -> y."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 4] y) <float[4] s = {{1, 1, 1, 1}}, float[4] b = {{0, 0, 0, 0}},
      float[4] m = {{0, 0, 0, 0}}, float[4] v = {{1, 1, 1, 1}}, float r = {{0}}, bool on = {{1}}>
    {{ h = MatMul(x, w) {layer} k, m2, v2 = BatchNormalization<training_mode = 1>(h, {names}) {again}
       y = Dropout(k, r, on) }}"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "model.onnx")
    np.savez("data.npz", x=X, label=np.tanh(X @ W))
    return tmp_path


def alone_and_together(file: str) -> tuple[np.ndarray, np.ndarray]:
    session = onnxruntime.InferenceSession(file)
    single = [session.run(None, {"x": X[i : i + 1]})[0] for i in range(len(X))]
    return np.concatenate(single), session.run(None, {"x": X})[0]


def trained(mode: str = "train", **more: object) -> None:
    course = Course(epochs=30, learning_rate=1e-3, **more)  # type: ignore[arg-type]
    run_train("model.onnx", "data.npz", "t.onnx", Options(mode=mode), course)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["train", "keep"])
def test_the_trained_model_says_of_a_sample_what_it_says_of_it_among_others(folder: Path, mode: str) -> None:
    trained(mode)
    single, together = alone_and_together("t.onnx")
    np.testing.assert_allclose(single, together, atol=1e-6)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("t.onnx").graph.initializer}
    h = X @ W
    np.testing.assert_allclose(stored["m"], h.mean(0), atol=0.3)  # learned, though the weights move a little
    np.testing.assert_allclose(stored["v"], h.var(0), rtol=0.1)


def test_the_validation_is_of_what_is_written(folder: Path) -> None:
    course = Course(epochs=3)
    found = run_train("model.onnx", "data.npz", "t.onnx", Options(mode="train"), course, val="data.npz")
    loss = np.mean((alone_and_together("t.onnx")[0] - np.tanh(X @ W)) ** 2)
    np.testing.assert_allclose(found.epochs[found.best - 1]["val_loss"], loss, rtol=1e-5)


def test_the_mode_can_be_kept(folder: Path) -> None:
    trained(keep_mode=True)
    kept = onnx.load("t.onnx").graph.node
    assert list(kept) == list(onnx.load("model.onnx").graph.node)
    checkpoint = Path("t.onnx.run", "checkpoint.safetensors")
    run_export(checkpoint, "model.onnx", "kept.onnx", keep_mode=True)
    run_export(checkpoint, "model.onnx", "used.onnx")
    assert Path("kept.onnx").read_bytes() == Path("t.onnx").read_bytes()
    np.testing.assert_allclose(*alone_and_together("used.onnx"), atol=1e-6)
    single, together = alone_and_together("kept.onnx")
    assert np.abs(single - together).max() > 0.1


def test_what_python_saves_is_for_inference(folder: Path) -> None:
    trainer = Trainer(build("model.onnx", Options(optimizer="sgd", mode="train")))
    trainer.step({"x": X, "label": np.tanh(X @ W)})
    trainer.save("saved.onnx", "model.onnx")
    np.testing.assert_allclose(*alone_and_together("saved.onnx"), atol=1e-6)
    trainer.save("kept.onnx", "model.onnx", keep_mode=True)
    assert np.abs(np.subtract(*alone_and_together("kept.onnx"))).max() > 0.1


def test_the_evaluation_model_of_artifacts_is_for_inference(folder: Path) -> None:
    generate_artifacts("model.onnx", loss=LossType.MSELoss, optimizer=OptimType.AdamW, artifact_directory="art",
                       mode="keep", additional_output_names=["y"])  # fmt: skip
    nodes = onnx.load("art/eval_model.onnx").graph.node
    assert all(not node.attribute or node.op_type != "BatchNormalization" for node in nodes)
    assert all(len(node.input) < 3 for node in nodes if node.op_type == "Dropout")


def test_an_adapter_takes_the_running_statistics_with_it(folder: Path) -> None:
    run_train(
        "model.onnx",
        "data.npz",
        "t.onnx",
        Options(mode="train", lora=LoraSpec(2)),
        Course(epochs=3),
        adapter=Path("a.safetensors"),
    )
    run_export(Path("a.safetensors"), "model.onnx", "merged.onnx")
    np.testing.assert_array_equal(*(alone_and_together(file)[0] for file in ("t.onnx", "merged.onnx")))


@pytest.mark.parametrize(
    ("mode", "words"),
    [("keep", "keeps this mode"), ("train", "keeps this mode"), ("eval", "switched to inference mode here")],
)
def test_that_a_model_comes_in_training_mode_is_said(folder: Path, mode: str, words: str) -> None:
    report = inspect("model.onnx", Options(mode=mode))  # type: ignore[arg-type]
    (said,) = [c.text for c in report.cautions if c.kind == "training mode"]
    assert "(1 BatchNormalization, 1 Dropout)" in said and words in said


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_statistic_that_is_a_copy_of_a_weight_stays_what_it_was(folder: Path, mode: str) -> None:
    """PyTorch's older exporter writes a fresh layer's running variance, all ones, as Identity of its scale."""
    model = network("v = Identity(s)")
    del model.graph.initializer[3]
    onnx.save(model, "model.onnx")
    course = Course(epochs=20, learning_rate=0.05)
    found = run_train("model.onnx", "data.npz", "t.onnx", Options(mode=mode), course, val="data.npz")  # type: ignore[arg-type]
    loss = np.mean((alone_and_together("t.onnx")[0] - np.tanh(X @ W)) ** 2)
    np.testing.assert_allclose(found.epochs[found.best - 1]["val_loss"], loss, rtol=1e-5)


def test_fresh_layers_that_an_exporter_has_merged_learn_statistics_of_their_own(folder: Path) -> None:
    """PyTorch's newer exporter writes equal tensors once: scale and variance are ones, bias and mean zeros."""
    first = "h2, m3, v3 = BatchNormalization<training_mode = 1>(h, s, b, b, s) h3 = Add(h2, h)"
    model = network(first, "s, b, b, s")
    model.graph.node[3].input[0] = "h3"
    onnx.save(model, "model.onnx")
    course = Course(epochs=30, learning_rate=1e-3)
    found = run_train("model.onnx", "data.npz", "v.onnx", Options(mode="train"), course, val="data.npz")
    loss = np.mean((alone_and_together("v.onnx")[0] - np.tanh(X @ W)) ** 2)
    np.testing.assert_allclose(found.epochs[found.best - 1]["val_loss"], loss, rtol=1e-5)
    trained()
    np.testing.assert_allclose(*alone_and_together("t.onnx"), atol=1e-6)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("t.onnx").graph.initializer}
    assert {"s", "b", "h2/running_var"} <= stored.keys()
    h = X @ stored["w"]
    np.testing.assert_allclose(stored["h2/running_mean"], h.mean(0), atol=0.3)
    np.testing.assert_allclose(stored["k/running_mean"], (h + (h - h.mean(0)) / h.std(0)).mean(0), atol=0.4)


def test_a_layer_that_is_called_twice_has_one_set_of_statistics() -> None:
    """As in PyTorch, where the second call goes on from what the first has left."""
    first = "h2, m3, v3 = BatchNormalization<training_mode = 1>(h, s, b, m, v) h3 = Add(h2, h)"
    model = network(first)
    model.graph.node[3].input[0] = "h3"
    trainer = Trainer(build(model, Options(losses=(LossSpec("mse"),), optimizer="sgd")))
    trainer.step({"x": X, "label": np.tanh(X @ W)}, 0.0)
    h = X @ W
    h3 = h + (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5)
    np.testing.assert_allclose(trainer.state()["m"], 0.09 * h.mean(0) + 0.1 * h3.mean(0), atol=1e-5)
