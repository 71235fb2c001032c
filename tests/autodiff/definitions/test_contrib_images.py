"""Operators of com.microsoft on images and windows beside onnxruntime's kernels and central differences."""

import numpy as np
import pytest

from onnxgrad_cli.execution.executor import Executor
from tests.autodiff.definitions.test_contrib import FLOATS, case, check, narrowed, normal, values_are_the_kernels

BOXES = np.array(
    [[0.11, 0.23, 0.72, 0.9], [-0.21, 0.04, 1.3, 1.13], [0.91, 0.15, 0.33, 0.36], [0.22, 0.21, 0.22, 0.63]]
)
"""A box inside, one that reaches beyond the image, one upside down, and one without height."""


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("size", [(3, 4), (1, 2), (5, 1)])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.thinned(4)
def test_crop_and_resize(mode, size, constant, symbolic):
    feeds = {
        "x": normal(2, 3, 6, 5), "boxes": BOXES, "batch": np.array([0, 1, 1, 0], np.int32),
        "size": np.array(size, np.int32),
    }  # fmt: skip
    attributes = {"mode": mode} | ({"extrapolation_value": -1.5} if constant else {})
    check("CropAndResize", feeds, ("y",), attributes, symbolic=symbolic, constants=("size",) if constant else (),
          floats=FLOATS[:1])  # fmt: skip


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.thinned(4)
def test_grid_sample(align, mode, padding):
    feeds = {"x": normal(2, 3, 4, 5), "grid": 0.8 * normal(2, 3, 4, 2)}
    attributes = {"align_corners": align, "padding_mode": padding, "mode": mode}
    check("GridSample", feeds, ("y",), attributes, floats=FLOATS[:1])


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 2, 1]])
@pytest.mark.parametrize("form", ["plain", "strided"])
def test_conv_transpose_with_dynamic_pads(form, pads, constant):
    strided = form == "strided"
    feeds = {
        "x": normal(2, 4, 4, 3), "w": normal(4, 3, 3, 2), "pads": np.array(pads),
        "b": normal(6) if strided else None,
    }  # fmt: skip
    attributes = {}
    if strided:
        attributes = {"strides": [2, 3], "output_padding": [1, 0], "group": 2, "dilations": [1, 2]}
    check("ConvTransposeWithDynamicPads", feeds, ("y",), attributes, floats=FLOATS[:1],
          constants=("pads",) if constant else ())  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("sizes", "attributes"),
    [((7,), {"kernel_shape": [3]}), ((7,), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
     ((5, 6), {"kernel_shape": [2, 3], "strides": [1, 2], "pads": [1, 0, 1, 2]}),
     ((4, 4, 5), {"kernel_shape": [2, 2, 2], "strides": [2, 1, 2]})],
)  # fmt: skip
@pytest.mark.thinned(3)
def test_maxpool_with_mask(sizes, attributes, symbolic):
    given = {"floats": FLOATS[:1], "symbolic": symbolic, "fixed": ("mask",)}
    masks = [np.random.default_rng(seed).integers(0, 5, (1, 1, *sizes)).astype(np.int32) for seed in range(40)]
    seen = 0
    for mask in masks:
        feeds = {"x": normal(2, 3, *sizes), "mask": mask}
        model, fed = case("MaxpoolWithMask", narrowed(feeds, np.float32), ("y",), attributes, {})
        if Executor(model, fallback=False)(fed)["y"].min() > -1e30:  # no difference can be had of an empty window
            check("MaxpoolWithMask", feeds, ("y",), attributes, **given)
            seen += 1
        elif seen == 0:
            values_are_the_kernels("MaxpoolWithMask", feeds, ("y",), attributes, **given)
        if seen == 2:
            break
    assert seen


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("dim", "size", "step"), [(-1, 2, 1), (0, 3, 2), (1, 4, 4), (2, 1, 3)])
def test_unfold_tensor(dim, size, step, symbolic):
    attributes = {"dim": dim, "size": size} | ({"step": step} if step != 1 else {})
    check("UnfoldTensor", {"x": normal(7, 6, 5)}, ("y",), attributes, symbolic=symbolic, floats=FLOATS[:1])
