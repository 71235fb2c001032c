"""Models at their real size with random weights, as PyTorch modules and as their ONNX exports.

The benchmarks and the real-size tests take them from here: BERT and ResNets (architectures of Devlin et al. 2018,
arXiv:1810.04805, and He et al. 2015, arXiv:1512.03385), some smaller classifiers, and two files no framework is
needed for: a chain of many small nodes, and a small network with a gigabyte of external weights in a sparse file.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def bert_base(layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 30522) -> Any:
    """BERT's encoder, post-norm, with learnt positions: token ids [batch, sequence] -> states."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def split(y: torch.Tensor) -> torch.Tensor:
                return y.view(y.shape[0], y.shape[1], heads, width // heads).transpose(1, 2)

            q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
            weights = torch.softmax(q @ k.transpose(-1, -2) / (width // heads) ** 0.5, -1)
            return self.output((weights @ v).transpose(1, 2).reshape(x.shape))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
            self.norm = nn.LayerNorm(width, 1e-12)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(ids.shape[1], device=ids.device)
            x = self.norm(self.words(ids) + self.positions(positions))
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Bert()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            parameter.data += 0.02 * torch.randn_like(parameter)  # the exporter merges weights of equal values
    return model.eval()


def resnet50() -> Any:
    """ResNet-50 for 224 x 224 images, BatchNormalization with (random) running statistics."""
    return _resnet((3, 4, 6, 3), bottleneck=True)


def resnet18() -> Any:
    """ResNet-18, likewise."""
    return _resnet((2, 2, 2, 2), bottleneck=False)


def _resnet(counts: tuple[int, ...], bottleneck: bool) -> Any:
    import torch
    from torch import nn

    def unit(a: int, b: int, kernel: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(b))

    def stack(a: int, b: int, stride: int) -> nn.Sequential:
        if bottleneck:
            return nn.Sequential(unit(a, b, 1), nn.ReLU(), unit(b, b, 3, stride), nn.ReLU(), unit(b, 4 * b, 1))
        return nn.Sequential(unit(a, b, 3, stride), nn.ReLU(), unit(b, b, 3))

    class Block(nn.Module):
        def __init__(self, a: int, b: int, outer: int, stride: int) -> None:
            super().__init__()
            self.body = stack(a, b, stride)
            self.skip = nn.Identity() if a == outer and stride == 1 else unit(a, outer, 1, stride)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x) + self.skip(x))

    torch.manual_seed(0)
    blocks, width = [], 64
    for stage, count in enumerate(counts):
        inner = 64 << stage
        outer = 4 * inner if bottleneck else inner
        for i in range(count):
            blocks.append(Block(width, inner, outer, 2 if stage and i == 0 else 1))
            width = outer
    stem = [unit(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.3, 0.7)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


def mlp() -> Any:
    """784 -> 1024 -> 1024 -> 10 with ReLU."""
    from torch import nn

    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def digits_cnn() -> Any:
    """The network of sample_models/digits_cnn.onnx."""
    from torch import nn

    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]

    tail = [nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 16), *block(16, 32), *tail)


def bert_small(classes: int = 4) -> Any:
    """BERT with 4 layers of width 256, and a classifier on the first token's state."""
    return _classifier(bert_base(4, 256, 4), lambda states: states[:, 0], 256, classes)


def lstm(classes: int = 4) -> Any:
    """One LSTM layer of width 128 over [batch, sequence, 128], and a classifier on its last state."""
    from torch import nn

    return _classifier(nn.LSTM(128, 128, batch_first=True), lambda found: found[0][:, -1], 128, classes)


def _classifier(body: Any, pick: Any, width: int, classes: int) -> Any:
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(width, classes)

        def forward(self, x: Any) -> Any:
            return self.head(pick(self.body(x)))

    return Classifier()


def export(model: Any, example: Any, path: Path, name: str = "x") -> Path:
    """Write a PyTorch module as ONNX with a symbolic batch."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (example,),
            str(path),
            opset_version=18,
            dynamo=False,
            input_names=[name],
            output_names=["output"],
            dynamic_axes={name: {0: "batch"}, "output": {0: "batch"}},
            do_constant_folding=False,
        )
    return path


def chain(nodes: int, path: Path, width: int = 8) -> Path:
    """A chain of `nodes` small nodes with a weight in every fourth."""
    rng = np.random.default_rng(0)
    made, weights, value = [], [], "x"
    for i in range(nodes):
        kind = ("Mul", "Tanh", "Add", "Sigmoid")[i % 4]
        inputs = [value]
        if kind in ("Mul", "Add"):
            weights.append(numpy_helper.from_array(rng.standard_normal(width).astype(np.float32), f"w{i}"))
            inputs.append(f"w{i}")
        made.append(helper.make_node(kind, inputs, [f"v{i}"], name=f"n{i}"))
        value = f"v{i}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", width])
    graph = helper.make_graph(made, "chain", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def external(folder: Path, size: int = 1 << 30, width: int = 4096) -> Path:
    """A network of square matrix products with `size` bytes of weights in one sparse file beside it."""
    layers = size // (4 * width * width)
    nodes, weights, value = [], [], "x"
    for i in range(layers):
        tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (
            ("location", "weights.bin"),
            ("offset", i * 4 * width * width),
            ("length", 4 * width * width),
        ):
            tensor.external_data.add(key=key, value=str(text))
        weights.append(tensor)
        nodes += [
            helper.make_node("MatMul", [value, f"w{i}"], [f"h{i}"], name=f"matmul{i}"),
            helper.make_node("Relu", [f"h{i}"], [f"r{i}"], name=f"relu{i}"),
        ]
        value = f"r{i}"
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(layers * 4 * width * width)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", width])
    graph = helper.make_graph(nodes, "external", [x], [y], weights)
    path = folder / "external.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path
