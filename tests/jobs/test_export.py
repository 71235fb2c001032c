"""`onnxgrad export`: the model that is written computes what the trained one computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onnxgrad_cli.data import Preprocessing
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


def test_the_preprocessing_of_a_trained_model_is_exported_too(shell: Shell) -> None:
    assert shell(*TRAIN, "--normalize", "auto").code == 0
    assert shell("export", "t.onnx", "--model", "mlp.onnx", "-o", "e.onnx").code == 0
    trained, exported = (Preprocessing.of_model(onnx.load(name)) for name in ("t.onnx", "e.onnx"))
    assert trained == exported != Preprocessing()


@pytest.mark.parametrize("source", ["t.onnx", "t.onnx.run", "w.safetensors"])
def test_weights_of_another_model_are_refused_with_its_file(source: str, shell: Shell) -> None:
    assert shell(*TRAIN, "--freeze", "w1").code == 0
    other = onnx.load("mlp.onnx")
    other.graph.node[2].op_type = "Tanh"
    first = next(tensor for tensor in other.graph.initializer if tensor.name == "w1")
    first.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(first).T.copy(), "w1"))
    onnx.save(other, "other.onnx")
    stored = onnx.load("t.onnx").graph.initializer
    safetensors.save_file({tensor.name: numpy_helper.to_array(tensor) for tensor in stored}, "w.safetensors")
    result = shell("export", source, "--model", "other.onnx", "-o", "e.onnx")
    assert result.code == 1 and not Path("e.onnx").exists(), result.err
    assert {source, "w1", "checkpoint.safetensors"} & set(result.facts), result.facts
    assert shell("export", source, "--model", "mlp.onnx", "-o", "e.onnx").code == 0


def test_averages_are_exported_or_refused(shell: Shell) -> None:
    assert shell(*TRAIN, "--ema", "0.5", "--epochs", "3").code == 0
    for more, name in (((), "plain.onnx"), (("--use-ema",), "ema.onnx")):
        assert shell("export", "t.onnx.run/checkpoint.safetensors", "--model", "mlp.onnx", *more, "-o", name).code == 0
    assert not np.array_equal(outputs("plain.onnx"), outputs("ema.onnx"))
    assert shell(*TRAIN, "--lora", "1", "--adapter", "a.safetensors", "--force").code == 0
    refused = shell("export", "a.safetensors", "--model", "mlp.onnx", "--use-ema", "-o", "e.onnx")
    assert refused.code == 2 and refused.facts == ("conflict", "use_ema") and "--use-ema" in refused.hint
    assert shell("export", "t.onnx.run", "--model", "mlp.onnx", "--use-ema", "-o", "e.onnx").code != 0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--merge", "--adaptable"), ("conflict", "merge", "adaptable")),
        (("--test-data", "data.npz"), ("conflict", "test_data", "merge")),
        (("--roles", "mlp.json"), ("conflict", "roles", "best.safetensors")),
        (("--adaptable",), ("no_data", "adaptable", "best.safetensors")),
        (("--adapter", "a.safetensors"), ("no_data", "adapter", "best.safetensors")),
    ],
)
def test_options_without_effect_are_refused(more: tuple[str, ...], expected: tuple[str, ...], shell: Shell) -> None:
    assert shell(*TRAIN, "--val", "data.npz").code == 0
    Path("mlp.json").write_text("{}")
    result = shell("export", "t.onnx.run", "--model", "mlp.onnx", "-o", "e.onnx", *more)
    assert result.code == 2 and result.facts == expected, result.err
    assert "best.safetensors" in result.err or "merge" in more[0] or "data" in more[0]


def test_the_checkpoint_that_is_read_is_named(shell: Shell) -> None:
    assert shell(*TRAIN, "--val", "data.npz").code == 0
    best = shell("export", "t.onnx.run", "--model", "mlp.onnx", "-o", "e.onnx")
    last = shell("export", "t.onnx.run/checkpoint.safetensors", "--model", "mlp.onnx", "-o", "e.onnx", "--json")
    assert "'t.onnx.run/best.safetensors'" in best.err and "'t.onnx.run/best.safetensors'" in last.err
    assert last.json == {"files": ["e.onnx"]}
