"""Pools against PyTorch in float64: random geometries, and real sizes with two threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from onnxgrad_cli.cli import run
from tests.autodiff.rules.test_conv import compare, geometry, padded, same_pads
from tests.harness import const

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.thinned(4)
def test_max_pool(seed, symbolic):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    kernel, strides, dilations, begins, ends, sizes = geometry(rng, dims)
    begins, ends = ([min(p, k // 2) for p, k in zip(v, kernel, strict=True)] for v in (begins, ends))
    sizes = [n + 4 for n in sizes]
    ceil = bool(rng.integers(0, 2)) and begins == ends
    attrs = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": begins + ends}

    def torch_pool(x):
        if ceil:
            return MAX[dims](x, kernel, strides, begins, dilations, True)
        return MAX[dims](padded(x, begins, ends, -torch.inf), kernel, strides, 0, dilations)

    x = rng.integers(0, 6, (2, 3, *sizes)).astype(float)  # with ties
    compare(torch_pool, "MaxPool", [x], {**attrs, "ceil_mode": int(ceil)}, symbolic=symbolic, opset=22)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.thinned(4)
def test_average_pool(seed, symbolic):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    kernel, strides, _, begins, _, sizes = geometry(rng, dims)
    begins = [min(p, k // 2) for p, k in zip(begins, kernel, strict=True)]
    sizes = [n + 3 for n in sizes]
    ceil, include = (bool(v) for v in rng.integers(0, 2, 2))
    attrs = {"kernel_shape": kernel, "strides": strides, "pads": begins * 2}
    attrs |= {"ceil_mode": int(ceil), "count_include_pad": int(include)}

    def torch_pool(x):
        return AVERAGE[dims](x, kernel, strides, begins, ceil, include)

    compare(torch_pool, "AveragePool", [rng.standard_normal((2, 3, *sizes))], attrs, symbolic=symbolic, opset=22)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("ceil", [0, 1])
def test_average_pool_same(ceil, include, upper, symbolic):
    kernel, strides, sizes = [3, 4], [2, 3], [6, 7]
    begins, ends = same_pads(sizes, kernel, strides, [1, 1], upper)
    attrs = {"kernel_shape": kernel, "strides": strides, "count_include_pad": include, "ceil_mode": ceil}
    attrs["auto_pad"] = "SAME_UPPER" if upper else "SAME_LOWER"

    def torch_pool(x):
        counts = F.avg_pool2d(padded(torch.ones_like(x), begins, ends), kernel, strides)
        return F.avg_pool2d(padded(x, begins, ends), kernel, strides) / (1 if include else counts)

    x = np.random.default_rng(0).standard_normal((2, 3, *sizes))
    compare(torch_pool, "AveragePool", [x], attrs, symbolic=symbolic, opset=22)


@pytest.mark.parametrize("shape", [(2, 3, 7), (2, 3, 4, 5), (2, 3, 2, 3, 4)])
def test_global_pools(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    axes = tuple(range(2, len(shape)))
    compare(lambda x: x.mean(axes, keepdim=True), "GlobalAveragePool", [x], {})
    compare(lambda x: x.flatten(2).max(2)[0].reshape(*x.shape[:2], *[1] * len(axes)), "GlobalMaxPool", [x], {})


@pytest.mark.parametrize("shape", [(2, 3, 7), (2, 3, 4, 5), (2, 3, 2, 3, 4)])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_global_lp_pool(p, shape):
    x = np.random.default_rng(0).standard_normal(shape)

    def torch_pool(x):
        return x.flatten(2).norm(p, dim=2).reshape(*x.shape[:2], *[1] * (x.ndim - 2))

    for symbolic in (False, True):
        compare(torch_pool, "GlobalLpPool", [x], {"p": p}, symbolic=symbolic)


@pytest.mark.parametrize(("size", "kernel", "pads"), [(1, 2, [0, 0]), (3, 4, [0, 0]), (1, 3, [1, 0]), (5, 4, [1, 1])])
def test_an_average_with_its_pads_is_by_the_whole_kernel_before_opset_19(size, kernel, pads):
    """Also in an image shorter than it; opset 19 counts what there is."""
    x = np.arange(1.0, 1 + 2 * size).reshape(1, 2, size)
    attrs = {"kernel_shape": [kernel], "strides": [kernel], "pads": pads, "count_include_pad": 1}

    def torch_pool(x):
        return padded(x, pads[:1], [kernel])[..., :kernel].mean(2, keepdim=True)

    for opset in (13, 18):
        compare(torch_pool, "AveragePool", [x], attrs, symbolic=True, opset=opset)


@pytest.mark.parametrize("target", ["standard", "portable"])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("sizes", "dilations"), [([2], [3]), ([1], [2]), ([3], [4]), ([4, 2], [1, 3])])
def test_a_window_of_pads_alone_hands_its_cotangent_to_none(sizes, dilations, symbolic, target):
    """Its taps may lie before the image and behind it; a runtime's maximum of nothing is the lowest number."""
    kernel = [2] * len(sizes)
    attrs = {"kernel_shape": kernel, "dilations": dilations, "pads": [1] * (2 * len(sizes))}
    x = np.random.default_rng(0).permutation(2 * int(np.prod(sizes))).reshape(1, 2, *sizes) + 1.0
    lowest = float(np.finfo(np.float32).min)

    def torch_pool(x):
        for axis, dilation in enumerate(dilations, 2):
            x = padded(x, *([int(i == axis) for i in range(2, x.ndim)],) * 2, lowest)
            count = x.shape[axis] - dilation
            x = torch.maximum(x.narrow(axis, 0, count), x.narrow(axis, dilation, count))
        return x

    compare(torch_pool, "MaxPool", [x], attrs, symbolic=symbolic, opset=22, target=target)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.thinned(4)
def test_lp_pool(seed, symbolic):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    kernel, strides, dilations, begins, ends, sizes = geometry(rng, dims)
    begins, ends = ([min(p, k // 2) for p, k in zip(v, kernel, strict=True)] for v in (begins, ends))
    sizes, ceil, p = [n + 3 for n in sizes], bool(rng.integers(0, 2)), int(rng.integers(1, 4))
    attrs = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": begins + ends}

    def torch_pool(x):
        """The p-norm of every window, zeros around the image; where it hangs over, that many more."""
        x = padded(x.abs() ** p, begins, ends)
        for axis, (k, s, d, size, begin) in enumerate(zip(kernel, strides, dilations, sizes, begins, strict=True), 2):
            room = x.shape[axis] - (k - 1) * d - 1
            outputs = -(-room // s) + 1 if ceil else room // s + 1
            outputs -= (outputs - 1) * s >= size + begin
            more = max((outputs - 1) * s + (k - 1) * d + 1 - x.shape[axis], 0)
            zeros = [0] * dims
            x = padded(x, zeros, [more if i == axis - 2 else 0 for i in range(dims)])
            x = sum(x.narrow(axis, tap * d, (outputs - 1) * s + 1).index_select(
                axis, torch.arange(outputs) * s) for tap in range(k))  # fmt: skip
        return x ** (1 / p)

    x = rng.uniform(0.2, 1.5, (2, 3, *sizes)) * rng.choice([-1, 1], (2, 3, *sizes))
    compare(torch_pool, "LpPool", [x], {**attrs, "p": p, "ceil_mode": int(ceil)}, symbolic=symbolic, opset=22)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 3), (2, 3)])
def test_max_unpool(kernel, stride, symbolic):
    """Indices count through the whole tensor, PyTorch's through each plane."""
    image = torch.tensor(np.random.default_rng(0).standard_normal((2, 3, 7, 8)))
    x, indices = F.max_pool2d(image, kernel, stride, return_indices=True)
    planes, rows, columns = torch.arange(6).reshape(2, 3, 1, 1), *((n - 1) * stride + kernel for n in x.shape[2:])
    indices = indices // 8 * columns + indices % 8
    arrays = [x.numpy(), const(indices + planes * rows * columns)]
    attrs = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2}
    compare(lambda x: F.max_unpool2d(x, indices, kernel, stride), "MaxUnpool", arrays, attrs, symbolic=symbolic)


@pytest.mark.parametrize(("kernel", "stride", "pad"), [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
@pytest.mark.thinned(3)
def test_max_pool_at_real_size(kernel, stride, pad):
    x = np.random.default_rng(0).integers(0, 1000, (8, 64, 56, 56)).astype(float)
    attrs = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    for _ in range(3):
        compare(lambda x: F.max_pool2d(x, kernel, stride, pad), "MaxPool", [x], attrs, threads=2)


def derived(folder: Path, text: str, kind: str = "vjp") -> onnxruntime.InferenceSession:
    """A session of the model that the command derives, which it proves too."""
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    made = folder / "made.onnx"
    assert run(["derive", str(folder / "model.onnx"), "--kind", kind, "-o", str(made)]) == 0
    return onnxruntime.InferenceSession(made)


@pytest.mark.parametrize("size", [4, 5])
def test_maxima_in_float64_of_windows_that_do_not_overlap(size: int, tmp_path: Path) -> None:
    text = f"""
    <ir_version: 10, opset_import: ["" : 22]>
    g (double[N, 2, {size}, {size}] x) => (double[N, 2, 2, 2] y)
    {{ y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }}
    """
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((3, 2, size, size)), rng.standard_normal((3, 2, 2, 2))
    (got,) = derived(tmp_path, text).run(None, {"x": x, "y_grad": g})
    leaf = torch.tensor(x, requires_grad=True)
    F.max_pool2d(leaf, 2).backward(torch.tensor(g))
    np.testing.assert_array_equal(got, leaf.grad.numpy())
