"""A network of convolutions, as a model and in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper, parser

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
net (float[N, 2, 8, 8] x) => (float[N, 5] logits)
{
  seen = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
  soft = Softplus(seen)
  pooled = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(soft)
  deep = Conv(pooled, w2, b2)
  layer = Relu(deep)
  flat = Flatten(layer)
  logits = Gemm<transB = 1>(flat, w3, b3)
}"""
SHAPES = {"w1": (4, 2, 3, 3), "b1": (4,), "w2": (6, 4, 2, 2), "b2": (6,), "w3": (5, 54), "b3": (5,)}


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {name: (0.3 * random.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def model() -> onnx.ModelProto:
    found = parser.parse_model(TEXT)
    found.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights().items())
    return found


def samples(count: int = 5) -> np.ndarray:
    return np.random.default_rng(4).uniform(0, 1, (count, 2, 8, 8)).astype(np.float32)


def save(folder: Path, **more: np.ndarray) -> tuple[Path, Path]:
    """The model and its samples, in files."""
    onnx.save(model(), folder / "net.onnx")
    np.savez(folder / "data.npz", x=samples(), **more)
    return folder / "net.onnx", folder / "data.npz"


class Twin(torch.nn.Module):
    """The same network in PyTorch, whose last layer of convolutions is `layer`."""

    def __init__(self) -> None:
        super().__init__()
        w = {name: torch.tensor(array) for name, array in weights().items()}
        first, second, head = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Conv2d(4, 6, 2), torch.nn.Linear(54, 5)
        for module, a, b in ((first, "w1", "b1"), (second, "w2", "b2"), (head, "w3", "b3")):
            module.weight.data, module.bias.data = w[a], w[b]
        self.first, self.second, self.layer, self.head = first, second, torch.nn.ReLU(), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = torch.nn.functional.avg_pool2d(torch.nn.functional.softplus(self.first(x)), 2)
        return self.head(self.layer(self.second(pooled)).flatten(1))


def gradients(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """∂S/∂x by PyTorch."""
    given = torch.tensor(x, requires_grad=True)
    Twin()(given)[range(len(x)), labels].sum().backward()
    assert given.grad is not None
    return given.grad.numpy()
