"""Convolutions as products and averages as sums, in float64, against PyTorch."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from onnxgrad_cli import run_build
from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.executor import Executor
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
        products = kernel[:2] != (group, 1) or set(kernel[2:]) == {1}
        assert ("onnx.reference" in run.name) != products


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.thinned(3)
def test_averages_over_windows_are_sums(spatial: int, dilation: int) -> None:
    """onnxruntime's float32 kernel says what they are; windows that hang over run on the reference, in no time."""
    x, sizes = np.random.default_rng(0).normal(size=(2, 3, 9, 10, 11)[: spatial + 2]), [2, 3, 2][:spatial]
    for stride, pads, counted, ceil in itertools.product((1, 2, 3), ((0, 0), (0, 1), (1, 1)), (0, 1), (0, 1)):
        node = helper.make_node(
            "AveragePool", ["x"], ["y"], kernel_shape=sizes, strides=[stride] * spatial, dilations=[dilation] * spatial,
            pads=[pads[0]] * spatial + [pads[1]] * spatial, count_include_pad=counted, ceil_mode=ceil,
        )  # fmt: skip
        model = model_of(node, x)
        expected = Executor(model, fallback=False)({"x": x.astype(np.float32)})["y"]
        run = DoubleExecutor(model)
        np.testing.assert_allclose(run({"x": x})["y"], expected, rtol=1e-4, atol=1e-6)
        assert ("onnx.reference" in run.name) == bool(ceil)


def test_no_python_code_is_in_the_proof_of_a_network_with_averages(tmp_path: Path) -> None:
    """Inception was proved in minutes, as onnx's reference visits each window of an AveragePool."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[batch, 2, 6, 6] x) => (float[batch, 2, 2, 2] y) <float[2, 2, 3, 3] w = {WEIGHTS}> {
      c = Conv<pads = [1, 1, 1, 1]>(x, w) t = Tanh(c)
      a = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(t)
      y = AveragePool<kernel_shape = [3, 3], strides = [3, 3]>(a)
    }"""
    weights = ", ".join(f"{x:.3f}" for x in np.random.default_rng(0).normal(size=36))
    report = run_build(onnx.parser.parse_model(text.replace("WEIGHTS", weights)), tmp_path / "out.onnx")
    assert report.proof is not None and report.proof.verdict == "proved"
    assert report.proof.executor == f"onnxruntime {onnxruntime.__version__} in float64"
