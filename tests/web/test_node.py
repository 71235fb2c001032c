"""Training in Node: what onnxruntime-node computes, through the trainer that pages copy, is Python's to the bit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli import LoraSpec
from onnxgrad_cli.optimizers import OPTIMIZERS
from tests.older_runtime import Absent
from tests.web import javascript
from tests.web.cases import SAMPLES, Made, batch_of, made, options_of, read_arrays

BATCHES = {"linear_regression": "linear_regression", "digits_mlp": "digits", "digits_cnn": "digits",
           "tiny_transformer": "tiny_transformer"}  # fmt: skip
"""Sample model -> its data."""

pytestmark = pytest.mark.slow


def in_node(*models: Made) -> None:
    """Run training models in Node, and compare all that they make with Python's."""
    try:
        node = javascript.node()
    except Absent as why:
        pytest.skip(str(why))
    ort = javascript.FOLDER / "node_modules" / "onnxruntime-node" / "dist" / "index.js"
    program = Path(__file__).with_name("run.mjs")
    command = [node, program, ort, javascript.TRAINER, *(each.folder for each in models)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for each in models:
        got = read_arrays(each.folder / "found")
        assert got.keys() == each.expected.keys()
        for name, array in each.expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=f"{each.folder.name}: {name}")


def sample(folder: Path, name: str, **more: Any) -> Made:
    batch = batch_of(BATCHES[name])
    if name == "tiny_transformer":
        batch["input_ids"] = batch.pop("x")
    return made(folder, SAMPLES / f"{name}.onnx", batch, options_of(name, **more))


@pytest.mark.parametrize("target", ["standard", "portable"])
@pytest.mark.parametrize("optimizer", ["", "adamw"])
def test_sample_models(optimizer: str, target: str, tmp_path: Path) -> None:
    in_node(*(sample(tmp_path / name, name, optimizer=optimizer, target=target) for name in BATCHES))


def test_every_optimizer(tmp_path: Path) -> None:
    names = [each.name for each in OPTIMIZERS]
    assert len(names) >= 11
    in_node(*(sample(tmp_path / name, "digits_mlp", optimizer=name) for name in names))


def test_other_steps(tmp_path: Path) -> None:
    """Averages, accumulation, a dynamic scale of the loss, adapters, frozen weights."""
    steps: dict[str, dict[str, Any]] = {
        "averages": {"ema": 0.9, "clip_norm": 1.0},
        "accumulation": {"accumulate": 2},
        "scale": {"loss_scale": "dynamic"},
        "adapters": {"lora": LoraSpec(2)},
        "frozen": {"train_last": 1},
    }
    in_node(*(sample(tmp_path / name, "digits_mlp", optimizer="adamw", **more) for name, more in steps.items()))
