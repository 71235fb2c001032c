"""Normalizations in float32 and float16 against PyTorch's autograd in float64, with inputs far from zero mean."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.fusions import with_convolutions
from onnxgrad_cli.autodiff.rules.norm import through_convolved_statistics
from onnxgrad_cli.builder import build
from onnxgrad_cli.emission.values import Fusion
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.losses.spec import LossSpec
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


CONVOLVED = "onnxgrad_cli.autodiff.rules.norm.through_convolved_statistics"


WEIGHTS = ("w", "scale", "bias")


def network(sizes: tuple[int, ...], outer: int, twice: bool = False, dtype: int = TensorProto.FLOAT, **attributes: Any):
    """y = Relu(BatchNormalization(Conv(x, w))), to which the convolution's result is added where it is read `twice`."""
    rng, images = np.random.default_rng(0), ["batch", outer, *sizes[2:]]
    np_dtype = helper.tensor_dtype_to_np_dtype(dtype)
    arrays = {"w": rng.standard_normal((outer, sizes[1], *[1] * (len(sizes) - 2))) + 0.5}
    arrays |= {name: rng.uniform(0.5, 2, outer) for name in ("scale", "bias", "mean", "var")}
    arrays = {name: array.astype(np_dtype) for name, array in arrays.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", **attributes),
        helper.make_node("BatchNormalization", ["c", *list(arrays)[1:]], ["n"], name="bn", epsilon=1e-3),
        helper.make_node("Relu", ["n"], ["r" if twice else "y"], name="relu"),
    ]
    nodes += [helper.make_node("Add", ["r", "c"], ["y"], name="join")] if twice else []
    graph = helper.make_graph(
        nodes, "convolved",
        [helper.make_tensor_value_info("x", dtype, ["batch", *sizes[1:]])],
        [helper.make_tensor_value_info("y", dtype, images)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), arrays


def compare_convolved(sizes: tuple[int, ...], outer: int, fused: bool = True, shift: float = 0.0, **how: Any) -> None:
    """The loss and all gradients against PyTorch's in float64, and whether the one rule was used."""
    twice, frozen = how.pop("twice", False), how.pop("freeze", ())
    model, arrays = network(sizes, outer, twice)
    options = {"grad_of_input": ("x",), "freeze": frozen, "mode": "train", "label": "label", **how}
    built = build(model, Options(losses=(LossSpec("mse"),), **options))
    assert (("ai.onnx::BatchNormalization", CONVOLVED) in built.training.rules) == fused
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(sizes) + shift).astype(np.float32)
    label = rng.standard_normal((sizes[0], outer, *sizes[2:])).astype(np.float32)
    found = Executor(built.model, threads=2, fallback=False)({"x": x, "label": label})
    given = {name: torch.tensor(a.astype(np.float64), requires_grad=True) for name, a in {**arrays, "x": x}.items()}
    c = torch.einsum("oi,ni...->no...", given["w"].flatten(1), given["x"])
    n = torch.nn.functional.batch_norm(c, None, None, given["scale"], given["bias"], True, 0.1, 1e-3)
    y = torch.relu(n) + c if twice else torch.relu(n)
    torch.nn.functional.mse_loss(y, torch.tensor(label.astype(np.float64))).backward()
    for name in ("x", *(name for name in WEIGHTS if name not in frozen)):
        want = given[name].grad.numpy()
        np.testing.assert_allclose(found[f"{name}_grad"], want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    ("sizes", "outer"), [((3, 4, 9), 8), ((2, 5, 4, 6), 20), ((2, 2, 3, 2, 4), 4), ((4, 16, 56, 56), 96)]
)
def test_images_of_any_rank(sizes: tuple[int, ...], outer: int) -> None:
    compare_convolved(sizes, outer)


def test_a_mean_far_from_zero_costs_no_more_than_in_the_convolution() -> None:
    compare_convolved((4, 8, 14, 14), 32, shift=3.0)


@pytest.mark.parametrize("freeze", [("w",), ("scale", "bias"), ("w", "scale", "bias")])
def test_frozen_weights(freeze: tuple[str, ...]) -> None:
    compare_convolved((2, 5, 4, 6), 20, freeze=freeze)


def test_another_reader_of_the_convolution() -> None:
    compare_convolved((2, 5, 4, 6), 20, twice=True)


@pytest.mark.parametrize(("sizes", "outer"), [((2, 5, 4, 6), 9), ((2, 15, 4, 6), 30)])
def test_where_products_would_cost_more_it_is_left(sizes: tuple[int, ...], outer: int) -> None:
    compare_convolved(sizes, outer, fused=False)


@pytest.mark.parametrize("attributes", [{"strides": [2, 1]}, {"pads": [1, 0, 0, 0]}, {"group": 2}])
def test_other_convolutions_are_left(attributes: dict[str, Any]) -> None:
    rng, group = np.random.default_rng(0), attributes.get("group", 1)
    model, _ = network((2, 4, 8, 8), 16, **attributes)
    w = next(i for i in model.graph.initializer if i.name == "w")
    w.CopyFrom(numpy_helper.from_array(rng.standard_normal((16, 4 // group, 1, 1)).astype(np.float32), "w"))
    for dim in model.graph.output[0].type.tensor_type.shape.dim[2:]:
        dim.Clear()
    built = build(model, Options(losses=(LossSpec("mse"),), mode="train"))
    assert ("ai.onnx::BatchNormalization", CONVOLVED) not in built.training.rules


def test_half_precision_takes_its_statistics_in_float32_and_is_left() -> None:
    model, _ = network((2, 4, 8, 8), 16, dtype=TensorProto.FLOAT16)
    built = build(model, Options(losses=(LossSpec("mse"),), mode="train"))
    assert ("ai.onnx::BatchNormalization", CONVOLVED) not in built.training.rules


def test_what_somebody_wants_or_has_a_rule_for_is_not_passed_over() -> None:
    graph = Graph(network((2, 5, 4, 6), 20)[0])
    infer_types(graph)
    alone = {"n": Fusion("BatchNormalization", ("c", "scale"), (), print, through_convolved_statistics)}
    assert with_convolutions(graph, alone, ["w"])["n"].inputs == ("x", "w", "scale")
    assert with_convolutions(graph, alone, ["c"]) == alone
    graph.held.add("c")
    assert with_convolutions(graph, alone, ["w"]) == alone
    graph.held.clear()
    with registry.scoped():
        registry.rule("Conv", override=True)(lambda op, g, y, *_, **__: g)
        assert with_convolutions(graph, alone, ["w"]) == alone


def test_normalized_images_are_not_kept_for_the_backward_part() -> None:
    model, _ = network((2, 4, 8, 8), 16)
    built = build(model, Options(losses=(LossSpec("mse"),), mode="train", grad_of_input=("x",)))
    made = next(node for node in built.model.graph.node if node.name.endswith("batch_var/Add")).output[0]
    readers = [node.name for node in built.model.graph.node if made in node.input]
    assert not any(name.startswith("grad/") for name in readers), readers
    onnx.checker.check_model(built.model)
