"""Random weights that are the same in every process, and all different.

PyTorch's exporter writes tensors of equal values once: a fresh network's zero biases and unit scales would come out as
one weight, which no framework trains together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn


def seeded(make: Callable[..., nn.Module]) -> Callable[..., Any]:
    """A function that builds its network from seed 0, in inference mode."""

    @wraps(make)
    def made(*arguments: Any, **more: Any) -> nn.Module:
        torch.manual_seed(0)
        model = make(*arguments, **more)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.02 * torch.randn_like(parameter)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                _scatter(module)
        return model.eval()

    return made


def _scatter(norm: nn.BatchNorm2d) -> None:
    """Random statistics, and scales that keep a deep network's activations bounded."""
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_(0, 0.1)
    norm.running_var.uniform_(0.5, 1.5)
    nn.init.uniform_(norm.weight, 0.3, 0.7)
    nn.init.normal_(norm.bias, 0, 0.1)
