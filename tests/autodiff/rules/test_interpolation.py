"""Sampling against PyTorch's autograd in float64: its own grid_sample and affine_grid, kinks included, and loops.

The loops are written from the operator pages, one element at a time; PyTorch differentiates them. All run on
onnxruntime's kernels, at sizes where scattered sums and threads come into play.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from tests.autodiff.rules.test_conv import compare
from tests.facts import raises
from tests.harness import Case, const, forward_model, with_gradient

PADDINGS = ("zeros", "border", "reflection")


def check(function, op, inputs, attrs, opset=22, symbolic=False, threads=1, tolerance=1e-12):
    """Value and gradients in float64 on onnxruntime against those of `function`, which takes the float inputs."""
    model = forward_model(Case(op, inputs, attrs, opset=opset), symbolic)
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if isinstance(x, np.ndarray)}
    y = Executor(model, threads=threads, fallback=False)(feeds)["y0"]
    g = np.random.default_rng(0).standard_normal(y.shape)
    wanted = [name for name, x in feeds.items() if x.dtype.kind == "f"]
    backward = Executor(with_gradient(model, wanted, ["y0"], "g_"), threads=threads, fallback=False)
    ours = backward({**feeds, "g_y0": g})
    tensors = [torch.tensor(feeds[name], requires_grad=True) for name in wanted]
    theirs = function(*tensors)
    np.testing.assert_allclose(y, theirs.detach(), atol=1e-12 * max(1.0, np.abs(y).max()))
    theirs.backward(torch.tensor(g))
    for name, tensor in zip(wanted, tensors, strict=True):
        error = np.abs(ours[f"g_grad_{name}"] - tensor.grad.numpy()).max()
        assert error <= tolerance * max(1.0, float(tensor.grad.abs().max())), f"{op} {attrs} {name}: {error}"


def positions(rng, sizes, shape, align_corners, kinks):
    """Normalized positions; with `kinks` at elements and at the ends, where powers of two make that exact."""
    if not kinks:
        return rng.uniform(-2.5, 2.5, (*shape, len(sizes)))
    columns = []
    for size in reversed(sizes):
        places = rng.integers(-size, 2 * size + 1, shape).astype(float)
        columns.append(places * 2 / (size - 1) - 1 if align_corners else (places * 2 + 1) / size - 1)
    return np.stack(columns, -1)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("kinks", [False, True])
@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.thinned(18, 5)
def test_grid_sample(mode, padding, align_corners, kinks, symbolic):
    rng = np.random.default_rng(0)
    for spatial in ((4, 8), (16, 32)) if mode == "cubic" else ((4, 8), (16, 32), (2, 4, 8), (8, 4, 8)):
        sizes = [n + align_corners for n in spatial]
        x = rng.standard_normal((2, 3, *sizes))
        grid = positions(rng, sizes, (2, *(5,) * len(sizes)), align_corners, kinks)
        attrs = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
        theirs = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)

        def function(x, grid, theirs=theirs):
            return F.grid_sample(x, grid, theirs, padding, bool(align_corners))

        def nowhere(x, grid, function=function):
            return function(x, grid) + 0 * grid.sum()

        check(nowhere if mode == "nearest" else function, "GridSample", [x, grid], attrs, symbolic=symbolic)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_grid_sample_of_opset_16(mode):
    rng = np.random.default_rng(0)
    x, grid = rng.standard_normal((2, 3, 9, 7)), rng.uniform(-0.9, 0.9, (2, 4, 5, 2))
    compare(lambda x, grid: F.grid_sample(x, grid, mode, align_corners=True), "GridSample", [x, grid],
            {"mode": mode, "align_corners": 1}, opset=16)  # fmt: skip


def test_grid_sample_adds_up_with_threads():
    """Thousands of samples of few elements, several times: no update is lost."""
    rng = np.random.default_rng(0)
    x, grid = rng.standard_normal((1, 16, 12, 12)), rng.uniform(-0.3, 0.3, (1, 64, 64, 2))
    for _ in range(5):
        check(lambda x, grid: F.grid_sample(x, grid, align_corners=False), "GridSample", [x, grid], {}, threads=2)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("size", [[3, 2, 4, 5], [2, 1, 2, 3, 4]])
def test_affine_grid(size, align_corners, symbolic):
    n = len(size) - 2
    theta = np.random.default_rng(0).standard_normal((size[0], n, n + 1))
    check(lambda theta: F.affine_grid(theta, size, bool(align_corners)), "AffineGrid", [theta, const(size)],
          {"align_corners": align_corners}, symbolic=symbolic)  # fmt: skip


# -- loops ----------------------------------------------------------------------------------------------------------


def read(image, at):
    """The N-linear value of `image`, [C, *sizes], at a position; 0 outside."""
    total = torch.zeros(image.shape[0], dtype=torch.float64)
    first = [math.floor(p.item() if isinstance(p, torch.Tensor) else p) for p in at]
    for step in product((0, 1), repeat=len(at)):
        place = [f + s for f, s in zip(first, step, strict=True)]
        if all(0 <= p < n for p, n in zip(place, image.shape[1:], strict=True)):
            weight = math.prod(p - f if s else 1 - (p - f) for p, f, s in zip(at, first, step, strict=True))
            total = total + weight * image[(slice(None), *place)]
    return total


def deform_conv(x, w, offset, bias, mask, kernel, strides, dilations, pads, group, offset_group):
    n, per, channels = len(kernel), w.shape[0] // group, x.shape[1]
    images = []
    for image in range(x.shape[0]):
        outputs = []
        for out in product(*map(range, offset.shape[2:])):
            column = []
            for t, tap in enumerate(product(*map(range, kernel))):
                parts = []
                for part in range(offset_group):
                    first = (part * math.prod(kernel) + t) * n
                    at = [
                        o * s + k * d - p + offset[(image, first + i, *out)]
                        for i, (o, s, k, d, p) in enumerate(zip(out, strides, tap, dilations, pads[:n], strict=True))
                    ]
                    share = channels // offset_group
                    value = read(x[image, part * share : (part + 1) * share], at)
                    scale = 1.0 if mask is None else mask[(image, part * math.prod(kernel) + t, *out)]
                    parts.append(value * scale)
                column.append(torch.cat(parts))
            columns = torch.stack(column, -1).reshape(group, -1)
            weights = w.reshape(group, per, -1)
            outputs.append(torch.einsum("gk,gmk->gm", columns, weights).reshape(-1) + (0 if bias is None else bias))
        images.append(torch.stack(outputs, -1).reshape(-1, *offset.shape[2:]))
    return torch.stack(images)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "masked, biased, moved", [(True, True, True), (False, False, True), (True, False, False), (False, True, False)]
)
@pytest.mark.parametrize("group, offset_group", [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.thinned(16, 4)
def test_deform_conv(group, offset_group, masked, biased, moved, symbolic):
    """Without moves every position is at an element, a kink."""
    rng = np.random.default_rng(0)
    kernel, strides, dilations, pads = (3, 2), (2, 1), (1, 2), (1, 0, 2, 1)
    x, w = rng.standard_normal((2, 4, 7, 5)), rng.standard_normal((4, 4 // group, *kernel))
    reach = [n + pads[i] + pads[2 + i] - (kernel[i] - 1) * dilations[i] - 1 for i, n in enumerate(x.shape[2:])]
    out = [n // stride + 1 for n, stride in zip(reach, strides, strict=True)]
    taps = offset_group * math.prod(kernel)
    offset = rng.standard_normal((2, taps * 2, *out)) * (1.5 if moved else 0.0)
    bias = rng.standard_normal(4) if biased else None
    mask = rng.uniform(0, 1, (2, taps, *out)) if masked else None
    attrs = {"group": group, "offset_group": offset_group, "strides": strides, "dilations": dilations, "pads": pads}

    def function(x, w, offset, *rest):
        rest = list(rest)
        b, m = rest.pop(0) if biased else None, rest.pop(0) if masked else None
        return deform_conv(x, w, offset, b, m, kernel, strides, dilations, pads, group, offset_group)

    inputs = [x, w, offset, *([bias, mask] if masked else [bias] if biased else [])]
    check(
        function, "DeformConv", inputs, {**attrs, "kernel_shape": kernel}, symbolic=symbolic, opset=19 if moved else 22
    )


def roi_align(x, boxes, images, mode, out, ratio, scale, half_pixel):
    height, width = x.shape[2:]
    result = []
    for box, image in zip(boxes * scale - (0.5 if half_pixel else 0.0), images, strict=True):
        sides = [box[3] - box[1], box[2] - box[0]]
        sides = sides if half_pixel else [max(side, 1.0) for side in sides]
        bins = [side / n for side, n in zip(sides, out, strict=True)]
        counts = [ratio if ratio > 0 else math.ceil(b) for b in bins]
        for i, j in product(*map(range, out)):
            found = []
            for k, m in product(*map(range, counts)):
                at = [
                    first + o * b + (s + 0.5) * b / n
                    for first, o, b, s, n in zip((box[1], box[0]), (i, j), bins, (k, m), counts, strict=True)
                ]
                inside = -1 <= at[0] <= height and -1 <= at[1] <= width
                at = [min(max(p, 0.0), n - 1.0) for p, n in zip(at, (height, width), strict=True)]
                if mode == "avg":
                    found.append(read(x[image], at) if inside else torch.zeros(x.shape[1], dtype=torch.float64))
                else:
                    found.extend(corners(x[image], at) if inside else torch.zeros(4, x.shape[1], dtype=torch.float64))
            if not found:
                found = [torch.zeros(x.shape[1], dtype=torch.float64)]
            stack = torch.stack(found)
            result.append(stack.mean(0) if mode == "avg" else stack.max(0).values)
    return torch.stack(result).reshape(len(boxes), *out, -1).permute(0, 3, 1, 2)


def corners(image, at):
    """The four elements around a position, each times its weight."""
    low = [min(math.floor(p), n - 1) for p, n in zip(at, image.shape[1:], strict=True)]
    high = [min(p + 1, n - 1) for p, n in zip(low, image.shape[1:], strict=True)]
    weights = [(1 - (p - f), p - f) for p, f in zip(at, low, strict=True)]
    for i, j in product((0, 1), (0, 1)):
        yield weights[0][i] * weights[1][j] * image[:, (low, high)[i][0], (low, high)[j][1]]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("half_pixel", [True, False])
@pytest.mark.parametrize("ratio", [0, 2, 3])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.thinned(9, 3)
def test_roi_align(mode, ratio, half_pixel, symbolic):
    rng = np.random.default_rng(0)
    x, images = rng.standard_normal((3, 4, 13, 11)), rng.integers(0, 3, 12)
    corner, size = rng.uniform(-3, 9, (12, 2)), rng.uniform(0.1, 9, (12, 2))
    boxes, scale = np.concatenate([corner, corner + size], 1) * 2, 0.5
    boxes[0] = [0, 0, 24, 28]
    attrs = {"mode": mode, "sampling_ratio": ratio, "output_height": 3, "output_width": 2, "spatial_scale": scale}
    attrs["coordinate_transformation_mode"] = "half_pixel" if half_pixel else "output_half_pixel"
    check(
        lambda x: roi_align(x, boxes, images, mode, (3, 2), ratio, scale, half_pixel),
        "RoiAlign", [x, const(boxes, np.float64), const(images)], attrs, opset=16, symbolic=symbolic, threads=2,
    )  # fmt: skip


def max_roi_pool(x, boxes, out, scale):
    result = []
    for image, *bounds in boxes:
        left, top, right, bottom = (int(math.copysign(math.floor(abs(b * scale) + 0.5), b)) for b in bounds)
        tall, wide = max(bottom - top + 1, 1) / out[0], max(right - left + 1, 1) / out[1]
        for i, j in product(*map(range, out)):
            rows = range(max(math.floor(i * tall) + top, 0), min(math.ceil((i + 1) * tall) + top, x.shape[2]))
            columns = range(max(math.floor(j * wide) + left, 0), min(math.ceil((j + 1) * wide) + left, x.shape[3]))
            held = [x[int(image), :, r, c] for r in rows for c in columns]
            held = torch.stack(held or [torch.zeros(x.shape[1])])
            first = held.argmax(0, keepdim=True)
            result.append(held.gather(0, first)[0])
    return torch.stack(result).reshape(len(boxes), *out, -1).permute(0, 3, 1, 2)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("ties", [False, True])
def test_max_roi_pool(ties, scale, symbolic):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (2, 3, 14, 12)).astype(float) if ties else rng.standard_normal((2, 3, 14, 12))
    corner, size = rng.integers(-4, 12, (20, 2)), rng.integers(-1, 12, (20, 2))
    boxes = np.concatenate([rng.integers(0, 2, (20, 1)), np.concatenate([corner, corner + size], 1) / scale], 1)
    boxes[:, 1:] += rng.choice([0, 2.0], (20, 4)) if scale < 1 else 0
    compare(lambda x: max_roi_pool(x, boxes, (3, 2), scale), "MaxRoiPool", [x, const(boxes, np.float32)],
            {"pooled_shape": [3, 2], "spatial_scale": scale}, symbolic=symbolic)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        Case("RoiAlign", [(1, 1, 4, 4), (2, 4), const([0, 0])], {}),
        Case("MaxRoiPool", [(1, 1, 4, 4), (2, 5)], {"pooled_shape": [2, 2]}),
    ],
    ids=lambda case: case.op,
)
def test_boxes_are_refused(case):
    with raises(UnsupportedError, "refused", "node", case.op):
        with_gradient(forward_model(case, False), ["x1"], ["y0"], "g_")


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_no_boxes(mode, ratio):
    """A detector that found nothing: the gradient is zero, not an error."""
    x, attrs = np.ones((1, 2, 4, 4)), {"mode": mode, "sampling_ratio": ratio, "output_height": 2, "output_width": 2}
    model = forward_model(Case("RoiAlign", [x, np.zeros((0, 4)), np.zeros(0, np.int64)], attrs, opset=16), True)
    run = Executor(with_gradient(model, ["x0"], ["y0"], "g_"), fallback=False)
    feeds = {"x0": x, "x1": np.zeros((0, 4)), "x2": np.zeros(0, np.int64), "g_y0": np.zeros((0, 2, 2, 2))}
    assert not run(feeds)["g_grad_x0"].any()
