"""Networks of linear layers."""

from __future__ import annotations

from torch import nn

from benchmarks.models.seeded import seeded

__all__ = ["mlp"]


@seeded
def mlp() -> nn.Module:
    """784 -> 1024 -> 1024 -> 10 with ReLU."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
