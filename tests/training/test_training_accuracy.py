"""Samples trained by the command from random weights are as good as the same nets trained by PyTorch.

Both start from the same weights, drawn as PyTorch's layers draw theirs, and take as many steps with the same optimizer;
each shuffles for itself. What is compared is the mean over three seeds of a score on data that neither has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from tests.cli_harness import Shell

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

SAMPLES = Path(__file__).parents[2] / "sample_models"
SEEDS = (0, 1, 2)

Weights = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]

pytestmark = [pytest.mark.slow, pytest.mark.long]


def redraw(model: onnx.ModelProto, seed: int) -> Weights:
    """Draw the weights anew: U(±1/√fan-in) for layers and their biases, N(0, 1) for embeddings, 1 and 0 else."""
    rng, drawn = np.random.default_rng(seed), {}
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        matrix = shapes.get(f"{layer}.weight", ())
        if layer.startswith("embed"):
            drawn[name] = rng.standard_normal(shape)
        elif len(matrix) > 1:
            drawn[name] = rng.uniform(-1, 1, shape) / np.sqrt(np.prod(matrix[1:]))
        else:
            drawn[name] = np.full(shape, kind in ("weight", "running_var"))
    drawn = {name: array.astype(np.float32) for name, array in drawn.items()}
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(drawn[tensor.name], tensor.name))
    return drawn


# -- the nets in PyTorch -------------------------------------------------------------------------------------------


def linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def regression(w: Tensors, x: torch.Tensor, training: bool) -> torch.Tensor:
    return linear(w, "fc", x)


def cnn(w: Tensors, x: torch.Tensor, training: bool) -> torch.Tensor:
    for i in "12":
        x = F.conv2d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], padding=1)
        running = w[f"bn{i}.running_mean"], w[f"bn{i}.running_var"]
        x = F.max_pool2d(F.relu(F.batch_norm(x, *running, w[f"bn{i}.weight"], w[f"bn{i}.bias"], training)), 2)
    return linear(w, "fc2", F.relu(linear(w, "fc1", x.flatten(1))))


def transformer(w: Tensors, ids: torch.Tensor, training: bool) -> torch.Tensor:
    x = w["embed_tokens.weight"][ids] + w["embed_positions.weight"][: ids.shape[1]]
    for layer in ("layers.0", "layers.1"):
        normed = norm(w, f"{layer}.norm1", x)
        parts = (linear(w, f"{layer}.{p}_proj", normed).unflatten(-1, (4, -1)).transpose(1, 2) for p in "qkv")
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = x + linear(w, f"{layer}.out_proj", mixed)
        x = x + linear(w, f"{layer}.fc2", F.gelu(linear(w, f"{layer}.fc1", norm(w, f"{layer}.norm2", x))))
    return linear(w, "classifier", norm(w, "norm", x).mean(1))


# -- the comparison ------------------------------------------------------------------------------------------------


def accuracy(y: np.ndarray, label: np.ndarray) -> float:
    return float(np.mean(y.argmax(1) == label))


def r2(y: np.ndarray, label: np.ndarray) -> float:
    return float(1 - np.mean((y - label) ** 2) / label.var())


@dataclass(frozen=True)
class Task:
    net: Callable[[Tensors, torch.Tensor, bool], torch.Tensor]
    score: Callable[[np.ndarray, np.ndarray], float]
    reached: float
    optimizer: str
    make: Callable[..., torch.optim.Optimizer]
    epochs: int
    rate: float


TASKS = {
    "linear_regression": Task(regression, r2, 0.99, "sgd", torch.optim.SGD, 20, 0.05),
    "digits_cnn": Task(cnn, accuracy, 0.97, "adam", torch.optim.Adam, 15, 2e-3),
    "tiny_transformer": Task(transformer, accuracy, 0.95, "adamw", torch.optim.AdamW, 30, 2e-3),
}


def data_of(name: str) -> dict[str, np.ndarray]:
    data = dict(np.load(SAMPLES / f"{'digits' if name == 'digits_cnn' else name}.npz"))
    if "x" in data:
        data = {f"{part}_{key}": data[key][rows] for part, rows in (("train", slice(200)), ("test", slice(200, None)))
                for key in "xy"}  # fmt: skip
    return data


def by_pytorch(
    task: Task, weights: Weights, x: np.ndarray, y: np.ndarray, seed: int
) -> Callable[[np.ndarray], np.ndarray]:
    w = {name: torch.tensor(array, requires_grad="running" not in name) for name, array in weights.items()}
    optimizer = task.make([t for t in w.values() if t.requires_grad], task.rate)
    loss = F.mse_loss if task.score is r2 else F.cross_entropy
    order = torch.Generator().manual_seed(seed)
    for _ in range(task.epochs):
        for batch in torch.randperm(len(x), generator=order).split(32):
            optimizer.zero_grad()
            loss(task.net(w, torch.tensor(x)[batch], True), torch.tensor(y)[batch]).backward()
            optimizer.step()
    return lambda x: task.net(w, torch.tensor(x), False).detach().numpy()


def by_command(
    shell: Shell, task: Task, model: onnx.ModelProto, x: np.ndarray, y: np.ndarray, seed: int
) -> Callable[[np.ndarray], np.ndarray]:
    (port,) = (value.name for value in model.graph.input)
    onnx.save(model, "model.onnx")
    np.savez("data.npz", **{port: x, "label": y})
    result = shell(
        "train", "model.onnx", "--data", "data.npz", "--loss", "mse" if task.score is r2 else "cross-entropy",
        "--mode", "train", "--optimizer", task.optimizer, "--epochs", task.epochs, "--learning-rate", task.rate,
        "--seed", seed, "--threads", 1, "--run", f"run{seed}", "-o", "trained.onnx",
    )  # fmt: skip
    assert result.code == 0, result.err
    session = onnxruntime.InferenceSession("trained.onnx")
    return lambda x: session.run(None, {port: x})[0]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", TASKS)
def test_as_good_as_pytorch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task, data, scores = TASKS[name], data_of(name), []
    for seed in SEEDS:
        model = onnx.load(SAMPLES / f"{name}.onnx")
        weights = redraw(model, seed)
        theirs = by_pytorch(task, weights, data["train_x"], data["train_y"], seed)
        ours = by_command(Shell(tmp_path, capsys), task, model, data["train_x"], data["train_y"], seed)
        scores.append([task.score(answer(data["test_x"]), data["test_y"]) for answer in (ours, theirs)])
    ours, theirs = np.mean(scores, axis=0)
    assert abs(ours - theirs) <= 0.01, scores
    assert min(ours, theirs) > task.reached, scores
