"""`onnxgrad export`: the model that is written computes what the trained one computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from tests.cli_harness import MLP, Shell, save

safetensors = pytest.importorskip("safetensors.numpy", reason="weights are exchanged as safetensors")

X = np.random.default_rng(0).uniform(5, 9, (20, 4)).astype(np.float32)
TRAIN = ("train", "mlp.onnx", "--loss", "cross-entropy", "--data", "data.npz", "--epochs", "1", "--threads", "1",
         "-o", "t.onnx")  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    np.savez("data.npz", x=X, label=np.arange(20) % 2)
    return Shell(tmp_path, capsys)


def outputs(path: str) -> np.ndarray:
    return onnxruntime.InferenceSession(path).run(None, {"x": X})[0]


def test_weights_alone_of_another_number_of_classes(shell: Shell) -> None:
    assert shell(*TRAIN, "--classes", 3).code == 0
    stored = onnx.load("t.onnx").graph.initializer
    safetensors.save_file({tensor.name: numpy_helper.to_array(tensor) for tensor in stored}, "w.safetensors")
    assert shell("export", "w.safetensors", "--model", "mlp.onnx", "-o", "e.onnx").code == 0
    assert outputs("e.onnx").shape == (20, 3)
    np.testing.assert_array_equal(outputs("e.onnx"), outputs("t.onnx"))


def test_data_are_prepared_for_an_export_as_they_were_for_the_training(shell: Shell) -> None:
    assert shell(*TRAIN, "--normalize", "auto").code == 0
    assert shell("export", "t.onnx.run/checkpoint.safetensors", "--model", "mlp.onnx", "-o", "e.onnx").code == 0
    assert shell("predict", "e.onnx", "--data", "data.npz", "-o", "y.npz").code == 0
    scaled = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
    expected = onnxruntime.InferenceSession("e.onnx").run(None, {"x": scaled})[0]
    np.testing.assert_allclose(np.load("y.npz")["y"], expected, rtol=1e-4, atol=1e-5)


def test_a_model_from_stdin_and_json_do_not_share_stdout(shell: Shell) -> None:
    assert shell(*TRAIN).code == 0
    weights = "t.onnx.run/checkpoint.safetensors"
    result = shell("export", weights, "--model", "-", "--json")  # refused before stdin is read
    assert result.code == 2 and result.document["error"]["code"] == "usage"
