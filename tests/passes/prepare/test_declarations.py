"""What a model declares of its values: gradients are right whatever it says, or the build is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.node_values import dims_in
from onnxgrad_cli.ir.types import shape_of, tensor_type
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.declarations import says_nothing

torch = pytest.importorskip("torch")

Declared = Sequence[int | str | None] | None
SIZES = ((2, 9, 14), (3, 16, 5), (1, 7, 22))
"""Batch, height and width of each run, all of them different."""

RNG = np.random.default_rng(7)
WEIGHTS = {
    "w1": RNG.standard_normal((4, 3, 3, 3)) / 4,
    "w2": RNG.standard_normal((4, 1, 3, 3)) / 2,
    "w3": RNG.standard_normal((4, 2)),
}


def _info(name: str, shape: Declared) -> ValueInfoProto:
    value = helper.make_value_info(name, tensor_type(TensorProto.FLOAT, None))
    if shape is not None:
        value.type.tensor_type.shape.SetInParent()
        for size in shape:  # as it is, '?' too
            dim = value.type.tensor_type.shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            elif size is not None:
                dim.dim_param = size
    return value


def network(x: Declared, y: Declared = None, inner: Mapping[str, Declared] | None = None) -> ModelProto:
    """Two convolutions, one of them depthwise, gated by their own mean, declared as the caller says."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Sigmoid", ["a"], ["s"]),
        helper.make_node("Mul", ["a", "s"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], group=4, pads=[1, 1, 1, 1], strides=[2, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["e"]),
        helper.make_node("Mul", ["c", "e"], ["k"]),
        helper.make_node("Softplus", ["k"], ["p"]),
        helper.make_node("GlobalAveragePool", ["p"], ["l"]),
        helper.make_node("Flatten", ["l"], ["m"]),
        helper.make_node("MatMul", ["m", "w3"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.float32(w), name) for name, w in WEIGHTS.items()]
    graph = helper.make_graph(nodes, "g", [_info("x", x)], [_info("y", y)], weights)
    graph.value_info.extend(_info(*each) for each in (inner or {}).items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def twin(x: np.ndarray, label: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of the network's mean squared error in PyTorch, in float64."""
    w = {name: torch.tensor(np.float32(value), dtype=torch.float64).requires_grad_() for name, value in WEIGHTS.items()}
    functional = torch.nn.functional
    a = functional.conv2d(torch.tensor(x, dtype=torch.float64), w["w1"], stride=2, padding=1)
    c = functional.conv2d(a * torch.sigmoid(a), w["w2"], stride=(2, 1), padding=1, groups=4)
    y = functional.softplus(c * c.mean((2, 3), keepdim=True)).mean((2, 3)) @ w["w3"]
    torch.mean((y - torch.tensor(label, dtype=torch.float64)) ** 2).backward()
    return {name: value.grad.numpy() for name, value in w.items()}


def check(built: TrainingModel) -> None:
    """Compare the gradients with the twin's at sizes that all differ."""
    run = Executor(built.model, fallback=False)
    for batch, height, width in SIZES:
        x = np.float32(RNG.standard_normal((batch, 3, height, width)))
        label = np.float32(RNG.standard_normal((batch, 2)))
        expected = twin(x, label)
        got = run({"x": x, "label": label})
        for name, gradient in expected.items():
            np.testing.assert_allclose(
                got[f"{name}_grad"], gradient, rtol=1e-3, atol=1e-5, err_msg=f"{name} at {x.shape}"
            )


def texts(built: TrainingModel) -> str:
    return "\n".join(caution.text for caution in built.training.cautions)


BATCH = [-1, 3, "?", "?"]
FREE = ["n", 3, "h", "w"]


@pytest.mark.parametrize(
    ("x", "y", "inner"),
    [
        (BATCH, [-1, 2], {}),
        (BATCH, [-1, -1], {"a": [-1, 4, -1, -1], "c": ["?", 4, "?", "?"]}),
        (["None", 3, "None", "None"], ["None", 2], {}),
        (["-1", 3, "-1", "-1"], ["-1", 2], {"c": ["-1", 4, "-1", "-1"]}),
        (["unk__0", 3, "unk__0", "unk__0"], ["unk__0", 2], {"b": ["unk__0", 4, "unk__1", "unk__1"]}),
        (["unk__0", 3, "unk__1", "unk__2"], ["unk__0", 2], {"a": ["unk__0", 4, "unk__0", "unk__0"]}),
        ([None, 3, None, None], ["dynamic", 2], {"c": ["dynamic", 4, "dynamic", "dynamic"]}),
        (FREE, [], {"a": [], "c": [1, 4, 8, 8], "m": [7, 9, 2]}),
        (FREE, ["w", 2], {"a": ["h", 4, "w", "w"], "e": ["n", 4, "h", "w"]}),
        (FREE, [1, 2, 3], {"y": [5]}),
    ],
)
def test_gradients_are_right_whatever_a_model_says_of_its_sizes(
    x: Declared, y: Declared, inner: Mapping[str, Declared]
) -> None:
    built = build(network(x, y, inner))
    check(built)
    assert all(dim.dim_value >= 0 and dim.dim_param != "?" for dim in dims_in(built.model.graph))


def test_a_wrong_shape_of_an_output_is_told() -> None:
    built = build(network(FREE, [1, 2, 3]), Options(keep_outputs=True))
    assert "'y' is float[1, 2, 3]" in texts(built)
    assert shape_of({v.name: v.type for v in built.model.graph.output}["y"]) == ("n", 2)


def test_what_agrees_stays_as_it_was() -> None:
    stored = {"a": None, "s": ["n", 4, "p", "q"], "l": ["n", 4, 1, 1]}
    model = network(FREE, ["n", 2], stored)
    declared = {value.name: value.type for value in build(model).model.graph.value_info}
    assert shape_of(declared["l"]) == ("n", 4, 1, 1)
    assert "s" not in declared  # 'p' and 'q' are sizes of nothing that is fed


@pytest.mark.parametrize("symbol", ["", "?", "*", "-1", "17", "None", "unk", "unk__12", "Dynamic", "<dyn>"])
def test_placeholders(symbol: str) -> None:
    assert says_nothing(symbol)


@pytest.mark.parametrize("symbol", ["n", "x", "batch", "dim_0", "anyone", "2*n", "dynamic_batch", "s77", "p2o.Dim.0"])
def test_names(symbol: str) -> None:
    assert not says_nothing(symbol)


def test_a_depthwise_convolution_writes_no_placeholder() -> None:
    """onnxruntime shares a buffer between values of one declared shape: '?' by '?' was taken for one."""
    shapes = {"v": (48, 3, 1, 1), "w": (48, 1, 3, 3), "u": (48, 1, 3, 3)}
    weights = {name: np.float32(RNG.standard_normal(shape)) for name, shape in shapes.items()}
    depthwise = {"group": 48, "pads": [1, 1, 1, 1], "strides": [2, 2]}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["h"]),
        helper.make_node("Conv", ["h", "w"], ["i"], **depthwise),
        helper.make_node("Conv", ["i", "u"], ["y"], **depthwise),
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [_info("x", ["batch", 3, 8, 8])], [_info("y", None)], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    built = build(model)
    assert all(dim.dim_param != "?" for dim in dims_in(built.model.graph))
    x, label = np.float32(RNG.standard_normal((2, 3, 8, 8))), np.float32(RNG.standard_normal((2, 48, 2, 2)))
    got = Executor(built.model, fallback=False)({"x": x, "label": label})
    leaves = {name: torch.tensor(array).double().requires_grad_() for name, array in weights.items()}
    y = torch.nn.functional.conv2d(torch.tensor(x).double(), leaves["v"])
    for name in ("w", "u"):
        y = torch.nn.functional.conv2d(y, leaves[name], stride=2, padding=1, groups=48)
    torch.mean((y - torch.tensor(label)) ** 2).backward()
    for name, output in built.training.gradients.items():
        np.testing.assert_allclose(got[output], leaves[name].grad.numpy(), rtol=1e-3, atol=1e-5)
