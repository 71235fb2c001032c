"""Training through derivatives equals PyTorch, whichever exporter wrote the network."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from tests.cli_harness import Shell

pytestmark = pytest.mark.slow

STEPS, BATCH, RATE = 20, 16, 0.01

LOSSES = """
def penalty(op, y, INPUT: "input"):
    g = op.grad(y, INPUT)
    return y + 10 * (op.Sqrt(op.sum(g * g, [1])) - 1) ** 2

def sobolev(op, y, label, INPUT: "input", slope: "label INPUT"):
    g = op.grad(y, INPUT) - slope
    return (y - label) ** 2 + op.sum(g * g, [1])

def distilled(op, y, INPUT: "input"):
    teacher = op.load("teacher.onnx", INPUT=INPUT)
    g = op.grad(y, INPUT) - op.grad(teacher, INPUT)
    return (y - teacher) ** 2 + op.sum(g * g, [1])
"""


def slopes(y: Tensor, x: Tensor) -> Tensor:
    found: Tensor = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return found


def penalty(net: nn.Module, x: Tensor, label: Tensor, slope: Tensor, teacher: nn.Module) -> Tensor:
    return net(x) + 10 * (slopes(net(x), x).norm(dim=1, keepdim=True) - 1) ** 2


def sobolev(net: nn.Module, x: Tensor, label: Tensor, slope: Tensor, teacher: nn.Module) -> Tensor:
    return (net(x) - label) ** 2 + ((slopes(net(x), x) - slope) ** 2).sum(1, keepdim=True)


def distilled(net: nn.Module, x: Tensor, label: Tensor, slope: Tensor, teacher: nn.Module) -> Tensor:
    return sobolev(net, x, teacher(x), slopes(teacher(x), x), teacher)


def network(seed: int) -> nn.Sequential:
    """A perceptron [n, 3] -> [n, 1]."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def by_torch(net: nn.Sequential, file: str, dynamo: bool) -> None:
    sizes: dict[str, Any] = (
        {"dynamic_shapes": ({0: torch.export.Dim("n")},)}
        if dynamo
        else {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.zeros(3, 3),), file, input_names=["x"], output_names=["y"], dynamo=dynamo,
                          verbose=False, **sizes)  # fmt: skip


def by_sklearn(net: nn.Sequential, file: str) -> None:
    from sklearn.neural_network import MLPRegressor

    model = MLPRegressor(hidden_layer_sizes=(16, 16), activation="tanh", max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(np.zeros((4, 3)), np.zeros(4))
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    model.coefs_ = [layer.weight.detach().numpy().T.copy() for layer in layers]
    model.intercepts_ = [layer.bias.detach().numpy().copy() for layer in layers]
    proto = pytest.importorskip("skl2onnx").to_onnx(model, np.zeros((4, 3), np.float32))
    onnx.save(proto, file)


EXPORTERS: dict[str, Callable[[nn.Sequential, str], None]] = {
    "torchscript": lambda net, file: by_torch(net, file, False),
    "dynamo": lambda net, file: by_torch(net, file, True),
    "skl2onnx": by_sklearn,
}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("loss", [penalty, sobolev, distilled])
def test_weights_after_20_steps(
    loss: Callable[..., Tensor], exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if exporter == "dynamo":
        pytest.importorskip("onnxscript", reason="PyTorch's newer exporter needs onnxscript")
    net, teacher, rng = network(0), network(1), np.random.default_rng(0)
    EXPORTERS[exporter](net, "net.onnx")
    EXPORTERS[exporter](teacher, "teacher.onnx")
    source = onnx.load("net.onnx").graph
    x = rng.standard_normal((STEPS * BATCH, 3)).astype(np.float32)
    label, slope = np.sin(x.sum(1, keepdims=True)), np.cos(x)
    arrays = {source.input[0].name: x} | ({"label": label, "slope": slope} if loss is sobolev else {})
    np.savez("data.npz", **arrays)
    Path("losses.py").write_text(LOSSES.replace("INPUT", source.input[0].name))
    done = Shell(tmp_path, capsys)(
        "train", "net.onnx", "--data", "data.npz", "--loss", f"losses.py:{loss.__name__}", "--optimizer", "adam",
        "--lr", str(RATE), "--epochs", "1", "--batch-size", str(BATCH), "--no-shuffle", "-o", "trained.onnx",
    )  # fmt: skip
    assert done.code == 0, done.err
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    for first in range(0, len(x), BATCH):
        batch = [torch.tensor(array[first : first + BATCH]) for array in (x, label, slope)]
        optimizer.zero_grad()
        loss(net, batch[0].requires_grad_(), *batch[1:], teacher).mean().backward()
        optimizer.step()
    found = [numpy_helper.to_array(each) for each in onnx.load("trained.onnx").graph.initializer]
    for expected in (parameter.detach().numpy() for parameter in net.parameters()):
        candidates = [array for array in found if array.size == expected.size and array.dtype == np.float32]
        differences = [
            np.abs(each.reshape(-1) - turned.reshape(-1)).max()
            for each in candidates
            for turned in (expected, expected.T)
        ]
        assert min(differences) < 1e-5, (exporter, expected.shape, differences)
