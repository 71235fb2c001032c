"""Every form of the gradient of a convolution's weights against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch.nn.functional as F

from onnxgrad_cli.autodiff.rules import conv_weights
from onnxgrad_cli.execution.executor import Executor
from tests.autodiff.rules.test_conv import compare, padded
from tests.harness import Case, forward_model, with_gradient

FORMS = [
    ("convolution", 1, 2, 3), ("convolution", 2, 1, 3), ("channels", 1, 1, 3), ("channels", 2, 2, 3),
    ("pixels", 1, 1, 3), ("pixels", 1, 2, 3), ("shifts", 8, 1, 3), ("product", 1, 2, 1),
]  # fmt: skip
"""Form, group, stride, kernel."""


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("size", "outputs"), [(9, 8), (16, 8), (16, 16)])
@pytest.mark.parametrize(("form", "group", "stride", "kernel"), FORMS)
@pytest.mark.thinned(3)
def test_every_form_of_a_weights_gradient(monkeypatch, form, group, stride, kernel, size, outputs, symbolic):
    """Of few pixels, and of many with and without more channels than the input has."""
    monkeypatch.setattr(conv_weights, "weight_forms", lambda *known: ([form], form))
    rng, outputs = np.random.default_rng(0), 8 if form == "shifts" else outputs
    arrays = [rng.standard_normal(s) for s in ((2, 8, size, size + 2), (outputs, 8 // group, kernel, kernel))]
    begins, ends = ([0, 0], [0, 0]) if kernel == 1 else ([1, 0], [1, 2])

    def theirs(x, w):
        return F.conv2d(padded(x, begins, ends), w, stride=stride, groups=group)

    attrs = {"kernel_shape": [kernel] * 2, "group": group, "strides": [stride] * 2, "pads": [*begins, *ends]}
    compare(theirs, "Conv", arrays, attrs, symbolic=symbolic)


@pytest.mark.parametrize("channels", [1, 20])
def test_a_wide_kernel_is_not_read_column_by_column(channels):
    """As in filters of sound: a node or two a column made thousands of nodes."""
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(s) for s in ((2, channels, 1, 150), (3, channels, 1, 64))]
    attrs = {"kernel_shape": [1, 64], "strides": [1, 2]}
    compare(lambda x, w: F.conv2d(x, w, stride=(1, 2)), "Conv", arrays, attrs, symbolic=False)
    model = with_gradient(forward_model(Case("Conv", arrays, attrs), False), ["x1"], ["y0"], "g_")
    assert len(model.graph.node) < 40


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("form", ["shifts", "diagonals"])
@pytest.mark.thinned(4)
def test_the_depthwise_weights_of_a_small_image(monkeypatch, form, seed):
    """Kernels, dilations and pads beyond the image among them: taps read beyond several rows."""
    monkeypatch.setattr(conv_weights, "weight_forms", lambda *known: ([form], form))
    rng = np.random.default_rng(seed)
    kernel, dilations = rng.integers(1, 5, 2), rng.integers(1, 4, 2)
    begins, ends = rng.integers(0, 6, (2, 2))
    strides = [1, 1] if form == "shifts" else rng.integers(1, 4, 2).tolist()
    sizes = np.maximum(rng.integers(1, 9, 2), (kernel - 1) * dilations + 1 - begins - ends)
    arrays = [rng.standard_normal((2, 3, *sizes)), rng.standard_normal((3, 1, *kernel))]
    settings = {"group": 3, "dilations": dilations.tolist(), "strides": strides}

    def theirs(x, w):
        image = padded(x, begins.tolist(), ends.tolist())
        return F.conv2d(image, w, groups=3, stride=strides, dilation=dilations.tolist())

    compare(theirs, "Conv", arrays, {**settings, "pads": [*begins.tolist(), *ends.tolist()]}, symbolic=False)


@pytest.mark.parametrize(
    ("op", "x", "w", "attrs"),
    [
        ("Conv", (2, 16, 5, 5), (4, 16, 3, 3), {}),
        ("Conv", (2, 16, 5), (4, 16, 3), {"pads": [1, 1]}),
        ("Conv", (2, 16, 5, 5), (4, 16, 1, 1), {"strides": [2, 2]}),
        ("Conv", (2, 1024, 2, 2), (512, 1024, 1, 1), {}),
        ("Conv", (2, 2, 5, 5), (4, 2, 2, 2), {"strides": [2, 2]}),
        ("Conv", (2, 32, 5, 5), (4, 16, 3, 3), {"group": 2}),
        ("Conv", (2, 4, 6, 6), (4, 1, 2, 2), {"group": 4, "strides": [2, 2]}),
        ("Conv", (2, 4, 6, 6), (4, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("ConvTranspose", (2, 16, 5, 5), (16, 4, 2, 2), {"strides": [2, 2]}),
    ],
)
def test_the_weight_of_an_empty_batch_has_a_gradient_of_zeros(op, x, w, attrs):
    """As in the heads of a detector that has found nothing; onnxruntime's result may be whatever is in memory, or none
    ever come."""
    arrays = [np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in (x, w)]
    model = forward_model(Case(op, arrays, attrs), symbolic=False)
    for value in (*model.graph.input[:1], *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    backward = with_gradient(model, ["x0", "x1"], ["y0"], "g_")
    y = Executor(model)({"x0": arrays[0], "x1": arrays[1]})["y0"]
    guarded = any(node.op_type == "Equal" for node in backward.graph.node)
    depthwise = attrs.get("group", 1) > 1 and w[1] < 16
    assert guarded == depthwise, "a convolution of no channels gives numbers from memory, now and then, or never ends"
    run = Executor(backward, fallback=False)
    for count in (0, 2, 0):
        found = run({"x0": arrays[0][:count], "x1": arrays[1], "g_y0": y[:count]})
        assert found["g_grad_x0"].shape == (count, *x[1:])
        assert bool(found["g_grad_x1"].any()) == bool(count)
