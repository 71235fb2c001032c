"""Weights that begin at random values: drawn by the seed, and they learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli import Options
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.train import Course, run_train
from onnxgrad_cli.losses.spec import LossSpec
from tests.cli_harness import Shell, save_mlp_and_data
from tests.facts import raises
from tests.jobs.train.test_train import ON_DIGITS
from tests.training.test_new_head import ROWS, exported

LOSSES = (LossSpec("cross-entropy"),)


rng = np.random.default_rng(0)


def test_weights_that_begin_anew(tmp_path: Path) -> None:
    model = exported("gemm")
    np.savez(tmp_path / "data.npz", x=ROWS, label=np.zeros(40, int))
    course = Course(epochs=1, learning_rate=1e-6, batch_size=40, reset=("2.*",), seed=1)
    run_train(model, tmp_path / "data.npz", tmp_path / "t.onnx", Options(losses=LOSSES, optimizer="sgd"), course)
    read = [
        {t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, onnx.load(tmp_path / "t.onnx"))
    ]
    old, new = read
    assert all(np.abs(old[name] - new[name]).max() < 1e-5 for name in ("0.weight", "0.bias"))
    assert np.abs(old["2.weight"] - new["2.weight"]).max() > 0.1 and np.abs(new["2.bias"]).max() < 1e-5
    with raises(UsageError, "unknown_name", "reset", "9"):
        wrong = Course(epochs=1, reset=("9",))
        run_train(model, tmp_path / "data.npz", tmp_path / "u.onnx", Options(losses=LOSSES), wrong)


ROOT = Path(__file__).parents[3]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save_mlp_and_data()
    return Shell(tmp_path, capsys)


@pytest.mark.slow
def test_random_weights_are_drawn_by_the_seed_and_learn(shell: Shell) -> None:
    """Weights of zero learn nothing in a network of layers, so what is learnt began elsewhere."""
    model = onnx.load(str(ROOT / "sample_models" / "digits_mlp.onnx"))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, "zeros.onnx")
    arguments = ("train", "zeros.onnx", *ON_DIGITS, "--epochs", "5", "--learning-rate", "0.01")
    accuracies = {}
    for name, more in {"he": ("--init", "he"), "again": ("--init", "he"), "keep": ()}.items():
        result = shell(*arguments, *more, "-o", f"{name}.onnx", "--json")
        assert result.code == 0, result.err
        accuracies[name] = result.json["epochs"][-1]["val_accuracy"]
    assert accuracies["he"] > 0.9 and accuracies["keep"] < 0.2
    assert Path("he.onnx").read_bytes() == Path("again.onnx").read_bytes()
    other = shell(*arguments, "--init", "he", "--seed", "1", "-o", "other.onnx")
    assert other.code == 0 and Path("he.onnx").read_bytes() != Path("other.onnx").read_bytes()
    refused = shell(*arguments, "--init", "he", "--lora", "2", "-o", "lora.onnx")
    assert refused.code == 2 and "--lora" in refused.err and not Path("lora.onnx").exists()
