"""Networks of attention, as their usual implementations compute them: with scaled_dot_product_attention.

BERT (Devlin et al. 2018, arXiv:1810.04805), GPT-2 (Radford et al. 2019) and ViT (Dosovitskiy et al. 2020,
arXiv:2010.11929; its small size is that of Touvron et al. 2020, arXiv:2012.12877), without dropout.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.seeded import seeded

__all__ = ["bert_base", "bert_classifier", "bert_small", "gpt2", "vit_small"]


class Attention(nn.Module):
    """Attention among the tokens of [batch, tokens, width], or to those before."""

    def __init__(self, width: int, heads: int, fused: bool, causal: bool = False) -> None:
        """`fused`: query, key and value are one product, as in GPT-2 and ViT."""
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inward = nn.ModuleList(nn.Linear(width, width * (3 if fused else 1)) for _ in range(1 if fused else 3))
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [linear(x) for linear in self.inward]
        batch, tokens, width = x.shape
        parts = found[0].split(width, -1) if len(found) == 1 else found
        q, k, v = (y.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for y in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=(width // self.heads) ** -0.5)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """BERT's layer: normalization after each sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, fused=False)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class PreLayer(nn.Module):
    """GPT-2's and ViT's layer: normalization before."""

    def __init__(self, width: int, heads: int, causal: bool, gelu: str) -> None:
        super().__init__()
        self.attention, self.gelu = Attention(width, heads, fused=True, causal=causal), gelu
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class Bert(nn.Module):
    """Token ids [batch, sequence] -> states."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        return x


class BertClassifier(nn.Module):
    """A classifier on the first token's state."""

    def __init__(self, body: Bert, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(ids)[:, 0])


class Gpt2(nn.Module):
    """Token ids [batch, sequence] -> logits [batch * sequence, vocabulary], by the embedding's own matrix."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.layers = nn.ModuleList(PreLayer(width, heads, True, "tanh") for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x).flatten(0, 1), self.words.weight)


class Vit(nn.Module):
    """Images [batch, 3, 224, 224] -> classes, by patches of 16 x 16 and a token of their own."""

    def __init__(self, layers: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.ModuleList(PreLayer(width, heads, False, "none") for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def _small(model: nn.Module) -> nn.Module:
    """Weights as these models begin with."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


@seeded
def bert_base() -> nn.Module:
    """BERT's encoder of 12 layers and width 768: token ids [batch, sequence] -> states."""
    return _small(Bert(12, 768, 12, 30522))


@seeded
def bert_classifier(classes: int = 4) -> nn.Module:
    """BERT-base, and a classifier on the first token's state."""
    return _small(BertClassifier(Bert(12, 768, 12, 30522), 768, classes))


@seeded
def bert_small(classes: int = 4) -> nn.Module:
    """BERT with 4 layers of width 256, likewise."""
    return _small(BertClassifier(Bert(4, 256, 4, 30522), 256, classes))


@seeded
def gpt2() -> nn.Module:
    """GPT-2 of 12 layers and width 768."""
    return _small(Gpt2(12, 768, 12, 50257))


@seeded
def vit_small() -> nn.Module:
    """ViT of 12 layers and width 384 for 1,000 classes."""
    return _small(Vit(12, 384, 6, 1000))
