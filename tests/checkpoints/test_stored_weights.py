"""Weights return into the model that they came from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import parser

from onnxgrad_cli.checkpoints.stored_weights import with_weights
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.trainer import Trainer
from tests.facts import raises
from tests.training.test_trainer import batches, exported, network, training


def test_a_copy_that_becomes_a_weight_of_its_own_in_an_old_file() -> None:
    """Before IR version 4 an initializer must be an input too."""
    model = parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        g (float[n, 2] x, float[2] m) => (float[n, 2] y) <float[2] m = {1, 2}>
        { k = Identity(m) a = Add(x, m) y = Add(a, k) }""")
    trained = with_weights(model, {"k": np.array([10, 20], np.float32)}, {})
    onnx.checker.check_model(trained)
    session = onnxruntime.InferenceSession(trained.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": np.zeros((1, 2), np.float32)})[0], [[11, 22]])


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
    with raises(UsageError, "usage", "model.onnx"):
        trainer.save(tmp_path / "model.onnx", tmp_path / "model.onnx")
