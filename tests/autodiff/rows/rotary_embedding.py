"""Rows of onnxgrad_cli/autodiff/rules/rotary_embedding.py."""

import numpy as np

from tests.harness import Case, const

POSITIONS = const([[0, 3, 3, 1], [4, 0, 2, 3]])


def rotary(x, cache, positions, **attributes):
    return Case("RotaryEmbedding", [x, cache, cache, positions], attributes, opset=23, executor="reference")


ROWS = [
    rotary((2, 3, 4, 6), (2, 4, 3), None),
    rotary((2, 3, 4, 6), (2, 4, 3), None, interleaved=1),
    rotary((2, 3, 4, 6), (2, 4, 2), None, rotary_embedding_dim=4),
    rotary((2, 4, 12), (2, 4, 3), None, num_heads=2),
    rotary((2, 4, 12), (2, 4, 2), None, num_heads=2, rotary_embedding_dim=4, interleaved=1),
    rotary((2, 3, 4, 6), (5, 3), POSITIONS),
    rotary((2, 4, 12), (5, 2), POSITIONS, num_heads=2, rotary_embedding_dim=4),
    rotary((2, 4, 12), (5, 3), POSITIONS, num_heads=2, interleaved=1),
    rotary((1, 2, 1, 4), (3, 2), np.array([[2]])),
]
