"""Small networks of the kinds that are trained on devices, for the table of runtimes: few weights, every usual layer.

Their parts are those of `benchmarks.models`, in which the ones of real size are.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.convolutional import Inverted, Residual, unit
from benchmarks.models.seeded import seeded
from benchmarks.models.transformers import Bert, BertClassifier, Gpt2, PreLayer

__all__ = ["autoencoder", "bert", "convnext", "gpt", "mixer", "mobilenet", "resnet", "squeezed", "tagger", "tcn", "vit"]


def _classifier(layers: list[nn.Module], width: int) -> nn.Module:
    """Layers over [batch, 3, 32, 32], and 10 classes of their mean."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


@seeded
def resnet() -> nn.Module:
    """ResNet for images of 32 x 32, as in section 4.2 of He et al. 2015 (arXiv:1512.03385), a block a stage."""
    blocks = [Residual(a, b, stride, False) for a, b, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))]
    return _classifier([unit(3, 16, 3), nn.ReLU(), *blocks], 64)


@seeded
def mobilenet() -> nn.Module:
    """MobileNetV2's blocks (Sandler et al. 2018, arXiv:1801.04381), of few channels; some are 96 = 6 x 16."""
    blocks = [Inverted(16, 16, 1, 1), Inverted(16, 24, 2, 6), Inverted(24, 24, 1, 6), Inverted(24, 40, 2, 6)]
    return _classifier([unit(3, 16, 3), nn.ReLU6(), *blocks, unit(40, 160, 1), nn.ReLU6()], 160)


class Next(nn.Module):
    """ConvNeXt's block (Liu et al. 2022, arXiv:2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


@seeded
def convnext() -> nn.Module:
    """Patches of 4 x 4, and two of ConvNeXt's blocks."""
    return _classifier([nn.Conv2d(3, 32, 4, 4), Next(32), Next(32)], 32)


class Squeeze(nn.Module):
    """Channels weighted by what all of them are on average (Hu et al. 2017, arXiv:1709.01507)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 4, 1), nn.SiLU(), nn.Conv2d(width // 4, width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.gate(x))


@seeded
def squeezed() -> nn.Module:
    """Convolutions with GroupNorm, SiLU, and channels that are weighted."""

    def stage(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.SiLU(), Squeeze(b)]

    return _classifier([*stage(3, 16), *stage(16, 32)], 32)


@seeded
def autoencoder() -> nn.Module:
    """Images of 16 x 16 -> themselves, by strided convolutions and transposed ones."""
    inward = [nn.Conv2d(1, 8, 3, 2, 1), nn.ELU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ELU()]
    outward = [nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()]
    return nn.Sequential(*inward, *outward)


class Causal(nn.Module):
    """A dilated convolution over time that sees no future, and a skip (Bai et al. 2018, arXiv:1803.01271)."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.before, self.conv = 2 * dilation, nn.Conv1d(width, width, 3, dilation=dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.conv(F.pad(x, (self.before, 0))))


@seeded
def tcn() -> nn.Module:
    """[batch, 8, 64] -> a class for each series."""
    layers = [nn.Conv1d(8, 32, 1), *(Causal(32, 1 << i) for i in range(3))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 4))


class Mix(nn.Module):
    """MLP-Mixer's layer (Tolstikhin et al. 2021, arXiv:2105.01601)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()

        def both(n: int, inner: int) -> nn.Module:
            return nn.Sequential(nn.Linear(n, inner), nn.GELU(), nn.Linear(inner, n))

        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = both(tokens, 32), both(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Patches(nn.Module):
    """Images [batch, 3, 32, 32] as 16 tokens of patches, through layers, and 10 classes of their mean."""

    def __init__(self, width: int, layers: list[nn.Module], positions: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.positions = nn.Parameter(torch.randn(1, 16, width) / 50) if positions else None
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x if self.positions is None else x + self.positions
        return self.head(self.norm(self.layers(x)).mean(1))


@seeded
def mixer() -> nn.Module:
    """MLP-Mixer of two layers."""
    return Patches(64, [Mix(16, 64), Mix(16, 64)], positions=False)


@seeded
def vit() -> nn.Module:
    """ViT of two layers and four heads."""
    return Patches(64, [PreLayer(64, 4, False, "none") for _ in range(2)], positions=True)


@seeded
def bert() -> nn.Module:
    """BERT of two layers and width 64 with 1,000 words."""
    return BertClassifier(Bert(2, 64, 2, 1000), 64, 4)


@seeded
def gpt() -> nn.Module:
    """GPT-2 of two layers and width 64 with 1,000 words: [batch, tokens] -> [batch * tokens, 1000]."""
    return Gpt2(2, 64, 2, 1000)


class Tagger(nn.Module):
    """Token ids [batch, steps] -> scores of each, [batch, classes, steps], by an LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(100, 16), nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(ids))[0]).transpose(1, 2)


@seeded
def tagger() -> nn.Module:
    """A tagger of words."""
    return Tagger()
