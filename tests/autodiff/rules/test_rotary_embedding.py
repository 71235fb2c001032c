"""RotaryEmbedding against PyTorch's autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.autodiff.definitions.test_attention import matches_its_kernel
from tests.nodes import compare, normal


def torch_rotary(x, positions, cos, sin, *, interleaved=0, num_heads=0, rotary_embedding_dim=0, **_):
    """Tokens by head are [batch, heads, tokens, size]."""
    shape = x.shape
    size = 2 * cos.shape[-1]
    if x.ndim == 3:
        x = x.unflatten(2, (num_heads, -1) if rotary_embedding_dim else (-1, size)).transpose(1, 2)
    if positions is not None:
        if positions.ndim == 1:
            positions = positions + torch.arange(x.shape[2])[None]
        cos, sin = cos[positions], sin[positions]
    turned, rest = x[..., :size], x[..., size:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    y = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None])
    y = torch.cat([(y if interleaved else y.transpose(-1, -2)).flatten(-2), rest], -1)
    return (y if len(shape) == 4 else y.transpose(1, 2).flatten(2),)


ROTATIONS = [
    (shape, interleaved, dim, positions)
    for shape in ((2, 3, 16), (2, 2, 3, 8))
    for interleaved in (0, 1)
    for dim in (0, 4)
    for positions in (None, np.array([2]), np.array([[0, 5, 5], [6, 1, 0]]))
]


@pytest.mark.parametrize(("shape", "interleaved", "dim", "positions"), ROTATIONS)
@pytest.mark.thinned(3)
def test_rotary_embedding(shape, interleaved, dim, positions):
    half = (dim or 8) // 2
    attributes = {"interleaved": interleaved, "num_heads": 2, "rotary_embedding_dim": dim}
    x, cache = normal(*shape).astype(np.float32), (7, half) if positions is not None else (2, 3, half)
    cos, sin = (normal(*cache, seed=s).astype(np.float32) for s in (1, 2))
    if positions is None or positions.ndim == 2:
        compare(
            lambda x, cos, sin, positions: torch_rotary(x, positions, cos, sin, **attributes), "RotaryEmbedding",
            {"x": x, "cos": cos, "sin": sin, "positions": positions}, ("y",), attributes, tolerance=1e-5,
        )  # fmt: skip
    if positions is not None:
        feeds = {"x": x, "positions": positions, "cos": cos, "sin": sin}
        compare(lambda **t: torch_rotary(**t, **attributes), "RotaryEmbedding", feeds, ("y",), attributes,
                tolerance=1e-5, symbolic=(False,), domain="com.microsoft", opset=16)  # fmt: skip
        matches_its_kernel("RotaryEmbedding", feeds, ("y",), attributes)
