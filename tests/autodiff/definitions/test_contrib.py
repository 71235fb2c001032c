"""Operators of com.microsoft: what they are replaced by computes what stock onnxruntime's own kernel does.

The kernel runs in float32 and float16, what replaces it on onnx.reference, which fuses nothing; the gradients are
measured in float64.
"""

import contextlib
import itertools
import re

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema, get_all_opkernel_def
from torch import nn

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.registry import Signature, all_definitions
from onnxgrad_cli.autodiff.rule_call import node_attributes
from onnxgrad_cli.builder import build
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.session import attribute_defaults
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.harness import fed, with_gradient
from tests.nodes import compare, one_node, written_out

FLOATS = (np.float32, np.float16)
TOLERANCE = {np.float32: 2e-5, np.float16: 1e-2}
FLOATING = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
DOMAIN = "com.microsoft"
SINCE_1_32 = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32),
    reason="onnxruntime has had the kernel since 1.32",
)


def normal(*shape, low=None):
    values = np.random.default_rng([3, *shape]).standard_normal(shape)
    return values if low is None else np.abs(values) + low


def narrowed(feeds, dtype):
    return {n: x.astype(dtype) if x is not None and x.dtype == np.float64 else x for n, x in feeds.items()}


def case(op, feeds, outputs, attributes, types, *, domain=DOMAIN, symbolic=False, opset=18, constants=(), fixed=()):
    """A model of one node, some of whose inputs may be constants or of fixed size, and what it is fed."""
    model, given = one_node(op, feeds, outputs, attributes, domain=domain, symbolic=symbolic, opset=opset)
    for name in constants:
        if feeds[name] is not None:
            model.graph.initializer.append(numpy_helper.from_array(given[name], name))
    kept = [value for value in model.graph.input if value.name not in constants]
    for value in kept:
        if value.name in fixed:
            value.type.CopyFrom(
                helper.make_tensor_type_proto(value.type.tensor_type.elem_type, given[value.name].shape)
            )
    del model.graph.input[:]
    model.graph.input.extend(kept)
    first = next(value.type.tensor_type.elem_type for value in kept if value.type.tensor_type.elem_type in FLOATING)
    for value in model.graph.output:
        value.type.tensor_type.elem_type = types.get(value.name, first)
    return model, fed(model, given)


def check(op, feeds, outputs, attributes=None, *, floats=FLOATS, types=(), wide=(), single=(), **keywords):
    """Compare values with the kernel's and gradients with differences.

    Args:
        types: output -> its type, if that is not x's.
        wide: outputs of `types` that are float64 nevertheless where x is.
        single: inputs that stay float32 there.
    """
    attributes, types = attributes or {}, dict(types)
    values_are_the_kernels(op, feeds, outputs, attributes, floats=floats, types=types, **keywords)
    types = {name: kind for name, kind in types.items() if name not in wide}
    feeds = {n: x.astype(np.float32) if n in single else x for n, x in feeds.items()}
    model, given = case(op, feeds, outputs, attributes, types, **keywords)
    gradient_is_right(written_out(model), given, [name for name in outputs if name and name not in types])


def values_are_the_kernels(op, feeds, outputs, attributes, *, floats=FLOATS, types=None, **keywords):
    types = types or {}
    for dtype in floats:
        model, given = case(op, narrowed(feeds, dtype), outputs, attributes, types, **keywords)
        expected = Executor(model, fallback=False)(given)
        ours = written_out(model)
        assert not any(node.domain or not onnx.defs.has(node.op_type) for node in ours.graph.node)
        for name, y in Executor(ours, "reference")(given).items():
            assert (y.shape, y.dtype) == (expected[name].shape, expected[name].dtype), name
            np.testing.assert_allclose(y, expected[name], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=name)
        Executor(ours, fallback=False)(given)


def gradient_is_right(model, feeds, seeded):
    """The gradient in float64 of all float inputs through the outputs `seeded`."""
    wanted = [name for name, x in feeds.items() if x.dtype == np.float64]
    forward, rng = Executor(model), np.random.default_rng(5)
    seeds = {name: rng.standard_normal(y.shape) for name, y in forward(feeds).items() if name in seeded}
    backward = Executor(with_gradient(model, wanted, list(seeds), "g_"))
    found = backward({**feeds, **{f"g_{name}": seed for name, seed in seeds.items()}})
    gradients = {name: found[f"g_grad_{name}"] for name in wanted}

    def function(point):
        values = forward(point)
        return float(sum(np.sum(values[name] * seed) for name, seed in seeds.items()))

    for name, gradient in gradients.items():
        assert gradient.shape == feeds[name].shape
    assert directional(function, feeds, gradients, rng, 1e-6, 1e-3).error < 1e-6


# -- products --------------------------------------------------------------------------------------------------------


SIZES = {
    (0, 0): {"a": (2, 5, 3, 4), "b": (2, 5, 4, 6)},
    (1, 0): {"a": (3, 2, 5, 4), "b": (2, 5, 4, 6)},
    (0, 1): {"a": (2, 5, 3, 4), "b": (4, 2, 5, 6)},
    (1, 1): {"a": (3, 2, 5, 4), "b": (4, 2, 5, 6)},
}
"""By transBatchA and transBatchB: the shapes of A and B where neither is transposed otherwise."""


def swapped(shape, batch):
    """The shape that gives the same matrices with rows and columns exchanged."""
    return (shape[-1], *shape[1:-1], shape[0]) if batch else (*shape[:-2], shape[-1], shape[-2])


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("swap", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.thinned(4)
def test_fused_matmul(swap, batch, symbolic):
    shapes = [swapped(s, b) if t else s for s, t, b in zip(SIZES[batch].values(), swap, batch, strict=True)]
    names = ("transA", "transB", "transBatchA", "transBatchB")
    attributes = dict(zip(names, (*swap, *batch), strict=True)) | ({"alpha": -0.3} if swap != batch else {})
    check("FusedMatMul", {"a": normal(*shapes[0]), "b": normal(*shapes[1])}, ("y",), attributes, symbolic=symbolic)
    if not any(batch):
        del attributes["transBatchA"], attributes["transBatchB"]
        check("TransposeMatMul", {"a": normal(*shapes[0]), "b": normal(*shapes[1])}, ("y",), attributes)


@pytest.mark.parametrize(
    ("a", "b", "swap"),
    [((3, 4), (4, 6), (0, 0)), ((4, 3), (6, 4), (1, 1)), ((2, 3, 4), (4, 6), (0, 0)), ((2, 4, 3), (4, 6), (1, 0)),
     ((3, 4), (2, 6, 4), (0, 1)), ((4,), (4, 6), (1, 0)), ((4,), (6, 4), (0, 1)), ((3, 4), (4,), (0, 1)),
     ((4,), (4,), (1, 1)), ((5, 2, 3, 4), (2, 4, 6), (0, 0))],
)  # fmt: skip
def test_fused_matmul_of_other_ranks(a, b, swap):
    if swap == (1, 1) and len(b) == 1:
        swap = (0, 1)
    attributes = {"alpha": 2.5, "transA": swap[0], "transB": swap[1]}
    check("FusedMatMul", {"a": normal(*a), "b": normal(*b)}, ("y",), attributes)


@pytest.mark.parametrize("swap", [(0, 0), (1, 1)])
@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", {}), ("LeakyRelu", {"alpha": 0.2}), ("Tanh", {}), ("Sigmoid", {}), ("Softplus", {}), ("Softsign", {}),
     ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}), ("Elu", {"alpha": 0.7}),
     ("Selu", {"alpha": 1.5, "gamma": 1.1}), ("ThresholdedRelu", {"alpha": 0.3})],
)  # fmt: skip
def test_fused_gemm(activation, parameters, swap):
    attributes = {"activation": activation, "transA": swap[0], "transB": swap[1]}
    attributes |= {f"activation_{name}": value for name, value in parameters.items()}
    attributes |= {"alpha": 0.8, "beta": -0.4} if swap[0] else {}
    feeds = {
        "a": normal(4, 3) if swap[0] else normal(3, 4), "b": normal(5, 4) if swap[1] else normal(4, 5),
        "c": None if activation == "Tanh" and not swap[0] else normal(5),
    }  # fmt: skip
    check("FusedGemm", feeds, ("y",), attributes)


ACTIVATIONS = [
    ("Relu", []), ("LeakyRelu", [0.2]), ("Tanh", []), ("Sigmoid", []), ("HardSigmoid", [0.3, 0.4]), ("Clip", [-0.2, 1]),
    ("HardSwish", []),
]  # fmt: skip


@pytest.mark.parametrize("z", [False, True])
@pytest.mark.parametrize(("activation", "parameters"), ACTIVATIONS)
def test_fused_conv(activation, parameters, z):
    attributes = {"activation": activation, "strides": [2, 1], "pads": [1, 0, 0, 1], "group": 2}
    attributes |= {"activation_params": [float(p) for p in parameters]} if parameters else {}
    attributes |= {"kernel_shape": [3, 2], "dilations": [1, 2]} if z else {}
    feeds = {"x": normal(2, 4, 7, 6), "w": normal(6, 2, 3, 2), "b": normal(6), "z": None}
    if z:
        feeds["z"] = normal(2, 6, 3, 5)
    elif activation == "Tanh":
        feeds["b"] = None
    check("FusedConv", feeds, ("y",), attributes)


def test_fused_conv_auto_pad():
    feeds = {"x": normal(1, 2, 5, 5), "w": normal(3, 2, 3, 3)}
    check("FusedConv", feeds, ("y",), {"activation": "Relu", "auto_pad": "SAME_UPPER", "strides": [2, 2]})


def packed(values, bits):
    """Integers of a few bits along the last axis as bytes, the first in the low bits; filled up with zeros."""
    per = 8 // bits
    values = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % per)])
    parts = values.reshape(*values.shape[:-1], -1, per)
    return sum(parts[..., i].astype(np.uint32) << (bits * i) for i in range(per)).astype(np.uint8)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("size", "block"), [(64, 32), (40, 16), (48, 16), (300, 128)])
@pytest.mark.thinned(6, 4)
def test_matmul_n_bits(size, block, bits, zeros, flat, symbolic):
    rng, count = np.random.default_rng(bits), -(-size // block)
    steps, offsets = (rng.integers(0, 2**bits, (5, count, n)) for n in (block, 1))
    feeds = {
        "a": normal(2, 3, size), "b": packed(steps, bits), "s": rng.uniform(0.01, 0.1, (5, count)).astype(np.float64),
        "z": packed(offsets[..., 0], bits) if zeros else None,
        "g": None, "bias": normal(5) if flat else None,
    }  # fmt: skip
    if flat:
        feeds |= {"s": feeds["s"].reshape(-1), "z": feeds["z"].reshape(-1) if zeros else None}
    attributes = {"K": size, "N": 5, "bits": bits, "block_size": block, "accuracy_level": 0 if zeros else 1}
    floats = FLOATS if bits != 2 else FLOATS[:1]
    check("MatMulNBits", feeds, ("y",), attributes, constants=("b", "s", "z"), floats=floats, symbolic=symbolic,
          single=("s",), fixed=("bias",))  # fmt: skip


@pytest.mark.parametrize("bits", [2, 4])  # there is no kernel for 8
def test_matmul_n_bits_with_zeros_that_are_floats(bits):
    rng = np.random.default_rng(bits)
    feeds = {
        "a": normal(2, 3, 64), "b": packed(rng.integers(0, 2**bits, (5, 2, 32)), bits),
        "s": rng.uniform(0.01, 0.1, (5, 2)), "z": rng.uniform(0, 2**bits, (5, 2)),
    }  # fmt: skip
    attributes = {"K": 64, "N": 5, "bits": bits, "block_size": 32}
    check("MatMulNBits", feeds, ("y",), attributes, constants=("b", "s", "z"), floats=FLOATS[:1])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("rows", "size", "block"), [(5, 32, 16), (3, 16, 32), (3, 15, 16), (2, 40, 16)])
def test_matmul_bnb4(rows, size, block, kind):
    rng = np.random.default_rng([kind, size])
    count = rows * size
    feeds = {
        "a": normal(2, 3, size), "b": rng.integers(0, 256, (count + 1) // 2).astype(np.uint8),
        "s": rng.uniform(0.5, 2, -(-count // block)),
    }  # fmt: skip
    attributes = {"K": size, "N": rows, "block_size": block, "quant_type": kind}
    check("MatMulBnb4", feeds, ("y",), attributes, constants=("b", "s"), floats=FLOATS[:1])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(32, 1), (64, 3), (40, 2)])
def test_matmul_fp_q4(rows, columns, kind):
    rng, blocks = np.random.default_rng([kind, rows]), columns * -(-rows // 32)
    scales = (rng.standard_normal(blocks) * 10.0 ** rng.integers(-3, 3, blocks)).astype("<f4")
    parts = [scales[:, None].view(np.uint8), rng.integers(0, 16, (blocks, kind)), rng.integers(0, 256, (blocks, 16))]
    feeds = {
        "a": normal(2, 3, rows), "b": np.concatenate(parts, axis=1).astype(np.uint8).ravel(),
        "shape": np.array([rows, columns]),
    }  # fmt: skip
    attributes = {"blk_quant_type": 0} if kind == 0 else {}
    values_are_the_kernels("MatMulFpQ4", feeds, ("y",), attributes, floats=FLOATS[:1], constants=("b", "shape"))
    feeds["a"] /= 100  # scales reach 1,000
    check("MatMulFpQ4", feeds, ("y",), attributes, floats=FLOATS[:1], constants=("b", "shape"))


@pytest.mark.parametrize("symbolic", [False, True])
def test_word_conv_embedding(symbolic):
    """Of words as long as they may be, shorter than a window, and with a zero between letters."""
    words = np.array([[1, 2, 3, 4, 5], [3, 1, 0, 0, 0], [5, 5, 2, 1, 0], [2, 0, 4, 3, 0]], np.int32)
    feeds = {"words": words, "w": normal(6, 1, 3, 4), "b": normal(6), "table": normal(7, 4)}
    check("WordConvEmbedding", feeds, ("y",), {"conv_window_size": 3}, floats=FLOATS[:1], symbolic=symbolic,
          fixed=("w", "b", "table"))  # fmt: skip


GATHERED = list(itertools.product([(), (3,), (2, 3)], (4, 8), (False, True)))
"""Of GatherBlockQuantized: the shape of the places, the bits, and whether there are zero points."""


def steps_and_offsets(bits):
    rng = np.random.default_rng(bits)
    return rng.integers(0, 2**bits, (7, 48)), rng.integers(0, 2**bits, (7, 3))


def gathered(places, bits, zeros):
    """The inputs and the attributes of a form of GatherBlockQuantized."""
    rng, (steps, offsets) = np.random.default_rng([bits, 1]), steps_and_offsets(bits)
    feeds = {
        "data": packed(steps, bits), "i": rng.integers(-7, 7, places), "s": rng.uniform(0.01, 0.1, (7, 3)),
        "z": packed(offsets, bits) if zeros else None,
    }  # fmt: skip
    return feeds, {"bits": bits, "block_size": 16, "gather_axis": 0, "quantize_axis": -1 if zeros else 1}


def models():
    """The forms of GatherBlockQuantized."""
    for form in GATHERED:
        feeds, attributes = gathered(*form)
        yield case("GatherBlockQuantized", narrowed(feeds, np.float32), ("y",), attributes, {}, opset=21)[0]


@pytest.mark.parametrize(("places", "bits", "zeros"), GATHERED)
def test_gradients_of_the_scales_of_what_is_gathered(places, bits, zeros):
    feeds, attributes = gathered(places, bits, zeros)
    steps, offsets = map(torch.tensor, steps_and_offsets(bits))
    centred = steps.reshape(7, 3, 16) - (offsets if zeros else torch.tensor(2 ** (bits - 1)))[..., None]

    def reference(i, s, **_):
        return ((centred * s[..., None])[i.long()].flatten(-2),)

    feeds = narrowed(feeds, np.float32)
    compare(reference, "GatherBlockQuantized", feeds, ("y",), attributes, 1e-5, (False,), domain=DOMAIN, opset=21)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("places", "bits", "zeros"), GATHERED)
def test_gather_block_quantized(places, bits, zeros, symbolic):
    """Beside the kernel."""
    feeds, attributes = gathered(places, bits, zeros)
    for dtype in FLOATS:
        given = narrowed(feeds, dtype)
        kind = TensorProto.FLOAT if dtype == np.float32 else TensorProto.FLOAT16
        model, given = one_node("GatherBlockQuantized", given, ("y",), attributes, domain=DOMAIN, symbolic=symbolic)
        for name in ("data", "s", "z"):
            if name in given:
                model.graph.initializer.append(numpy_helper.from_array(given[name], name))
        kept = [value for value in model.graph.input if value.name == "i"]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.graph.output[0].type.tensor_type.elem_type = kind
        expected = Executor(model, fallback=False)({"i": given["i"]})["y"]
        ours = written_out(model)
        assert not any(node.domain for node in ours.graph.node)
        y = Executor(ours, fallback=False)({"i": given["i"]})["y"]
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(y, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_matmul_n_bits_is_never_trained():
    graph, training = prepared_n_bits()
    assert training.trained == ["first"]
    assert training.not_trained["s"] == "quantization scale"
    assert not any(node.domain for node in graph.nodes)


def prepared_n_bits():
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    g (float[N, 16] x) => (float[N, 5] y) { h = MatMul(x, first)
        y = com.microsoft.MatMulNBits<K = 16, N = 5, bits = 4, block_size = 16>(h, b, s) }
    """)
    rng = np.random.default_rng(0)
    arrays = {"first": rng.standard_normal((16, 16)), "s": rng.uniform(size=5)}
    model.graph.initializer.extend(numpy_helper.from_array(x.astype(np.float32), n) for n, x in arrays.items())
    steps = rng.integers(0, 256, (5, 1, 8)).astype(np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(steps, "b"))
    graph, training = Graph(model), Training()
    prepare.prepare(graph, Options(), training)
    return graph, training


# -- activations and normalizations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("op", "bias", "attributes"),
    [("Gelu", False, {}), ("FastGelu", False, {}), ("FastGelu", True, {}), ("BiasGelu", True, {}),
     ("QuickGelu", False, {}), ("QuickGelu", False, {"alpha": 1.0}), ("QuickGelu", False, {"alpha": 0.4})],
)  # fmt: skip
def test_activations(op, bias, attributes, symbolic):
    feeds = {"x": 3 * normal(4, 3, 6)} | ({"b": normal(6)} if bias else {})
    check(op, feeds, ("y",), attributes, symbolic=symbolic)


@pytest.mark.parametrize("skip", [(2, 3, 8), (1, 3, 8), (3, 8)])
@pytest.mark.parametrize(("beta", "bias"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("outputs", [("y",), ("y", "", "", "s"), ("y", "m", "r", "s")])
@pytest.mark.thinned(4)
def test_skip_layer_normalization(outputs, beta, bias, skip):
    feeds = {
        "x": normal(2, 3, 8), "skip": normal(*skip), "gamma": normal(8, low=0.5), "beta": normal(8) if beta else None,
        "bias": normal(8) if bias else None,
    }  # fmt: skip
    attributes = {"epsilon": 1e-3} if bias else {}
    check("SkipLayerNormalization", feeds, outputs, attributes, types={"m": TensorProto.FLOAT, "r": TensorProto.FLOAT},
          floats=FLOATS[:1] if "m" in outputs else FLOATS, symbolic=beta)  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [("y",), ("y", "", "", "s"), ("y", "", "r", "s")])
def test_skip_simplified_layer_normalization(outputs, bias):
    feeds = {
        "x": normal(2, 3, 8), "skip": normal(2, 3, 8), "gamma": normal(8, low=0.5), "bias": normal(8) if bias else None,
    }  # fmt: skip
    check("SkipSimplifiedLayerNormalization", feeds, outputs, {"epsilon": 1e-3} if bias else {}, wide=("r",),
          types={"r": TensorProto.FLOAT}, floats=FLOATS[:1] if "r" in outputs else FLOATS, symbolic=bias)  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("axis", [-1, 0, 1, 2])
def test_simplified_layer_normalization(axis, symbolic):
    """It stands in the default domain, where the standard knows no such operator."""
    feeds = {"x": normal(2, 3, 8), "scale": normal(*(2, 3, 8)[axis:])}
    attributes = {"axis": axis, "stash_type": 1} | ({"epsilon": 0.1} if axis else {})
    check("SimplifiedLayerNormalization", feeds, ("y",), attributes, domain="", symbolic=symbolic)
    check("SimplifiedLayerNormalization", feeds, ("y", "r"), attributes, domain="", types={"r": TensorProto.FLOAT},
          wide=("r",), floats=FLOATS[:1])  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gated_rms_norm(activation, groups, symbolic):
    feeds = {"x": normal(2, 3, 8), "scale": normal(8 // groups, low=0.5), "gate": normal(2, 3, 8) + 1}
    attributes = {"activation": activation} | ({"epsilon": 0.1} if groups > 1 else {})
    check("GatedRMSNorm", feeds, ("y",), attributes, symbolic=symbolic, fixed=("scale",))


@pytest.mark.parametrize("symbolic", [False, True])
def test_gated_add(symbolic):
    check("GatedAdd", {"x": normal(2, 3, 8), "y0": 1 + normal(2, 3, 8), "gate": normal(2, 3, 1)}, ("y",),
          symbolic=symbolic, fixed=("gate",))  # fmt: skip


@pytest.mark.parametrize(
    ("op", "domain", "default"),
    [("SkipLayerNormalization", DOMAIN, 1e-12), ("SkipSimplifiedLayerNormalization", DOMAIN, 1e-12),
     ("SimplifiedLayerNormalization", "", 1e-5)],
)  # fmt: skip
def test_default_epsilon(op, domain, default):
    """Of values so small that it shows."""
    x = normal(2, 3, 8) * np.sqrt(default)
    feeds = {"x": x, "gamma": normal(8)} if not domain else {"x": x, "skip": x[::-1].copy(), "gamma": normal(8)}
    values_are_the_kernels(op, feeds, ("y",), {}, floats=FLOATS[:1], domain=domain)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("places", [None, (2, 3), (1, 3)])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.thinned(4)
def test_embed_layer_normalization(places, mask, segments, symbolic):
    """Its own mask is a count; a mask of other numbers than 1 hides too."""
    rng = np.random.default_rng(0)
    feeds = {
        "ids": np.array([[1, 2, 0], [3, 3, 4]], np.int32),
        "segments": np.array([[0, 1, 0], [1, 1, 0]], np.int32) if segments else None,
        "words": normal(5, 8), "positions": normal(6, 8), "segment": normal(2, 8) if segments else None,
        "gamma": normal(8, low=0.5), "beta": normal(8),
        "mask": np.array([[1, 1, 0], [2, 1, 1]], np.int32) if mask else None,
        "places": rng.integers(0, 6, places).astype(np.int32) if places else None,
    }  # fmt: skip
    outputs = ("y", "count", "sum") if segments else ("y", "count")
    check("EmbedLayerNormalization", feeds, outputs, {"epsilon": 1e-3} if mask else {},
          types={"count": TensorProto.INT32}, floats=FLOATS[:1], symbolic=symbolic,
          fixed=("words", "positions", "segment", "gamma", "beta"))  # fmt: skip


# -- forms that the standard has as well -----------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2, 0, 2])
def test_expand_dims(axis):
    check("ExpandDims", {"x": normal(2, 3), "axis": np.array([axis], np.int32)}, ("y",), constants=("axis",))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_gather_nd(dtype):
    check("GatherND", {"x": normal(2, 3, 4), "i": np.array([[[0, 1]], [[1, 2]]], dtype)}, ("y",))


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("value", [False, True])
def test_pad(mode, value):
    feeds = {"x": normal(3, 4), "pads": np.array([1, 2, 0, 1]), "value": normal(1) if value else None}
    floats = FLOATS if mode == "constant" else FLOATS[:1]
    check("Pad", feeds, ("y",), {"mode": mode}, constants=("pads",), floats=floats)


@pytest.mark.parametrize("upper", [0, 1])
def test_trilu(upper):
    check("Trilu", {"x": normal(2, 3, 4), "k": np.array(1)}, ("y",), {"upper": upper}, constants=("k",))


@pytest.mark.parametrize("delta", [False, True])
def test_range(delta):
    feeds = {"start": np.array([0.5]), "limit": np.array(3.2), "delta": np.array(0.7) if delta else None}
    check("Range", feeds, ("y",), floats=FLOATS[:1])


def test_unique():
    given = {"floats": FLOATS[:1], "types": {"places": TensorProto.INT64, "counts": TensorProto.INT64}}
    outputs = ("y", "places", "counts")
    values_are_the_kernels("Unique", {"x": np.array([0.5, -1.0, 0.5, 2.0, -1.0, 3.0])}, outputs, {}, **given)
    check("Unique", {"x": normal(6)}, outputs, **given)  # equal elements would not stay equal


def test_sample_op():
    check("SampleOp", {"x": normal(2, 3)}, ("y",), floats=FLOATS[:1])


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_cdist(metric):
    check("CDist", {"a": normal(3, 4), "b": normal(5, 4)}, ("y",), {"metric": metric}, floats=FLOATS[:1])


# -- refusals --------------------------------------------------------------------------------------------------------


def refusal(text, **arrays):
    """Why the gradient of the input x is refused, and what to do."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1, "com.microsoft.nchwc": 1]> {text}'
    )
    for name, x in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(x, name))
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    model = graph.commit()
    for value in model.graph.output:
        value.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", "M"]))
    with pytest.raises(UnsupportedError) as error:
        with_gradient(model, ["x"], ["y"], "g_")
    (first, *_) = error.value.refusals
    return f"{first.op_type}: {first.reason} | {first.hint}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = com.microsoft.nchwc.ReorderInput(x) y = com.microsoft.nchwc.ReorderOutput<channels = 2>(a)",
         "blocks of channels.*ORT_ENABLE_EXTENDED or lower"),
        ("y = com.microsoft.BiasAdd(x, x, x)", "BiasAdd.*no CPU kernel"),
        ("y = com.microsoft.NhwcConv(x, x)", "NhwcConv.*no CPU kernel"),
        ("y = com.microsoft.FusedGemm<activation = \"Cube\">(x, x)", "activation 'Cube' is not supported"),
        ("y = com.microsoft.FusedGemm<activation = \"Elu\">(x, x)", "Elu lacks a parameter"),
        ("a = Constant<value_ints = [0]>() v = Squeeze(z, a) y = com.microsoft.FusedMatMul<transA = 1>(x, v)",
         "does not transpose"),
        ("y = com.microsoft.MatMulNBits<K = 2, N = 2, block_size = 16>(x, z, z, , z)", "reordered or prepacked"),
        ("y = com.microsoft.MatMulNBits<K = 2, N = 2, block_size = 16, bits = 3>(x, z, z)", "3 bits"),
        ("y = com.microsoft.MatMulNBits<K = 2, N = 2, block_size = 0>(x, z, z)", "divides by an attribute or a size"),
        ("b = Cast<to = 2>(x) s = Cast<to = 7>(z) y = com.microsoft.MatMulFpQ4(x, b, s)", "are given by an input"),
        ("y = com.microsoft.MatMulBnb4<K = 2, N = 2, block_size = 16, quant_type = 1, transB = 0>(x, z, z)",
         "not transposed"),
        ("y = com.microsoft.MatMulBnb4<K = 2, N = 2, block_size = 16, quant_type = 2>(x, z, z)", "quant_type 2"),
        ("i = Cast<to = 7>(z) y = com.microsoft.GatherBlockQuantized(x, i, z)", "not a matrix of bytes"),
        ("b = Cast<to = 2>(x) i = Cast<to = 7>(z) y = com.microsoft.GatherBlockQuantized<gather_axis = 1>(b, i, x)",
         "it gathers along an axis other than rows"),
        ("b = Cast<to = 2>(x) i = Cast<to = 7>(z) y = com.microsoft.GatherBlockQuantized<block_size = 16>(b, i, x)",
         "extends over two rows"),
        ("y = com.microsoft.GatedAdd(x, x, x, z)", "projects its gate"),
        ("y = com.microsoft.GatedRMSNorm<activation = \"tanh\">(x, z, x)", "activation 'tanh' is not supported"),
        ("y = com.microsoft.CDist<metric = \"cosine\">(x, x)", "metric 'cosine' is not supported"),
        ("y = SimplifiedLayerNormalization<stash_type = 11>(x, z)", "a type other than float32"),
        ("y, mean, r, s = com.microsoft.SkipSimplifiedLayerNormalization(x, x, z) ", "not cover its output 'mean'"),
        ("y = com.microsoft.MultiHeadAttention(x, x, x)", "it has no attribute num_heads"),
        ("y = com.microsoft.GroupQueryAttention<num_heads = 1>(x)", "it has no attribute kv_num_heads"),
        ("y = com.microsoft.Unheard(x)", "there is no gradient rule for com.microsoft::Unheard"),
    ],
)  # fmt: skip
def test_refusals(text, why):
    outputs = "(y, mean)" if "mean" in text else "(y)"
    assert re.search(why, refusal(f"g (float[2, 2] x, float[1, 2] z) => {outputs} {{ {text} }}"))


@pytest.mark.parametrize("call", [
    "GroupQueryAttention<num_heads = 1, kv_num_heads = 1>(x, x, x, c, c, last, all)",
    "MultiHeadAttention<num_heads = 1>(x, x, x, , , , c, c)",
    "Attention<num_heads = 1>(x, w, , , both)",
])  # fmt: skip
def test_a_cache_of_other_heads_is_told(call):
    """Of these operators onnx infers nothing that would contradict the sizes which a user gives a model."""
    text = f"""g (float[1, 2, 4] x, float[4, 12] w, float[1, 1, 3, 8] c, float[2, 1, 1, 3, 8] both) => (y) {{
        last = Constant<value_ints = [4]>() all = Constant<value_int = 5>()
        last32 = Cast<to = 6>(last) all32 = Cast<to = 6>(all)
        y = com.microsoft.{call.replace("last", "last32").replace("all)", "all32)")} }}"""
    assert re.search(r"\[1, 1, 2, 4\].*\[1, 1, 3, 8\]", refusal(text))


def test_an_attribute_left_out_is_what_onnxruntime_takes_it_for():
    """Definitions state defaults of their own, for onnx knows none of these operators."""
    theirs = {}
    for schema in get_all_operator_schema():
        for name, attribute in schema.attributes.items():
            default = onnx.AttributeProto()
            with contextlib.suppress(DecodeError):  # a newline alone where there is none
                default.ParseFromString(attribute._default_value)
            if schema.domain == DOMAIN and default.type:
                theirs[schema.name, name] = helper.get_attribute_value(default)
    found = 0
    for each in all_definitions():
        for name, default in Signature.of_definition(each.function).attributes.items():
            if each.domain == DOMAIN and (each.op_type, name) in theirs:
                found += 1
                told = theirs[each.op_type, name]
                told = told.decode() if isinstance(told, bytes) else told
                assert default == (pytest.approx(told, 1e-6) if isinstance(told, float) else told), (each, name)
    assert found > 50


def schemas():
    """Yield the operators that onnxruntime adds to the standard, in their newest versions."""
    newest = {}
    for schema in get_all_operator_schema():
        key = schema.domain, schema.name
        if schema.domain in (DOMAIN, "ai.onnx.ml") and schema.since_version >= newest.get(key, schema).since_version:
            newest[key] = schema
    return list(newest.values())


def has_floats(parameters, schema):
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    kinds = {kind for each in parameters for kind in allowed.get(each.typeStr, [each.typeStr])}
    return not kinds.isdisjoint(f"tensor({kind})" for kind in ("float", "double", "float16", "bfloat16"))


def test_each_operator_of_floats_that_onnxruntime_has_is_known():
    """One that a new release adds wants a definition, or a refusal with a reason."""
    found = [schema for schema in schemas() if has_floats(schema.inputs, schema) and has_floats(schema.outputs, schema)]
    assert len(found) > 80
    unknown = {
        f"{schema.domain}::{schema.name}"
        for schema in found
        if registry.lookup(schema.name, schema.domain, schema.since_version) is None
        and registry.lookup_definition(schema.name, schema.domain, schema.since_version) is None
    }
    assert unknown == set()


def test_operators_refused_for_want_of_a_kernel_have_none():
    kernels = {
        kernel.op_name
        for kernel in get_all_opkernel_def()
        if (kernel.domain, kernel.provider) == (DOMAIN, "CPUExecutionProvider")
    }
    refused = {rule.op_type for rule in registry.all_rules() if "made for another processor" in rule.refusal}
    assert len(refused) > 40
    assert refused & kernels == set()


def test_attributes_at_the_defaults_of_onnxruntime_are_covered():
    """Also those that a definition does not know."""
    checked = 0
    for schema in schemas():
        definition = registry.lookup_definition(schema.name, schema.domain, schema.since_version)
        defaults = attribute_defaults(schema.name, schema.domain)
        if definition is None or not defaults:
            continue
        node = helper.make_node(schema.name, [], ["y"], domain=schema.domain, **defaults)
        op = Op(Graph(helper.make_model(helper.make_graph([], "g", [], []))))
        assert node_attributes(op, node, Signature.of_definition(definition.function))[1] is None, schema.name
        checked += len(defaults)
    assert checked > 80


# -- an optimized model ----------------------------------------------------------------------------------------------


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    """A transformer block with normalizations after the residuals and with projections of its own."""

    def __init__(self, gelu, size=16, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.gelu = gelu

    def forward(self, x):
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        p = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1)
        x = self.first(x + self.out((p @ v).transpose(1, 2).flatten(2)))
        return self.second(x + self.down(self.gelu(self.up(x))))


class Net(nn.Module):
    """A convolution, two blocks, and a head of three products with activations."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(5, 16, 3, padding=1)
        self.blocks = nn.Sequential(Block(nn.GELU()), Block(tanh_gelu))
        self.pool, self.gate, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.blocks(torch.relu(self.conv(x)).transpose(1, 2))
        x = torch.tanh(self.pool(x[:, 0]))
        gate = self.gate(x)
        return self.head(gate * torch.sigmoid(1.702 * gate))


FUSED = {"Gelu", "FastGelu", "FusedConv", "FusedGemm", "FusedMatMul", "QuickGelu", "SkipLayerNormalization"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.thinned(2)
def test_gradients_of_an_optimized_model(tmp_path, opset):
    """onnxruntime fuses half of the model away; its training model gives PyTorch's gradients all the same.

    In opset 14 it writes LayerNormalization, which the standard has had since 17.
    """
    torch.manual_seed(0)
    net, x, y = Net(), torch.randn(2, 5, 7), torch.tensor([0, 2])
    for parameter in net.parameters():  # the exporter makes equal ones one
        nn.init.normal_(parameter, std=0.4)
    plain, optimized = tmp_path / "plain.onnx", tmp_path / "optimized.onnx"
    torch.onnx.export(net, x, plain, dynamo=False, opset_version=opset, input_names=["x"])
    session = onnxruntime.SessionOptions()
    session.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session.optimized_model_filepath = str(optimized)
    onnxruntime.InferenceSession(plain, session, providers=["CPUExecutionProvider"])
    torch.nn.functional.cross_entropy(net(x), y).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}
    for file in (plain, optimized):
        model = onnx.load(file)
        assert file == plain or {node.op_type for node in model.graph.node} >= FUSED
        built = build(model, Options(losses=(LossSpec("cross-entropy"),), label="y"))
        assert not any(node.domain for node in built.model.graph.node)
        found = Executor(built.model, fallback=False)({"x": x.numpy(), "y": y.numpy()})
        gradients = {name: found[gradient] for name, gradient in built.training.gradients.items()}
        assert len(gradients) == len(expected)
        for name, gradient in expected.items():
            ours = gradients.pop(name, None)
            if ours is None:  # onnxruntime and PyTorch rename a weight whose transpose they store
                name, ours = next((n, g) for n, g in gradients.items() if close(g, gradient.T))
                del gradients[name]
            assert close(ours, gradient) or close(ours, gradient.T), name


def close(a, b):
    return bool(np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-7) if a.shape == b.shape else False
