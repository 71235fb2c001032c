"""BatchNormalization in training behind a convolution of single pixels, which has one rule with it, against PyTorch."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.fusions import with_convolutions
from onnxgrad_cli.autodiff.rules.norm import through_convolved_statistics
from onnxgrad_cli.builder import build
from onnxgrad_cli.emission.values import Fusion
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options

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


def compare(sizes: tuple[int, ...], outer: int, fused: bool = True, shift: float = 0.0, **how: Any) -> None:
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
    compare(sizes, outer)


def test_a_mean_far_from_zero_costs_no_more_than_in_the_convolution() -> None:
    compare((4, 8, 14, 14), 32, shift=3.0)


@pytest.mark.parametrize("freeze", [("w",), ("scale", "bias"), ("w", "scale", "bias")])
def test_frozen_weights(freeze: tuple[str, ...]) -> None:
    compare((2, 5, 4, 6), 20, freeze=freeze)


def test_another_reader_of_the_convolution() -> None:
    compare((2, 5, 4, 6), 20, twice=True)


@pytest.mark.parametrize(("sizes", "outer"), [((2, 5, 4, 6), 9), ((2, 15, 4, 6), 30)])
def test_where_products_would_cost_more_it_is_left(sizes: tuple[int, ...], outer: int) -> None:
    compare(sizes, outer, fused=False)


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
