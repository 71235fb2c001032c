"""Training models for runtimes elsewhere, in folders: the model's files, a batch, and what onnxruntime makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad_cli import LossSpec, Options, run_build
from onnxgrad_cli.files.start_values import TYPED_ARRAYS, read_values
from tests.older_runtime import ROOT

SAMPLES = ROOT / "sample_models"
STEPS, RATE = 4, 0.01


@dataclass(frozen=True)
class Made:
    """A training model in a folder, and what the runs of it in Python have made.

    Attributes:
        folder: has model.onnx, model.json and model.bin; batch.json and batch.bin.
        expected: by output, what one run makes; of a model with an optimizer the losses of STEPS steps, and weights and
            state after them.
    """

    folder: Path
    expected: dict[str, np.ndarray]


def batch_of(name: str) -> dict[str, np.ndarray]:
    """A batch for a sample model, with its labels y."""
    data = np.load(SAMPLES / f"{name}.npz")
    return {key.removeprefix("train_"): data[key][:16] for key in data.files if not key.startswith("test_")}


def made(
    folder: Path, source: Path, batch: Mapping[str, np.ndarray], options: Options, verify: bool | None = False
) -> Made:
    """Build a training model into a folder, and run it."""
    folder.mkdir(parents=True, exist_ok=True)
    report = run_build(source, folder / "model.onnx", options, weights="inputs", verify=verify, no_report=True)
    assert report.status == "built", report.verdict
    write_arrays(folder / "batch", batch)
    return Made(folder, dict(run(folder, batch)))


def options_of(name: str, **more: Any) -> Options:
    """How a sample model is trained."""
    loss = "mse" if name in ("linear_regression", "autoencoder") else "cross-entropy"
    return Options(losses=(LossSpec(loss),), label="y", **more)


def run(folder: Path, batch: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """What a training model makes of a batch; see `Made`."""
    how = ort.SessionOptions()
    how.intra_op_num_threads = 1
    session = ort.InferenceSession(folder / "model.onnx", how)
    roles, held = json.loads((folder / "model.json").read_text()), read_values(folder / "model.json").values
    outputs = list(roles["outputs"])
    if not roles["learning_rate"]:
        yield from zip(outputs, session.run(outputs, {**held, **batch}), strict=True)
        return
    rate = np.array(RATE, roles["inputs"][roles["learning_rate"]]["type"])
    losses = []
    for _ in range(STEPS):
        feeds = {**held, **batch, roles["learning_rate"]: rate}
        found = dict(zip(outputs, session.run(outputs, feeds), strict=True))
        held = {name: found.get(roles["inputs"][name].get("next"), array) for name, array in held.items()}
        losses.append(found[roles["loss"]])
    yield "losses", np.array(losses)
    yield from held.items()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays one after the other, and what they are in a JSON beside: their types, sizes and offsets."""
    said, data = {}, b""
    for name, array in arrays.items():
        data += bytes(-len(data) % 8)
        kind = array.dtype.name
        said[name] = {"type": kind, "array": TYPED_ARRAYS[kind], "dims": array.shape, "size": array.size,
                      "offset": len(data)}  # fmt: skip
        data += array.tobytes()
    path.with_suffix(".json").write_text(json.dumps(said))
    path.with_suffix(".bin").write_bytes(data)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What a program in JavaScript has written so; see `write_arrays`."""
    said, data = json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".bin").read_bytes()
    return {
        name: np.frombuffer(data, each["type"], each["size"], each["offset"]).reshape(each["dims"])
        for name, each in said.items()
    }


NOISE = 1e-4
"""Of the largest entry of all results: what is smaller all over, as the gradient of a key's bias, is rounding alone."""


def errors(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How far results are from onnxruntime's in Python, each relative to its largest entry, or to `NOISE`."""
    sizes = {name: np.abs(array.astype(np.float64)).max(initial=0) for name, array in expected.items()}
    least = NOISE * max(sizes.values())
    return {
        name: float(np.abs(got[name].astype(np.float64) - array.astype(np.float64)).max(initial=0))
        / max(sizes[name], least)
        for name, array in expected.items()
    }
