"""Convolutions against PyTorch in float64: random geometries, and real sizes with two threads."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from tests.facts import raises
from tests.harness import Case, Const, const, forward_model, with_gradient

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def gradients(op, arrays, attrs, symbolic=False, threads=1, opset=18, outputs=1, seed=0, target="standard"):
    """Forward value, cotangent and gradients of a node, in float32 on onnxruntime."""
    inputs = [a if a is None or isinstance(a, Const) else np.asarray(a, np.float32) for a in arrays]
    case = Case(op, inputs, attrs, opset=opset, outputs=outputs)
    model = forward_model(case, symbolic)
    feeds = {f"x{i}": a for i, a in enumerate(inputs) if isinstance(a, np.ndarray)}
    y = Executor(model, threads=threads, fallback=False)(feeds)["y0"]
    g = np.random.default_rng(seed).standard_normal(y.shape).astype(np.float32)
    backward = with_gradient(model, list(feeds), ["y0"], "g_", Options(target=target))
    result = Executor(backward, threads=threads, fallback=False)({**feeds, "g_y0": g})
    return y, g, [result[f"g_grad_{name}"] for name in feeds]


def compare(function, op, arrays, attrs, **how):
    """The node's value and gradients against those of `function`, PyTorch in float64."""
    y, g, ours = gradients(op, arrays, attrs, **how)
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays if isinstance(a, np.ndarray)]
    theirs = function(*tensors)
    np.testing.assert_allclose(y, theirs.detach(), atol=2e-5 * float(theirs.detach().abs().max()))
    theirs.backward(torch.tensor(g, dtype=torch.float64))
    for mine, tensor in zip(ours, tensors, strict=True):
        want = tensor.grad.numpy()
        error = np.max(np.abs(mine - want)) / max(float(np.max(np.abs(want))), 1e-30)
        assert error < 2e-5, f"{op} {attrs}: {error}"


def padded(x, begins, ends, value=0.0):
    """`x` with its spatial axes padded, as PyTorch's F.pad orders them."""
    return F.pad(x, [p for pair in zip(begins[::-1], ends[::-1], strict=True) for p in pair], value=value)


def geometry(rng, dims, padding=True):
    kernel = rng.integers(1, 4, dims)
    strides, dilations = rng.integers(1, 4, dims), rng.integers(1, 3, dims)
    begins, ends = (rng.integers(0, 3, dims) if padding else np.zeros(dims, int) for _ in range(2))
    extra = rng.integers(0, 5, dims)
    sizes = np.maximum((kernel - 1) * dilations + 1 - begins - ends, 1) + extra
    return [v.tolist() for v in (kernel, strides, dilations, begins, ends, sizes)]


def same_pads(sizes, kernel, strides, dilations, upper):
    total = [
        max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    small, large = [t // 2 for t in total], [t - t // 2 for t in total]
    return (small, large) if upper else (large, small)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.thinned(4, 4)
def test_conv(seed, symbolic):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    kernel, strides, dilations, begins, ends, sizes = geometry(rng, dims)
    group = int(rng.integers(1, 4))
    inner, outer = int(rng.choice([1, 2, 16])), int(rng.integers(1, 4))
    auto = str(rng.choice(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto.startswith("SAME"):  # onnxruntime has no kernel for SAME with dilations
        dilations = [1] * dims
    attrs = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": group}
    if seed % 2 and not auto.startswith("SAME"):  # the kernel's size is the weight's, symbolic too
        del attrs["kernel_shape"]
    if auto == "NOTSET":
        attrs["pads"] = begins + ends
    else:
        attrs["auto_pad"] = auto
        sizes = [max(n, (k - 1) * d + 1) for n, k, d in zip(sizes, kernel, dilations, strict=True)]
        begins, ends = same_pads(sizes, kernel, strides, dilations, auto == "SAME_UPPER")
        if auto == "VALID":
            begins = ends = [0] * dims
    arrays = [
        rng.standard_normal((2, group * inner, *sizes)),
        rng.standard_normal((group * outer, inner, *kernel)),
        rng.standard_normal(group * outer),
    ]

    def torch_conv(x, w, b):
        return CONV[dims](padded(x, begins, ends), w, b, strides, 0, dilations, group)

    compare(torch_conv, "Conv", arrays, attrs, symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.thinned(4)
def test_conv_transpose(seed, symbolic):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    kernel, strides, dilations, _, _, _ = geometry(rng, dims)
    kind = str(rng.choice(["pads", "pads", "output_shape", "SAME_UPPER", "SAME_LOWER"]))
    if kind.startswith("SAME"):  # else refused, see test_refusals
        strides = [min(s, (k - 1) * d + 1) for s, k, d in zip(strides, kernel, dilations, strict=True)]
    sizes = rng.integers(1, 5, dims).tolist()
    extra = [int(rng.integers(0, s)) for s in strides]
    full = [(n - 1) * s + (k - 1) * d + 1 + e
            for n, s, k, d, e in zip(sizes, strides, kernel, dilations, extra, strict=True)]  # fmt: skip
    group = int(rng.integers(1, 4))
    attrs = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": group}
    if seed % 2 and not kind.startswith("SAME"):
        del attrs["kernel_shape"]
    if kind == "pads":
        begins = [int(rng.integers(0, (f + 1) // 2)) for f in full]
        ends = [int(rng.integers(0, (f + 1) // 2)) for f in full]
        attrs |= {"pads": begins + ends, "output_padding": extra}
        out = [f - b - e for f, b, e in zip(full, begins, ends, strict=True)]
    else:
        out = [n * s for n, s in zip(sizes, strides, strict=True)]
        full = [f - e for f, e in zip(full, extra, strict=True)]
        if kind == "output_shape":
            out = [int(rng.integers(min(n, f), f + s)) for n, f, s in zip(sizes, full, strides, strict=True)]
            attrs["output_shape"] = out
        else:
            attrs["auto_pad"] = kind
        total = [max(f - n, 0) for f, n in zip(full, out, strict=True)]
        begins = [t // 2 if kind == "SAME_UPPER" else t - t // 2 for t in total]
    inner, outer = int(rng.integers(1, 4)), int(rng.choice([1, 2, 16]))
    arrays = [
        rng.standard_normal((2, group * inner, *sizes)),
        rng.standard_normal((group * inner, outer, *kernel)),
        rng.standard_normal(group * outer),
    ]

    def torch_transpose(x, w, b):
        y = TRANSPOSE[dims](x, w, None, strides, 0, 0, group, dilations)
        y = padded(y, [0] * dims, [max(c + n - m, 0) for c, n, m in zip(begins, out, y.shape[2:], strict=True)])
        return y[(..., *(slice(c, c + n) for c, n in zip(begins, out, strict=True)))] + b.reshape(-1, *[1] * dims)

    compare(torch_transpose, "ConvTranspose", arrays, attrs, symbolic=symbolic)


def only_window(x, kernel, dilations, value=0.0):
    """The elements [N, C, elements] of a window that begins where an image does, `value` where it hangs over."""
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    over = [max(extent - size, 0) for extent, size in zip(extents, x.shape[2:], strict=True)]
    taps = (slice(0, extent, d) for extent, d in zip(extents, dilations, strict=True))
    return padded(x, [0] * len(over), over, value)[(..., *taps)].flatten(2)


@pytest.mark.parametrize("target", ["standard", "portable"])
@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
@pytest.mark.parametrize(("sizes", "kernel", "strides", "pads", "dilations"), [
    ((1, 2), [3, 2], [3, 2], [0, 0], [1, 1]), ((2,), [5], [4], [1], [1]), ((3, 3), [2, 2], [3, 3], [0, 0], [3, 2]),
    ((2, 1, 2), [5, 1, 3], [4, 1, 3], [1, 0, 0], [1, 1, 1]),
])  # fmt: skip
@pytest.mark.parametrize(("ceil", "symbolic"), [(0, True), (1, True), (1, False)])
@pytest.mark.thinned(4)
def test_a_window_longer_than_the_image(op, sizes, kernel, strides, pads, dilations, target, ceil, symbolic):
    """Sizes known at run time may be so small; of what there is, onnxruntime makes a window that PyTorch refuses."""
    attrs = {"kernel_shape": kernel, "strides": strides, "pads": pads * 2, "dilations": dilations, "ceil_mode": ceil}

    def torch_pool(x, include=0.0):
        edge = -torch.inf if op == "MaxPool" else 0.0
        y = only_window(padded(x, pads, pads, edge), kernel, dilations, edge)
        if op == "AveragePool":
            y = y.sum(2) / only_window(padded(torch.ones_like(x), pads, pads, include), kernel, dilations).sum(2)
        else:
            y = y.amax(2) if op == "MaxPool" else y.norm(2, dim=2)
        return y.reshape(*y.shape, *[1] * len(sizes))

    x = np.random.default_rng(0).permutation(6 * int(np.prod(sizes))).reshape(2, 3, *sizes) + 1.0
    compare(torch_pool, op, [x], attrs, symbolic=symbolic, opset=22, target=target)
    if op == "AveragePool":
        attrs["count_include_pad"] = 1
        compare(lambda x: torch_pool(x, 1.0), op, [x], attrs, symbolic=symbolic, opset=22, target=target)


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_kernel_of_many_taps_is_turned_round_without_a_matrix(symbolic):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 2, 1300)), rng.standard_normal((3, 2, 600))
    compare(
        lambda x, w: torch.nn.functional.conv1d(x, w, stride=7), "Conv", [x, w], {"strides": [7]}, symbolic=symbolic
    )


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "pad", "dilation"), [
    ((3, 3), (1, 1), (1, 1), (1, 1)), ((2, 3), (2, 1), (0, 2), (2, 1)), ((2, 2), (3, 3), (0, 0), (1, 2)),
])  # fmt: skip
def test_col2im(kernel, stride, pad, dilation, symbolic):
    image, rng = (9, 8), np.random.default_rng(0)
    how = {"kernel_size": kernel, "stride": stride, "padding": pad, "dilation": dilation}
    columns = F.unfold(torch.zeros(2, 3, *image), **how).shape
    attrs = {"strides": list(stride), "pads": [*pad, *pad], "dilations": list(dilation)}
    arrays = [rng.standard_normal(columns), const(image), const(kernel)]
    compare(lambda x: F.fold(x, image, **how), "Col2Im", arrays, attrs, symbolic=symbolic)


REAL = [
    ("stem", (4, 3, 112, 112), (32, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
    ("3x3", (4, 64, 56, 56), (64, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("3x3 strided", (4, 64, 56, 56), (64, 64, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("1x1", (4, 64, 56, 56), (128, 64, 1, 1), {}),
    ("1x1 strided", (4, 64, 56, 56), (128, 64, 1, 1), {"strides": [2, 2]}),
    ("1x1 small", (3, 512, 7, 7), (1024, 512, 1, 1), {}),
    ("1x1 small strided", (3, 512, 7, 7), (1024, 512, 1, 1), {"strides": [2, 2]}),
    ("3x3 small", (4, 128, 14, 14), (128, 128, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("depthwise", (4, 64, 56, 56), (64, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 64}),
    (
        "depthwise strided",
        (4, 64, 56, 56),
        (64, 1, 3, 3),
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 64},
    ),
    ("grouped", (4, 64, 28, 28), (64, 16, 3, 3), {"pads": [1, 1, 1, 1], "group": 4}),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("name", "image", "weight", "attrs"), REAL, ids=[r[0] for r in REAL])
@pytest.mark.thinned(4, 4)
def test_conv_at_real_size(name, image, weight, attrs, symbolic):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(image), rng.standard_normal(weight) / np.prod(weight[1:]) ** 0.5]
    pads, strides = attrs.get("pads", [0] * 4)[:2], attrs.get("strides", [1, 1])

    def torch_conv(x, w):
        return F.conv2d(x, w, None, strides, pads, 1, attrs.get("group", 1))

    compare(torch_conv, "Conv", arrays, {**attrs, "kernel_shape": list(weight[2:])}, symbolic=symbolic, threads=2)


def test_transposed_conv_at_real_size():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((4, 64, 28, 28)), rng.standard_normal((64, 32, 4, 4)) / 32]
    attrs = {"kernel_shape": [4, 4], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    compare(lambda x, w: F.conv_transpose2d(x, w, None, 2, 1), "ConvTranspose", arrays, attrs, threads=2)


@pytest.mark.parametrize(
    ("case", "symbolic", "reason"),
    [
        (Case("MaxPool", [(1, 1, 6)], {"kernel_shape": [2], "strides": [3], "ceil_mode": 1, "pads": [0, 1]}), False,
         ("ceil_mode", "22")),
        (Case("AveragePool", [(1, 1, 6)], {"kernel_shape": [2], "strides": [3], "ceil_mode": 1, "pads": [0, 1]}),
         False, ("ceil_mode", "22")),
        (Case("LpPool", [(1, 1, 6)], {"kernel_shape": [2], "strides": [3], "ceil_mode": 1, "pads": [0, 1]}), False,
         ("ceil_mode", "22")),
        *((Case(op, [(1, 1, 6, 2)], {"kernel_shape": [1, 5], "strides": [1, 4], "pads": [0, 1, 0, 1]}), False,
           ()) for op in ("AveragePool", "LpPool", "MaxPool")),
        (Case("LpPool", [(1, 2, 4)], {"kernel_shape": [3], "dilations": [2], "ceil_mode": 1, "p": 3}, opset=22), False,
         ()),
        (Case("ConvTranspose", [(1, 1, 4), (1, 1, 2)], {"strides": [3], "auto_pad": "SAME_UPPER"}), False,
         ("SAME_UPPER",)),
        *((Case(op, [(1, 1, 6)], {"kernel_shape": [k], "strides": [s], "dilations": [d], "auto_pad": "SAME_UPPER"},
                opset=22), late, ("auto_pad",))
          for op in ("AveragePool", "LpPool", "MaxPool") for k, s, d in ((1, 3, 1), (2, 1, 2))
          for late in (False, True)),
        (Case("ConvTranspose", [(1, 1, 4), (1, 1, 3)],
              {"strides": [2], "output_padding": [1], "auto_pad": "SAME_UPPER"}), False,
         ("SAME_UPPER", "output_padding")),
        (Case("Conv", [(1, 1, 4), (1, 1, 2)], {"auto_pad": "SAME_UPPER"}), True, ("s1_2",)),
        (Case("MaxUnpool", [(1, 1, 2), const([[[0, 2]]]), const([1, 1, 5])], {"kernel_shape": [2], "strides": [2]}),
         False, ("output_shape",)),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(case, symbolic, reason):
    with raises(UnsupportedError, "refused", "node", case.op, *reason):
        with_gradient(forward_model(case, symbolic), ["x0"], ["y0"], "g_")


@pytest.mark.parametrize(
    ("settings", "weight", "size", "scaled"),
    [
        ({"padding": 1}, (6, 4, 3, 3), 10, "weight"),
        ({"stride": 2}, (6, 4, 3, 3), 20, "weight"),
        ({"groups": 4}, (4, 1, 3, 3), 12, "weight"),
        ({"groups": 2}, (6, 2, 1, 1), 9, "weight"),
        ({"padding": 2}, (6, 4, 5, 5), 10, "cotangent"),
    ],
)
def test_a_small_weight_is_scaled_in_place_of_a_large_cotangent(settings, weight, size, scaled):
    """The adjoint of a normalization with the statistics of the batch ends with a factor for each channel."""
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.standard_normal(weight),
        "b": rng.standard_normal(weight[0]),
        "s": rng.standard_normal(weight[0]),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    still = {"t": np.zeros(weight[0]), "mean": np.zeros(weight[0]), "var": np.ones(weight[0])}
    stored = {**arrays, **{name: array.astype(np.float32) for name, array in still.items()}}
    attrs = {"kernel_shape": list(weight[2:]), "group": settings.get("groups", 1),
             "strides": [settings.get("stride", 1)] * 2, "pads": [settings.get("padding", 0)] * 4}  # fmt: skip
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"], **attrs),
             helper.make_node("BatchNormalization", ["c", "s", "t", "mean", "var"], ["y"])]  # fmt: skip
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4, size, size])
    values = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", [given], [onnx.ValueInfoProto(name="y")], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    built = build(model, Options(losses=(LossSpec("mse"),), mode="train", grad_of_input=("x",)))
    x, leaves = torch.randn(3, 4, size, size, requires_grad=True), {n: torch.tensor(a) for n, a in arrays.items()}
    w, b, s = (leaf.requires_grad_() for leaf in leaves.values())
    y = F.batch_norm(F.conv2d(x, w, b, **settings), None, None, s, training=True)
    label = torch.randn_like(y)
    F.mse_loss(y, label).backward()
    found = Executor(built.model, fallback=False)({"x": x.detach().numpy(), "label": label.numpy()})
    for name, leaf in {"x": x, **leaves}.items():
        theirs = leaf.grad.numpy()
        np.testing.assert_allclose(found[f"{name}_grad"], theirs, atol=1e-5 + 1e-5 * np.abs(theirs).max(), err_msg=name)
    products = [node for node in built.graph.nodes if node.op_type == "Mul" and node.name.startswith("grad/")]
    shapes = [sorted(str(shape_of(built.graph.types[name])) for name in node.input) for node in products]
    vector, image = str((1, weight[0], 1, 1)), str(shape_of(built.graph.types["c"]))
    assert ("cotangent" if sorted([vector, image]) in shapes else "weight") == scaled


def test_pads_of_billions_make_no_constants():
    """What each window reads would be 17 GB; such a model is built in no time, and what runs it says what it lacks."""
    attrs = {"pads": [0, 0, 2**31 - 1, 0], "strides": [2, 2]}
    with limited_memory(GB):
        model = forward_model(Case("Conv", [(1, 3, 8, 8), (4, 3, 3, 3)], attrs), symbolic=False)
        backward = with_gradient(model, ["x0", "x1"], ["y0"], "g_")
    assert backward.ByteSize() < 10**5
