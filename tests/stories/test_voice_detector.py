"""Silero VAD as it is published: two networks in an If on the sample rate, ranks in Ifs, and its state as an input."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.cli_harness import Shell

EDGES = Path(os.environ.get("ONNXGRAD_EDGES", Path(__file__).parents[3] / "shared" / "edges" / "models"))
MODEL = EDGES / "silero_vad_v5.onnx"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} is not there (ONNXGRAD_EDGES names its folder)"),
]

SHAPES = ("--shape", "input:1,512", "--shape", "state:2,1,128")


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("shapes", [(), SHAPES])
def test_the_detector_is_proved(shapes: tuple[str, ...], shell: Shell) -> None:
    """With the shapes of 16 kHz given, the network for 8 kHz can't run: only the other one is trained."""
    result = shell("build", MODEL, "--loss", "bce", "--label", "speech", *shapes, "-o", "train.onnx")
    assert result.code == 0 and "Built and proved" in result.out, result.out + result.err
    assert f"trained   {14 if shapes else 28} tensors" in result.out


def test_the_detector_learns(shell: Shell) -> None:
    rng = np.random.default_rng(0)
    label = np.float32(rng.integers(0, 2, (48, 1)))
    frames = np.float32(rng.normal(0, 0.01, (48, 512)) + label * np.sin(np.arange(512) / 4))
    np.savez("frames.npz", input=frames, label=label, sr=np.array(16000), state=np.zeros((2, 1, 128), np.float32))
    data = ("--loss", "bce", "--data", "frames.npz", "--batch-size", 1)
    before = shell("evaluate", MODEL, *data, "--json")
    result = shell("train", MODEL, *data, *SHAPES, "--epochs", 1, "-o", "trained.onnx")
    assert result.code == 0, result.err
    after = shell("evaluate", "trained.onnx", *data, "--json")
    assert after.code == before.code == 0, after.err + before.err
    assert after.json["results"]["loss"] < 0.5 * before.json["results"]["loss"]
    state, rate = np.zeros((2, 1, 128), np.float32), np.array(16000)
    session = onnxruntime.InferenceSession("trained.onnx")
    speech = np.stack([session.run(None, {"input": frame[None], "state": state, "sr": rate})[0][0] for frame in frames])
    loss = -np.mean(np.log(np.where(label > 0, speech, 1 - speech)))
    np.testing.assert_allclose(after.json["results"]["loss"], loss, rtol=1e-3)
