"""Training on OpenVINO: `--target portable` runs there, and computes what onnxruntime does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad_cli.files.start_values import read_values
from onnxgrad_cli.optimizers import OPTIMIZERS
from tests import other_runtimes
from tests.web.cases import RATE, SAMPLES, batch_of, errors, made, options_of, write_arrays

STEPS: dict[str, dict[str, Any]] = {
    **{each.name: {"optimizer": each.name} for each in OPTIMIZERS},
    "accumulation": {"optimizer": "adam", "accumulate": 2},
    "scale": {"optimizer": "adam", "loss_scale": "dynamic"},
    "averages": {"optimizer": "adam", "ema": 0.9, "clip_norm": 1.0},
}


@pytest.mark.slow
def test_whole_steps(tmp_path: Path) -> None:
    """A step of each optimizer on a network with pools, its batch of any size."""
    there = sys.executable if importlib.util.find_spec("openvino") else other_runtimes.OPENVINO.ready()
    if there is None:
        pytest.skip(
            "OpenVINO is not installed; `python -m benchmarks.train_step --against openvino` makes its environment"
        )
    expected = {}
    for name, more in STEPS.items():
        folder = tmp_path / name
        options = options_of("digits_cnn", target="portable", **more)
        made(folder, SAMPLES / "digits_cnn.onnx", batch_of("digits"), options)
        feeds = {**batch_of("digits"), "learning_rate": np.array(RATE, np.float32)}
        write_arrays(folder / "batch", feeds)
        session = ort.InferenceSession(folder / "model.onnx")
        names = [value.name for value in session.get_outputs()]
        held = read_values(folder / "model.json").values
        expected[folder] = dict(zip(names, session.run(names, {**held, **feeds}), strict=True))
    subprocess.run([there, Path(__file__).with_name("python_run.py"), "openvino", *expected], check=True)
    for folder, outputs in expected.items():
        assert "refused" not in json.loads((folder / "openvino.json").read_text()), folder.name
        assert max(errors(dict(np.load(folder / "openvino.npz")), outputs).values()) < 1e-4, folder.name
