"""The training steps that are measured: a network, its batch, and its training model.

Sizes are those of small machines: what they cost is products and convolutions where the network is large, and the
overhead of a step where it is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from onnxgrad_cli import LossSpec, Options, build

Kind = Literal["gradients", "adamw"]
KINDS: tuple[Kind, ...] = ("gradients", "adamw")
"""A step without and with the optimizer."""


@dataclass(frozen=True)
class Draw:
    """A random tensor: numbers of the normal distribution, or integers below a bound."""

    shape: tuple[int, ...]
    below: int = 0

    def array(self, rng: np.random.Generator) -> np.ndarray:
        """It."""
        return rng.integers(0, self.below, self.shape) if self.below else rng.standard_normal(self.shape, np.float32)


@dataclass(frozen=True)
class Row:
    """A network that is trained with cross-entropy.

    Attributes:
        name: what it is called in the table.
        net: the name of a function of `models`.
        inputs: by name, in the network's order.
        label: the classes.
        axes: the symbols of axes, where not axis 0 of every value is the batch.
    """

    name: str
    net: str
    inputs: Mapping[str, Draw]
    label: Draw
    axes: Mapping[str, Mapping[int, str]] | None = field(default=None)

    def module(self) -> Any:
        """The network in PyTorch, with the weights that it has everywhere."""
        from benchmarks import models

        return getattr(models, self.net)()

    def batch(self) -> dict[str, np.ndarray]:
        """Inputs, and the label `y`."""
        rng = np.random.default_rng(0)
        return {name: draw.array(rng) for name, draw in [*self.inputs.items(), ("y", self.label)]}

    def exported(self, folder: Path, opset: int = 18) -> Path:
        """Where `export` writes."""
        return folder / f"{self.net}.opset{opset}.onnx"

    def export(self, folder: Path, opset: int = 18) -> Path:
        """Write the network as ONNX."""
        import torch

        from benchmarks import models

        batch = self.batch()
        example = tuple(torch.tensor(batch[name]) for name in self.inputs)
        path = self.exported(folder, opset)
        return models.export(self.module(), example, path, tuple(self.inputs), self.axes, opset)

    def training_model(self, source: Path, kind: Kind, **more: Any) -> Path:
        """Write the training model of an export; `more` are options of the build."""
        optimizer = "adamw" if kind == "adamw" else ""
        options = Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer=optimizer, mode="train", **more)
        target = source.with_suffix(".".join(["", kind, *more, "train.onnx"]))
        onnx.save(build(source, options).model, target)
        return target


def save(batch: Mapping[str, np.ndarray], path: Path) -> Path:
    """Write a batch as .npz, in its order."""
    np.savez(path, **batch)
    return path


def images(name: str, net: str, batch: int, side: int, classes: int, channels: int = 3) -> Row:
    """A classifier of images."""
    return Row(f"{name}, batch {batch}", net, {"x": Draw((batch, channels, side, side))}, Draw((batch,), classes))


def tokens(name: str, net: str, batch: int, length: int, words: int, classes: int) -> Row:
    """A classifier of texts."""
    return Row(f"{name}, {batch} x {length} tokens", net, {"x": Draw((batch, length), words)}, Draw((batch,), classes))


def steps(name: str, net: str) -> Row:
    """A classifier of sequences."""
    return Row(f"{name} 128, 16 x 50 steps", net, {"x": Draw((16, 50, 128))}, Draw((16,), 4))


def mlp(batch: int) -> Row:
    """A perceptron at a batch size."""
    return Row(f"MLP 784-1024-1024-10, batch {batch}", "mlp", {"x": Draw((batch, 784))}, Draw((batch,), 10))


UNET = Row("U-Net small, batch 4", "unet", {"x": Draw((4, 3, 128, 128))}, Draw((4, 128, 128), 4))
GPT2 = Row("GPT-2 small, 2 x 128 tokens", "gpt2", {"x": Draw((2, 128), 50257)}, Draw((2 * 128,), 50257),
           {"x": {0: "batch"}, "output": {0: "predictions"}})  # fmt: skip
GNN = Row("graph network, 4,096 nodes", "gnn",
          {"x": Draw((4096, 64)), "sources": Draw((32768,), 4096), "targets": Draw((32768,), 4096)}, Draw((4096,), 8),
          {"x": {0: "nodes"}, "sources": {0: "edges"}, "targets": {0: "edges"}, "output": {0: "nodes"}})  # fmt: skip

ROWS = (
    mlp(256),
    mlp(1),
    images("LeNet", "lenet", 64, 28, 10, channels=1),
    images("digits CNN", "digits_cnn", 64, 8, 10, channels=1),
    images("ResNet-18", "resnet18", 4, 224, 1000),
    images("ResNet-50", "resnet50", 4, 224, 1000),
    images("MobileNetV2", "mobilenet_v2", 8, 224, 1000),
    UNET,
    tokens("BERT-small", "bert_small", 8, 128, 30522, 4),
    tokens("BERT-base", "bert_classifier", 4, 128, 30522, 4),
    GPT2,
    images("ViT-small", "vit_small", 4, 224, 1000),
    steps("LSTM", "lstm"),
    steps("GRU", "gru"),
    GNN,
)


def chosen(parts: list[str] | None) -> list[Row]:
    """The rows that are asked for, each by its network or by a part of its name; all for None."""
    nets = {row.net for row in ROWS}

    def wanted(row: Row) -> bool:
        return any(part == row.net if part in nets else part.lower() in row.name.lower() for part in parts or [""])

    return [row for row in ROWS if wanted(row)]
