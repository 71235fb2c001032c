"""The models that mutation begins with: samples, the node tests of the onnx package, and a folder of real ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from tests.autodiff.test_backend_nodes import FILES
from tools.verify_op.examples import published_cases

SAMPLES = sorted(Path("sample_models").glob("*.onnx"))

BUILDS = (
    ("linear_regression",), ("linear_regression", "--optimizer", "adam"),
    ("linear_regression", "--training-info", "--optimizer", "sgd"),
    ("digits_mlp", "--loss", "cross-entropy", "--accumulate", "2", "--optimizer", "adamw", "--ema", "0.9"),
    ("symbolic", "--lora", "2"),
    ("linear_regression", "--as-gradient-op"),
    ("linear_regression", "--loss-scale", "dynamic", "--optimizer", "momentum"),
)  # fmt: skip

LARGEST = 500_000
"""Bytes of a model; larger ones take the time of many small ones."""


@dataclass
class Seed:
    """A model to be mutated.

    Attributes:
        name: where it is from.
        model: it.
        beside: the files that it needs, by name.
        arrays: a value for inputs and outputs, and for the label if it is another, as far as known.
        loss: one that suits it.
        is_training: whether onnxgrad made it.
    """

    name: str
    model: ModelProto
    beside: Mapping[str, bytes] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    loss: str = "mse"
    is_training: bool = False


class Corpus:
    """What seeds are drawn from."""

    def __init__(self, folder: Path | None) -> None:
        small = [path for path in sorted(folder.rglob("*.onnx")) if path.stat().st_size < LARGEST] if folder else []
        self._real, self._folder = small, folder

    def draw(self, rng: Random) -> Seed:
        """A model."""
        kind = rng.random()
        if kind < 0.5:
            return _weighted(_node_test(rng), rng)
        if kind < 0.6:
            return _built(rng.choice(BUILDS))
        if kind < 0.8 or not self._real:
            return sample(rng.choice(SAMPLES))
        return _file(rng.choice(self._real))


@cache
def _stored(path: Path) -> tuple[bytes, Mapping[str, bytes]]:
    near = [p for p in path.parent.iterdir() if p.suffix in (".data", ".bin") and p.stat().st_size < LARGEST]
    return path.read_bytes(), {p.name: p.read_bytes() for p in near}


def _file(path: Path) -> Seed:
    data, beside = _stored(path)
    name = f"{path.parent.name}/{path.name}"
    return Seed(name, ModelProto.FromString(data), beside)


def sample(path: Path) -> Seed:
    """A sample model with some of its data."""
    seed, data = _file(path), path.parent / ("digits.npz" if "digits" in path.name else f"{path.stem}.npz")
    if data.exists():
        with np.load(data) as stored:
            arrays = {name.removeprefix("train_"): stored[name][:8] for name in stored if not name.startswith("test_")}
        seed.arrays = {seed.model.graph.input[0].name: arrays["x"], "label": arrays["y"]}
        seed.loss = "mse" if arrays["y"].dtype.kind == "f" else "cross-entropy"
    return seed


@cache
def _training_model(build: tuple[str, ...]) -> bytes:
    name, *options = build
    with TemporaryDirectory() as folder:
        out = Path(folder) / "train.onnx"
        words = [f"sample_models/{name}.onnx", *options, "-o", str(out), "--no-report", "--no-verify"]
        subprocess.run([sys.executable, "-m", "onnxgrad_cli", "build", *words], check=True, capture_output=True)
        return out.read_bytes()


def _built(build: tuple[str, ...]) -> Seed:
    arrays = sample(Path(f"sample_models/{build[0]}.onnx")).arrays
    return Seed(f"build {' '.join(build)}", ModelProto.FromString(_training_model(build)), {}, arrays, is_training=True)


def _node_test(rng: Random) -> Seed:
    cases = published_cases(rng.choice(FILES))
    while not cases:
        cases = published_cases(rng.choice(FILES))
    case = rng.choice(cases)
    model = ModelProto()
    model.CopyFrom(case.model)
    inputs, outputs = case.data_sets[0] if case.data_sets else ([], [])
    graph, arrays = model.graph, {}
    for values, given in ((graph.input, inputs), (graph.output, outputs)):
        for value, x in zip(values, given, strict=False):
            if isinstance(x, TensorProto):
                arrays[value.name] = numpy_helper.to_array(x)
            elif isinstance(x, (np.ndarray, np.generic)):
                arrays[value.name] = np.asarray(x)
    return Seed(case.name, model, {}, arrays)


def _weighted(seed: Seed, rng: Random) -> Seed:
    """A model whose inputs but the first become weights, for a node test has none; mostly."""
    graph = seed.model.graph
    if rng.random() < 0.1 or seed.model.ByteSize() > LARGEST:
        return seed
    for value in list(graph.input)[1:]:
        x = seed.arrays.get(value.name)
        if x is not None and x.dtype.kind in "fiub" and x.size < 10_000:
            graph.initializer.append(numpy_helper.from_array(x, value.name))
            graph.input.remove(value)
    return seed
