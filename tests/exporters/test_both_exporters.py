"""A network gets one verdict, whichever of PyTorch's two exporters writes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onnxgrad_cli import Options, run_build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.verification.verdict import PROVED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="the newer exporter needs onnxscript"),
]


def _normalized(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())


class InvertedResidual(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = stride == 1 and width == outputs
        inner = [_normalized(width, 4 * width, 1), _normalized(4 * width, 4 * width, 3, stride, 4 * width)]
        self.inner = nn.Sequential(*inner, nn.Conv2d(4 * width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if self.residual else self.inner(x)


class MobileNet(nn.Module):
    """A small MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [InvertedResidual(8, 8, 1), InvertedResidual(8, 12, 2), InvertedResidual(12, 12, 1)]
        self.features = nn.Sequential(_normalized(3, 8, 3, 2), *blocks, _normalized(12, 32, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1)).flatten(1))


class Averages(nn.Module):
    """A network with averages over windows, a GroupNorm and an upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.norm(self.first(nn.functional.avg_pool2d(x, 2))))
        return self.last(nn.functional.interpolate(y, scale_factor=2, mode="bilinear"))


class Tokens(nn.Module):
    """A transformer's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.table(x)).mean(1))


class Recurrent(nn.Module):
    """Two layers of GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(8, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


NETWORKS = {
    "mobilenet": (MobileNet, (2, 3, 32, 32), {}),
    "averages": (Averages, (2, 3, 16, 16), {2: "height", 3: "width"}),
    "tokens": (Tokens, (2, 7), {1: "time"}),
    "recurrent": (Recurrent, (2, 7, 8), {}),
}
"""The network, the shape of its example, and the names of the sizes beside the batch that are open."""


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed sizes", "open sizes"])
@pytest.mark.parametrize("name", NETWORKS)
def test_both_exports_are_proved(name: str, symbolic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape, names = NETWORKS[name]
    example = torch.randint(0, 50, shape) if name == "tokens" else torch.randn(shape)
    network, sizes = make().eval(), {0: "batch", **names} if symbolic else {}
    verdicts = {}
    for newer in (False, True):
        file = tmp_path / f"{newer}.onnx"
        if newer:
            shapes = ({axis: torch.export.Dim.DYNAMIC for axis in sizes},)
            torch.onnx.export(network, (example,), file, dynamo=True, dynamic_shapes=shapes if sizes else None)
        else:
            torch.onnx.export(
                network, (example,), file, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes={"x": sizes}
            )
        report = run_build(file, tmp_path / "out.onnx", Options(losses=(LossSpec("mse"),)), force=True)
        assert report.proof is not None
        verdicts[newer] = report.proof.verdict, report.proof.why
    assert verdicts == {False: (PROVED, ""), True: (PROVED, "")}
