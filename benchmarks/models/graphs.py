"""Networks on graphs: what they cost is gathering along edges and adding up at nodes."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.seeded import seeded

__all__ = ["gnn"]


class Convolution(nn.Module):
    """A node's own state and the sum of its neighbours', each through a matrix."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(a, b), nn.Linear(a, b, bias=False)

    def forward(self, x: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sent = self.others(x)[sources]
        return self.own(x) + x.new_zeros(x.shape[0], sent.shape[1]).scatter_add(0, targets, sent)


class Gnn(nn.Module):
    """Nodes [nodes, 64], edges as sources [edges] and targets [edges] -> classes [nodes, 8]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            Convolution(64, width),
            Convolution(width, width),
            nn.Linear(width, classes),
        )

    def forward(self, x: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wide = targets[:, None].expand(-1, self.head.in_features)
        x = torch.relu(self.first(x, sources, wide))
        return self.head(torch.relu(self.second(x, sources, wide)))


@seeded
def gnn() -> nn.Module:
    """Two graph convolutions of width 64 (Gilmer et al. 2017, arXiv:1704.01212, in its simplest form)."""
    return Gnn(64, 8)
