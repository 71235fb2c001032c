"""Networks of convolutions.

LeNet-5 (LeCun et al. 1998, with ReLU and maxima), ResNet-18 and 50 (He et al. 2015, arXiv:1512.03385), MobileNetV2
(Sandler et al. 2018, arXiv:1801.04381), U-Net (Ronneberger et al. 2015, arXiv:1505.04597, with BatchNormalization and
padded convolutions), and the sample model for digits.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from benchmarks.models.seeded import seeded

__all__ = ["digits_cnn", "lenet", "mobilenet_v2", "resnet18", "resnet50", "unet"]


def unit(a: int, b: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the size, but for its stride, and BatchNormalization."""
    conv = nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(b))


@seeded
def lenet() -> nn.Module:
    """28 x 28 images of one channel -> 10 classes."""
    first = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    tail = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, *second, *tail)


@seeded
def digits_cnn() -> nn.Module:
    """The network of sample_models/digits_cnn.onnx."""

    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]

    tail = [nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 16), *block(16, 32), *tail)


@seeded
def resnet50() -> nn.Module:
    """ResNet-50 for 224 x 224 images."""
    return _resnet((3, 4, 6, 3), bottleneck=True)


@seeded
def resnet18() -> nn.Module:
    """ResNet-18, likewise."""
    return _resnet((2, 2, 2, 2), bottleneck=False)


class Residual(nn.Module):
    """A ResNet's block of two convolutions, or three that narrow and widen."""

    def __init__(self, a: int, b: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outer = 4 * b if bottleneck else b
        if bottleneck:
            layers = [unit(a, b, 1), nn.ReLU(), unit(b, b, 3, stride), nn.ReLU(), unit(b, outer, 1)]
        else:
            layers = [unit(a, b, 3, stride), nn.ReLU(), unit(b, b, 3)]
        self.body = nn.Sequential(*layers)
        self.skip = nn.Identity() if a == outer and stride == 1 else unit(a, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def _resnet(counts: tuple[int, ...], bottleneck: bool) -> nn.Module:
    blocks, width = [], 64
    for stage, count in enumerate(counts):
        inner = 64 << stage
        for i in range(count):
            blocks.append(Residual(width, inner, 2 if stage and i == 0 else 1, bottleneck))
            width = 4 * inner if bottleneck else inner
    stem = [unit(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


class Inverted(nn.Module):
    """MobileNetV2's block: widen, a depthwise convolution, narrow; a skip where input and output are of one shape."""

    def __init__(self, a: int, b: int, stride: int, factor: int) -> None:
        super().__init__()
        inner = a * factor
        widen = [unit(a, inner, 1), nn.ReLU6()] if factor > 1 else []
        self.body = nn.Sequential(*widen, unit(inner, inner, 3, stride, inner), nn.ReLU6(), unit(inner, b, 1))
        self.skip = a == b and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.skip else self.body(x)


STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""MobileNetV2's table: factor of widening, channels, blocks, stride of the first."""


@seeded
def mobilenet_v2() -> nn.Module:
    """MobileNetV2 of width 1 for 224 x 224 images; without the dropout before its classifier."""
    blocks, width = [], 32
    for factor, channels, count, stride in STAGES:
        for i in range(count):
            blocks.append(Inverted(width, channels, 1 if i else stride, factor))
            width = channels
    stem, top = [unit(3, 32, 3, 2), nn.ReLU6()], [unit(width, 1280, 1), nn.ReLU6()]
    return nn.Sequential(*stem, *blocks, *top, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


class UNet(nn.Module):
    """Halve and widen, then double and narrow, each level beside what was there on the way down."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()

        def double(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(unit(a, b, 3), nn.ReLU(), unit(b, b, 3), nn.ReLU())

        pairs = list(pairwise(widths))
        self.first = double(3, widths[0])
        self.down = nn.ModuleList(double(a, b) for a, b in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.up = nn.ModuleList(double(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        met = [self.first(x)]
        for down in self.down:
            met.append(down(torch.max_pool2d(met[-1], 2)))
        x = met.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([met.pop(), grow(x)], 1))
        return self.head(x)


@seeded
def unet() -> nn.Module:
    """A small U-Net: four levels of 16 to 128 channels, 4 classes a pixel."""
    return UNet((16, 32, 64, 128), 4)
