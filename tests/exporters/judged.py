"""What `onnxgrad build` says of a model file of any producer, and what differences of the original's loss say.

The differences are taken here, by onnxruntime on the original and mse in numpy, so that nothing of onnxgrad's own proof
comes in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime as ort
from onnx import numpy_helper

from onnxgrad_cli.execution.double import DoubleExecutor

ort.set_default_logger_severity(3)
Arrays = dict[str, np.ndarray]

OLD = 13
"""Models of older opsets are converted, by onnx, before they are computed in float64."""


@dataclass(frozen=True)
class Judgement:
    """What came of one model.

    Attributes:
        code: the exit code of `onnxgrad build`.
        verdict: 'proved', 'not_proved', 'failed', or "" where nothing was built.
        why: the proof's reason, or the error.
        error: how far the slope along the gradients is from differences of the original's loss, relative; None where
            nothing was built.
        seconds: what the build took.
    """

    code: int
    verdict: str
    why: str
    error: float | None
    seconds: float

    def row(self, name: str) -> str:
        """The model's row of the table."""
        error = "" if self.error is None else f"{self.error:.1e}"
        why = " ".join(self.why.split())[:160]
        return f"{name:42} | {self.code} | {self.verdict:10} | {error:7} | {self.seconds:5.1f} s | {why}"


def judge(
    file: Path, feeds: Mapping[str, np.ndarray], folder: Path, arguments: tuple[str, ...] = (), exact: bool = False
) -> Judgement:
    """Build a training model with mse on the first output that is a float, and hold its gradients against differences.

    Args:
        file: the original.
        feeds: its inputs, at which the differences are taken; the build does not see them.
        folder: where the training model goes.
        arguments: more of the command line.
        exact: take the differences in float64, where the loss bends too fast for steps that float32 sees.
    """
    target = folder / f"{file.stem}.train.onnx"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", "onnxgrad_cli", "build", str(file), "--loss", "mse", "--label", "truth"]
    start = time.perf_counter()
    run = subprocess.run(
        [*command, "-o", str(target), "--force", "--json", *arguments], check=False, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    told: dict[str, Any] = json.loads(run.stdout or '{"result": null}')["result"] or {"error": run.stderr}
    proof = told.get("proof") or {}
    why = proof.get("why") or told.get("error") or ""
    error = against_differences(file, target, feeds, exact) if run.returncode in (0, 4) and target.exists() else None
    return Judgement(run.returncode, proof.get("verdict", ""), why, error, seconds)


def against_differences(
    file: Path, training: Path, feeds: Mapping[str, np.ndarray], exact: bool = False, directions: int = 3
) -> float | None:
    """How far <G, d> is from central differences of the original's loss: the best of a few steps, the median direction.

    A difference in float32 is noise where the step is small and curvature where it is large, so several are tried; d is
    the gradient of each weight, of the weight's own size, with random entries for half of its length. None where no
    weight of the original has the name of one that is trained.
    """
    outputs = [value.name for value in onnx.load(training).graph.output]
    names = {name.removesuffix("_grad"): name for name in outputs if name.endswith("_grad")}
    original = _with_initializers(onnx.load(file))
    stored = {tensor.name: tensor for tensor in original.graph.initializer}
    shared = [name for name in names if name in stored]
    prediction, truth = _truth(original, feeds)
    if not shared:
        return None
    found = ort.InferenceSession(str(training)).run([names[name] for name in shared], {**feeds, "truth": truth})
    weights = {name: numpy_helper.to_array(stored[name]) for name in shared}
    given = dict(zip(shared, found, strict=True))
    rng = np.random.default_rng(0)
    loss = (_loss_in_double if exact else _loss)(original, shared, prediction, feeds, truth)
    errors = []
    for _ in range(directions):
        way = {name: _direction(weights[name], given[name], rng) for name in shared}
        claimed = sum(float(np.sum(given[name].astype(np.float64) * way[name])) for name in shared)
        measured = []
        for step in (1e-6, 1e-7) if exact else (1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
            moved = [{n: weights[n] + sign * step * way[n] for n in shared} for sign in (1, -1)]
            ends = [loss(at if exact else {n: at[n].astype(weights[n].dtype) for n in shared}) for at in moved]
            measured.append((ends[0] - ends[1]) / (2 * step))
        errors.append(min(abs(claimed - m) / max(abs(claimed), abs(m), 1e-30) for m in measured))
    return float(np.median(errors))


def _with_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the tensors of its Constant nodes among the initializers, and these no inputs."""
    nodes = [node for node in model.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]
    for node in nodes:
        model.graph.initializer.append(node.attribute[0].t)
        model.graph.initializer[-1].name = node.output[0]
        model.graph.node.remove(node)
    stored = {tensor.name for tensor in model.graph.initializer}
    for value in [value for value in model.graph.input if value.name in stored]:
        model.graph.input.remove(value)
    return model


def _direction(weight: np.ndarray, gradient: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The gradient's direction and a random one, each of the weight's size."""
    size = float(np.linalg.norm(weight.astype(np.float64))) or 1.0
    noise = rng.standard_normal(weight.shape)
    along = gradient.astype(np.float64)
    whole = np.linalg.norm(along)
    return size * (along / (whole or 1.0) + 0.5 * noise / (np.linalg.norm(noise) or 1.0))


def _truth(original: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> tuple[str, np.ndarray]:
    """The name of the first output of floats, and a label of its shape."""
    session = ort.InferenceSession(original.SerializeToString())
    results = session.run(None, dict(feeds))
    for value, result in zip(session.get_outputs(), results, strict=True):
        if isinstance(result, np.ndarray) and result.dtype.kind == "f":
            rng = np.random.default_rng(1)
            size = float(np.sqrt(np.mean(np.square(result.astype(np.float64))))) or 1.0
            return value.name, (result + size * rng.standard_normal(result.shape)).astype(result.dtype)
    raise ValueError("no output is of floats")


def _loss(
    original: onnx.ModelProto, moving: list[str], output: str, feeds: Mapping[str, np.ndarray], truth: np.ndarray
) -> Any:
    """Weights -> mse of the original, whose weights of these names are fed."""
    fed = onnx.ModelProto()
    fed.CopyFrom(original)
    taken = {value.name for value in fed.graph.input}
    for tensor in fed.graph.initializer:
        if tensor.name in moving and tensor.name not in taken:
            fed.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    kept = [tensor for tensor in fed.graph.initializer if tensor.name not in moving]
    del fed.graph.initializer[:]
    fed.graph.initializer.extend(kept)
    session = ort.InferenceSession(fed.SerializeToString())

    def loss(at: Arrays) -> float:
        (y,) = session.run([output], {**feeds, **at})
        return float(np.mean(np.square(y.astype(np.float64) - truth.astype(np.float64))))

    return loss


def _loss_in_double(
    original: onnx.ModelProto, moving: list[str], output: str, feeds: Mapping[str, np.ndarray], truth: np.ndarray
) -> Any:
    """The same in float64, on onnxruntime and onnx.reference."""
    old = original.opset_import[0].version < OLD
    run = DoubleExecutor(onnx.version_converter.convert_version(original, OLD) if old else original)
    return lambda at: float(np.mean(np.square(run({**run.widened(feeds), **at})[output] - truth.astype(np.float64))))
