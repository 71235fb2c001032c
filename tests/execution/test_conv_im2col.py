"""Convolutions as products, in float64, against PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from onnx import helper

from onnxgrad_cli.execution.double import DoubleExecutor
from tests.execution.test_double import model_of

SHAPES = [
    ((2, 4, 9), (6, 4, 3), 1),
    ((2, 4, 9, 7), (6, 2, 3, 2), 2),
    ((1, 4, 6, 5, 7), (8, 1, 2, 3, 1), 4),
    ((1, 4, 6, 5), (4, 1, 2, 3), 4),
    ((2, 4, 5, 6), (6, 2, 1, 1), 2),
    ((2, 4, 5, 6), (4, 1, 1, 1), 4),
    ((2, 4, 3, 60), (6, 2, 1, 18), 2),
    ((2, 2, 60), (3, 2, 18), 1),
    ((1, 2, 40, 3), (3, 2, 18, 1), 1),
    ((1, 1, 400), (3, 1, 130), 1),
]


STRIDES, DILATIONS, PADS = (1, 2, 3), (1, 2), ((0, 0), (1, 2))


@pytest.mark.parametrize(("image", "kernel", "group"), SHAPES)
@pytest.mark.thinned(3)
def test_convolutions_are_products(image: tuple[int, ...], kernel: tuple[int, ...], group: int) -> None:
    rng, spatial = np.random.default_rng(0), len(image) - 2
    x, w, b = rng.normal(size=image), rng.normal(size=kernel).astype(np.float32), rng.normal(size=kernel[0])
    b = b.astype(np.float32)
    for stride, dilation, pads, biased in itertools.product(STRIDES, DILATIONS, PADS, (True, False)):
        node = helper.make_node(
            "Conv", ["x", "w", "b"][: 2 + biased], ["y"], group=group, strides=[stride] * spatial,
            dilations=[dilation] * spatial, pads=[pads[0]] * spatial + [pads[1]] * spatial,
        )  # fmt: skip
        run = DoubleExecutor(model_of(node, x, w, b))
        wide = np.pad(x, [(0, 0), (0, 0), *[pads] * spatial])
        function = getattr(torch.nn.functional, f"conv{spatial}d")
        tensors = [torch.tensor(each, dtype=torch.float64) for each in (wide, w, b)]
        expected = function(*tensors[: 2 + biased], stride=stride, dilation=dilation, groups=group).numpy()
        np.testing.assert_allclose(run({"x": x})["y"], expected, rtol=1e-12, atol=1e-12)
        assert ("onnx.reference" in run.name) == (kernel[:2] == (group, 1) or kernel[2:] == (130,))
