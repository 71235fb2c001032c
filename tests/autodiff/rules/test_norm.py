"""Normalizations in float32 and float16 against PyTorch's autograd in float64, with inputs far from zero mean."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.mode import set_mode, write_batch_statistics
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.record import Training
from tests.harness import with_gradient

EPSILON = 1e-5


def gradients(op, arrays, attributes, *, outputs=1, seeded=None, opset=21, symbolic=False):
    """The node's gradients on onnxruntime, with the seeds they belong to."""
    names = [f"x{i}" for i in range(len(arrays))]
    node = helper.make_node(op, names, [f"y{i}" for i in range(outputs)], name="node", **attributes)
    infos = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(a.dtype),
            [f"{name}_{k}" for k in range(a.ndim)] if symbolic else a.shape,
        )
        for name, a in zip(names, arrays, strict=True)
    ]
    types = [infos[0].type.tensor_type.elem_type] + [TensorProto.FLOAT] * (outputs - 1)
    results = [helper.make_tensor_value_info(f"y{i}", t, [None] * arrays[0].ndim) for i, t in enumerate(types)]
    graph = helper.make_graph([node], "norm", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    fed = dict(zip(names, arrays, strict=True))
    ys = list(Executor(model, fallback=False)(fed).values())
    rng = np.random.default_rng(9)
    seeded = [0] if seeded is None else seeded
    seeds = {i: np.asarray(rng.standard_normal(ys[i].shape), ys[i].dtype) for i in seeded}
    backward = with_gradient(model, names, [f"y{i}" for i in seeded], "g_")
    found = Executor(backward, fallback=False)({**fed, **{f"g_y{i}": s for i, s in seeds.items()}})
    return [found[f"g_grad_{n}"] for n in names], seeds


def compare(function, op, arrays, attributes, tolerance=5e-6, **keywords):
    """`function(*tensors) -> outputs` is PyTorch's form of the node."""
    for symbolic in (False, True):
        found, seeds = gradients(op, arrays, attributes, symbolic=symbolic, **keywords)
        leaves = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
        ys = function(*leaves)
        ys = ys if isinstance(ys, tuple) else (ys,)
        sum((ys[i] * torch.tensor(s.astype(np.float64))).sum() for i, s in seeds.items()).backward()
        for array, gradient, leaf in zip(arrays, found, leaves, strict=True):
            expected = np.zeros(array.shape) if leaf.grad is None else leaf.grad.numpy()
            assert gradient.shape == array.shape and gradient.dtype == array.dtype
            error = np.abs(gradient.astype(np.float64) - expected).max()
            assert error <= tolerance * max(np.abs(expected).max(), 1e-3), (op, array.shape)


def data(*shapes, dtype=np.float32, shift=3.0):
    rng = np.random.default_rng(6)
    first = (rng.standard_normal(shapes[0]) * 2 + shift).astype(dtype)
    return [first, *(rng.uniform(0.5, 2, s).astype(dtype) for s in shapes[1:])]


def with_statistics(x, scale, b, axis):
    axes = list(range(axis, x.ndim))
    mean = x.mean(axes, keepdim=True)
    r = 1 / torch.sqrt(x.var(axes, unbiased=False, keepdim=True) + EPSILON)
    return (x - mean) * r * scale + b, mean, r


@pytest.mark.parametrize("seeded", [[0], [1], [2], [0, 1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_layer_normalization_through_every_output(axis, seeded):
    shape = (4, 5, 6)
    arrays = data(shape, shape[axis:], shape[axis:])
    attributes = {"axis": axis, "epsilon": EPSILON}
    compare(lambda *v: with_statistics(*v, axis), "LayerNormalization", arrays, attributes, outputs=3, seeded=seeded)


def test_layer_normalization_far_from_zero():
    arrays = data((8, 64), (64,), (64,), shift=1000.0)
    compare(lambda x, s, b: functional.layer_norm(x, (64,), s, b, EPSILON), "LayerNormalization", arrays,
            {"epsilon": EPSILON}, tolerance=2e-4)  # fmt: skip


def test_layer_normalization_in_float16():
    """Its sums over 512 rows and 256 columns are taken in float32."""
    arrays = data((512, 256), (256,), (256,), dtype=np.float16)
    compare(lambda x, s, b: functional.layer_norm(x, (256,), s, b, EPSILON), "LayerNormalization", arrays,
            {"epsilon": EPSILON}, tolerance=2e-3)  # fmt: skip


def test_layer_normalization_without_bias():
    compare(lambda x, s: functional.layer_norm(x, (6,), s, None, EPSILON), "LayerNormalization",
            data((2, 5, 6), (6,)), {"epsilon": EPSILON})  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4, 5)])
def test_rms_normalization(shape):
    compare(lambda x, s: functional.rms_norm(x, shape[-1:], s, EPSILON), "RMSNormalization",
            data(shape, shape[-1:]), {"epsilon": EPSILON}, opset=23)  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 3, 4, 5)])
def test_instance_normalization(shape):
    compare(lambda x, s, b: functional.instance_norm(x, weight=s, bias=b, eps=EPSILON), "InstanceNormalization",
            data(shape, (3,), (3,)), {"epsilon": EPSILON})  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_normalization(groups):
    compare(lambda x, s, b: functional.group_norm(x, groups, s, b, EPSILON), "GroupNormalization",
            data((2, 6, 4, 3), (6,), (6,)), {"epsilon": EPSILON, "num_groups": groups})  # fmt: skip


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (2, 3, 4, 5)])
def test_batch_normalization_with_given_statistics(shape):
    def reference(x, s, b, mean, var):
        view = [-1] + [1] * (x.ndim - 2)
        return (x - mean.reshape(view)) / torch.sqrt(var.reshape(view) + EPSILON) * s.reshape(view) + b.reshape(view)

    arrays = data(shape, (3,), (3,), (3,), (3,))
    compare(reference, "BatchNormalization", arrays, {"epsilon": EPSILON})
    halves = [a.astype(np.float16) for a in arrays[:1]] + arrays[1:]
    compare(reference, "BatchNormalization", halves, {"epsilon": EPSILON}, tolerance=2e-3)


@pytest.mark.parametrize(("opset", "attributes"), [(15, {"training_mode": 1}), (13, {})])
def test_batch_normalization_in_training_mode_is_refused(opset, attributes):
    """Before opset 14 it is the number of outputs that says so."""
    names = ["x", "scale", "b", "mean", "var"]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 3] if n == "x" else [3]) for n in names]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "next_mean", "next_var")]
    saved = [] if attributes else ["saved_mean", "saved_var"]
    results = [*(o.name for o in outputs), *saved]
    node = helper.make_node("BatchNormalization", names, results, name="bn", **attributes)
    graph = helper.make_graph([node], "bn", infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    with pytest.raises(UnsupportedError, match="training mode"):
        with_gradient(model, ["x"], ["y"], "g_")


@pytest.mark.parametrize("seeded", [["y"], ["next_mean"], ["next_var"], ["y", "next_mean", "next_var"]])
@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (2, 3, 4, 5)])
def test_batch_normalization_in_training_mode_through_every_output(shape, seeded):
    """As the pass of --mode writes it: with the statistics of the batch, and the running ones after it."""
    names, outputs, momentum = ["x", "scale", "b", "mean", "var"], ["y", "next_mean", "next_var"], 0.7
    arrays = dict(zip(names, data(shape, (3,), (3,), (3,), (3,)), strict=True))
    node = helper.make_node("BatchNormalization", names, outputs, name="bn", training_mode=1, momentum=momentum)
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in arrays.items()]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape if n == "y" else [3]) for n in outputs]
    proto = helper.make_graph([node], "bn", infos, results)
    graph = Graph(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 15)], ir_version=8))
    infer_types(graph)
    set_mode(graph, Options(), Training())
    write_batch_statistics(graph, Options(), Training())
    rng = np.random.default_rng(9)
    seeds = {n: rng.standard_normal(shape if n == "y" else 3).astype(np.float32) for n in seeded}
    run = Executor(with_gradient(graph.commit(), names, seeded, "g_"), fallback=False)
    found = run({**arrays, **{f"g_{n}": s for n, s in seeds.items()}})
    leaves = {n: torch.tensor(a.astype(np.float64), requires_grad=True) for n, a in arrays.items()}
    x, axes = leaves["x"], [i for i in range(len(shape)) if i != 1]
    mean, var = x.mean(axes), x.var(axes, unbiased=False)
    y = functional.batch_norm(x, None, None, leaves["scale"], leaves["b"], training=True, eps=EPSILON)
    running = [old * momentum + new * (1 - momentum) for old, new in ((leaves["mean"], mean), (leaves["var"], var))]
    ys = dict(zip(outputs, [y, *running], strict=True))
    sum((ys[n] * torch.tensor(s.astype(np.float64))).sum() for n, s in seeds.items()).backward()
    for name, leaf in leaves.items():
        expected = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        error = np.abs(found[f"g_grad_{name}"] - expected).max()
        assert error <= 1e-5 * max(np.abs(expected).max(), 1e-2), (name, error)


@pytest.mark.parametrize("axes", [[0, 2, 3], [1], [0, 1, 2, 3]])
def test_mean_variance_normalization(axes):
    def reference(x):
        centred = x - x.mean(axes, keepdim=True)
        return centred / (centred.square().mean(axes, keepdim=True).sqrt() + 1e-9)

    compare(reference, "MeanVarianceNormalization", data((2, 3, 4, 5)), {"axes": axes})


def test_mean_variance_normalization_without_axes():
    """onnx's shape inference follows the operator's body without the default of its attribute, and fails."""
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 4, 5])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, 4, 5])
    proto = helper.make_graph([helper.make_node("MeanVarianceNormalization", ["x"], ["y"])], "mvn", [info], [y])
    graph = Graph(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 13)], ir_version=8))
    normalise(graph)
    infer_types(graph)
    (x,) = data((2, 3, 4, 5))
    g = np.random.default_rng(9).standard_normal(x.shape).astype(np.float32)
    found = Executor(with_gradient(graph.commit(), ["x"], ["y"], "g_"), fallback=False)({"x": x, "g_y": g})
    leaf = torch.tensor(x.astype(np.float64), requires_grad=True)
    functional.batch_norm(leaf, None, None, training=True, eps=1e-12).backward(torch.tensor(g.astype(np.float64)))
    np.testing.assert_allclose(found["g_grad_x"], leaf.grad, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_lrn(size):
    compare(lambda x: functional.local_response_norm(x, size, 0.3, 0.6, 1.5), "LRN", data((2, 7, 3, 4)),
            {"size": size, "alpha": 0.3, "beta": 0.6, "bias": 1.5})  # fmt: skip


@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization_of_zeros(p):
    x = np.array([[3.0, 0.0, -4.0], [0.0, 0.0, 0.0]], np.float32)
    (gradient,), seeds = gradients("LpNormalization", [x], {"p": p}, opset=22)
    leaf = torch.tensor(x[:1].astype(np.float64), requires_grad=True)
    (leaf / leaf.norm(p, dim=-1, keepdim=True) * torch.tensor(seeds[0][:1])).sum().backward()
    np.testing.assert_allclose(gradient[:1], leaf.grad, atol=1e-6)
    assert not gradient[1].any()
