"""`evaluate`, `predict` and `explain` read the models and data that `train` reads, with the same options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from tests.cli_harness import Shell
from tests.genai_form import KEYS, SIZE, decoder

WORDS, SAMPLES, STEPS = 40, 6, 5


class Network(nn.Module):
    """A recurrent layer that begins with a state that is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.line = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.line(self.layer(x, h)[0][:, -1])


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def run(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return the first output of the model on data to which what they lack was added by hand."""
    session = onnxruntime.InferenceSession("m.onnx")
    return np.asarray(session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})[0])


def commands(shell: Shell, *options: str, loss: str, trained: tuple[str, ...], explained: tuple[str, ...]) -> float:
    """Train, then run the other commands on the model as it was; returns the loss that `evaluate` reports."""
    for command in (
        ("train", "--epochs", "1", "--batch-size", "3", "--loss", loss, "-o", "trained.onnx", *trained),
        ("predict", "-o", "found.npz", "--force"),
        ("explain", "-o", "explained.npz", "--no-verify", *explained),
    ):
        result = shell(command[0], "m.onnx", "--data", "data.npz", *command[1:], *options)
        assert result.code == 0, result.err
    told = shell("evaluate", "m.onnx", "--data", "data.npz", "--loss", loss, "--json", *options)
    return float(json.loads(told.out)["result"]["results"]["loss"])


@pytest.mark.parametrize("options", [(), ("--dim", "past_sequence_length=0")])
@pytest.mark.thinned(2)
def test_a_decoder_whose_cache_is_empty(shell: Shell, options: tuple[str, ...]) -> None:
    onnx.save(decoder(WORDS), "m.onnx")
    ids = np.random.default_rng(0).integers(0, WORDS, (SAMPLES, STEPS))
    data = {"input_ids": ids, "attention_mask": np.ones_like(ids), "label": ids}
    np.savez("data.npz", **data)  # type: ignore[arg-type]
    loss = commands(
        shell, *options, loss="causal-lm", trained=("--lora", "2"), explained=("--class-axis", "2", "--class", "1")
    )
    empty = np.zeros((SAMPLES, KEYS, 0, SIZE), np.float32)
    pasts = {f"past_key_values.{layer}.{kind}": empty for layer in range(2) for kind in ("key", "value")}
    logits = run({**data, **pasts})
    np.testing.assert_allclose(np.load("found.npz")["logits"], logits, rtol=1e-4, atol=1e-5)
    following = torch.tensor(ids[:, 1:].ravel())
    expected = nn.functional.cross_entropy(torch.tensor(logits[:, :-1].reshape(-1, WORDS)), following)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert np.load("explained.npz")["attributions"].shape[:2] == (SAMPLES, STEPS)


def test_a_recurrent_network_whose_state_is_fed(shell: Shell) -> None:
    torch.manual_seed(0)
    x, h = torch.zeros(2, STEPS, 3), torch.zeros(1, 2, 4)
    torch.onnx.export(
        Network(), (x, h), "m.onnx", input_names=["x", "h"], output_names=["y"], dynamo=False,
        dynamic_axes={"x": {0: "batch"}, "h": {1: "batch"}, "y": {0: "batch"}},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((SAMPLES, STEPS, 3)), "label": rng.standard_normal((SAMPLES, 2))}
    data = {name: array.astype(np.float32) for name, array in data.items()}
    np.savez("data.npz", **data)  # type: ignore[arg-type]
    loss = commands(shell, loss="mse", trained=(), explained=("--class", "1"))
    y = run({**data, "h": np.zeros((1, SAMPLES, 4), np.float32)})
    np.testing.assert_allclose(np.load("found.npz")["y"], y, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(float(np.mean((y - data["label"]) ** 2)), rel=1e-4)
    assert np.load("explained.npz")["attributions"].shape == data["x"].shape


@pytest.mark.parametrize("time", [6, "time"])
def test_sequences_without_a_state_have_their_batch_second(shell: Shell, time: int | str) -> None:
    """The samples are on the axis that the layer takes for its batch, though time has the fixed size of a batch."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[{time}, N, 3] x) => (float[{time}, N, 4] y, float[2, N, 4] states)
        {{ r, last = GRU<hidden_size = 4>(x, w, u) y = Squeeze(r, one) states = Concat<axis = 0>(last, last) }}""")
    rng = np.random.default_rng(0)
    stored = {"w": (1, 12, 3), "u": (1, 12, 4)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in stored.items()}
    for name, array in {**arrays, "one": np.array([1])}.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, "m.onnx")
    data = {"x": rng.standard_normal((6, 2, 3)), "label": rng.standard_normal((6, 2, 4))}
    data = {name: array.astype(np.float32) for name, array in data.items()}
    np.savez("data.npz", **data)  # type: ignore[arg-type]
    y, states = onnxruntime.InferenceSession("m.onnx").run(None, {"x": data["x"]})
    expected = float(np.mean((y - data["label"]) ** 2))
    trained = shell("train", "m.onnx", "--data", "data.npz", "--batch-size", "2", "--epochs", "1", "--json")
    epochs = json.loads(trained.out)["result"]["epochs"]
    told = json.loads(shell("evaluate", "m.onnx", "--data", "data.npz", "--json").out)["result"]
    assert epochs[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert (told["samples"], told["results"]["loss"]) == (2, pytest.approx(expected, rel=1e-5))
    assert shell("predict", "m.onnx", "--data", "data.npz", "-o", "found.npz").code == 0
    found = np.load("found.npz")
    np.testing.assert_allclose(found["y"], np.moveaxis(y, 1, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["states"], np.moveaxis(states, 1, 0), rtol=1e-5, atol=1e-6)
    refused = shell("explain", "m.onnx", "--data", "data.npz", "--class-axis", "2")
    assert refused.code == 2 and refused.facts[1] in ("x", "y"), refused.err


def test_a_label_that_predict_knows_is_not_reported(shell: Shell) -> None:
    onnx.save(onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 2] x) => (float[n, 2] y) { y = Tanh(x) }"""), "m.onnx")  # fmt: skip
    np.savez("data.npz", x=np.zeros((3, 2), np.float32), y=np.zeros(3), z=np.zeros(3))
    told = shell("predict", "m.onnx", "--data", "data.npz", "--label", "y").err
    assert "inputs: z\n" in told, told
    arrays = {f"{use}_{name}": array for use in ("train", "test") for name, array in np.load("data.npz").items()}
    np.savez("both.npz", **arrays)
    told = shell("predict", "m.onnx", "--data", "both.npz", "--prefix", "test_", "--label", "y", "--force").err
    assert "inputs: test_z\n" in told, told
