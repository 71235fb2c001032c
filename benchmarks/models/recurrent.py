"""Networks that take one step after the other."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.seeded import seeded

__all__ = ["gru", "lstm"]


class Sequences(nn.Module):
    """A recurrent layer over [batch, sequence, width], and a classifier on its last state."""

    def __init__(self, body: nn.RNNBase, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.hidden_size, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


@seeded
def lstm(classes: int = 4) -> nn.Module:
    """One LSTM layer of width 128."""
    return Sequences(nn.LSTM(128, 128, batch_first=True), classes)


@seeded
def gru(classes: int = 4) -> nn.Module:
    """One GRU layer of width 128."""
    return Sequences(nn.GRU(128, 128, batch_first=True), classes)
