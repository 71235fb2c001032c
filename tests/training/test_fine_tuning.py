"""Real models are fine-tuned by the command: their last layers, or low-rank adapters of a transformer.

The data are random inputs of the kind that a model is fed, and its own outputs, shifted: what can be learnt is known.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.cli_harness import Shell

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

ZOO = Path(os.environ.get("ONNXGRAD_ZOO", Path(__file__).parents[3] / "shared" / "zoo"))
SAMPLES = 48

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ZOO.is_dir(), reason=f"there are no real models in {ZOO}")]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def outputs(model: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options).run(None, feeds)[0]


def write_data(model: Path, file: str) -> dict[str, np.ndarray]:
    """Samples around a model's own feed, and their targets; returns all but the targets."""
    rng, feed = np.random.default_rng(0), np.load(model.parent / "feed.npz")
    feeds = {}
    for key in feed.files:
        name, array = key.removeprefix("in/"), feed[key]
        picked = array[rng.integers(0, len(array), SAMPLES)]
        if name == key:
            continue
        if array.dtype.kind == "f":
            feeds[name] = (picked + 0.5 * array.std() * rng.standard_normal(picked.shape)).astype(array.dtype)
        else:  # token ids are mixed; a mask, which is 0 or 1 from some place on, is kept
            feeds[name] = picked if array.max() <= 1 else rng.choice(array.ravel(), picked.shape)
    own = outputs(model, feeds)
    np.savez(file, **feeds, target=own + own.std() * np.linspace(-1, 1, own.shape[-1], dtype=own.dtype))
    return feeds


def weights(file: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer}


def fine_tune(shell: Shell, model: Path, *arguments: str, bound: float = 0.5) -> dict[str, np.ndarray]:
    """Fine-tune a model, see that its loss falls, and is what the run has said; what changed in its weights."""
    feeds = write_data(model, "data.npz")
    result = shell(
        "train", model, "--data", "data.npz", "--val", "data.npz", "--label", "target", "--loss", "mse",
        "--epochs", "12", "--batch-size", "8", "--threads", "1", "-o", "tuned.onnx", "--json", *arguments,
    )  # fmt: skip
    assert result.code == 0, result.err
    target, best = np.load("data.npz")["target"], result.json["epochs"][result.json["best"] - 1]
    before = np.mean((outputs(model, feeds) - target) ** 2)
    after = np.mean((outputs(Path("tuned.onnx"), feeds) - target) ** 2)
    assert after < bound * before, f"the loss is {before:.4g} before, {after:.4g} after"
    np.testing.assert_allclose(best["val_loss"], after, rtol=1e-4)
    first, last = (onnx.load(file).graph for file in (model, "tuned.onnx"))
    assert [node.SerializeToString() for node in first.node] == [node.SerializeToString() for node in last.node]
    assert (first.input, first.output) == (last.input, last.output)
    old, new = weights(model), weights(Path("tuned.onnx"))
    assert old.keys() == new.keys()
    return {name: new[name] - array for name, array in old.items() if not np.array_equal(new[name], array)}


DISTILBERT = "m.distilbert.transformer.layer.2.output_layer_norm"
LAST = {
    "mobilenetv2": {"bn2.weight", "bn2.bias", "classifier.weight", "classifier.bias"},
    "vit_tiny": {"norm.weight", "norm.bias", "head.weight", "head.bias"},
    "distilbert": {f"{DISTILBERT}.weight", f"{DISTILBERT}.bias", "val_270", "m.classifier.bias"},
}
"""What the last two layers of a model hold, read off its graph."""


@pytest.mark.parametrize("name", LAST)
def test_the_last_layers_alone(shell: Shell, name: str) -> None:
    changed = fine_tune(shell, ZOO / name / "model.onnx", "--train-last", "2", "--learning-rate", "0.01")
    assert changed.keys() == LAST[name]


def matrices(model: Path) -> set[str]:
    """The weights that are the second operand of a matrix product, as they are or transposed."""
    graph = onnx.load(model).graph
    held = {t.name: t.name for t in graph.initializer if len(t.dims) == 2}
    for node in graph.node:
        if node.op_type == "Transpose" and node.input[0] in held:
            held[node.output[0]] = held[node.input[0]]
    return {held[n.input[1]] for n in graph.node if n.op_type in ("MatMul", "Gemm") and n.input[1] in held}


@pytest.mark.parametrize("name", ["bert_cls_ts17", "distilbert", "vit_tiny"])
def test_adapters_of_a_transformer(shell: Shell, name: str) -> None:
    model = ZOO / name / "model.onnx"
    changed = fine_tune(shell, model, "--lora", "2:4", "--learning-rate", "0.01")
    assert changed.keys() == matrices(model)
    for delta in changed.values():
        found = np.linalg.svd(delta.astype(np.float64), compute_uv=False)
        assert found[2:].max(initial=0) < 1e-4 * found[0]  # of rank two, but for the rounding of the sum


def test_chosen_adapters_alone(shell: Shell) -> None:
    """A model of language, of which the attention alone is adapted."""
    model = ZOO / "gpt2" / "model.onnx"
    arguments = ("--lora", "2", "--lora-target", "*c_attn*", "--learning-rate", "0.02")
    changed = fine_tune(shell, model, *arguments, bound=0.95)  # a shift of the logits is hard to reach from here
    assert changed.keys() == {name for name in weights(model) if "c_attn.weight" in name}
