"""Constants in the backward part, computed as onnxruntime computes them, so that its optimizer finds nothing to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.passes.cleanup import backward_constants
from onnxgrad_cli.passes.cleanup.backward_constants import compute_constants, divide_at_once

RNG = np.random.default_rng(3)
X, W = np.float32(RNG.standard_normal((4, 3))), np.float32(RNG.standard_normal(3))


def scaled(batch: int | str) -> ModelProto:
    """A model of one product with a weight."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 3]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"], "n")], "g", [x], [y], [numpy_helper.from_array(W, "w")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("batch", [4, "batch"])
def test_onnxruntime_leaves_each_node_of_a_mean_squared_error(
    batch: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ConstantOfShape" in {node.op_type for node in build(scaled(batch)).model.graph.node}, "a seed one can see"
    monkeypatch.setattr(backward_constants, "MIN_NODES_TO_FOLD_SEED", 0)
    trained = build(scaled(batch)).model
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(trained.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert {node.name for node in optimized.graph.node} == {node.name for node in trained.graph.node}
    label = np.float32(RNG.standard_normal(X.shape))
    got = Executor(trained, fallback=False)({"x": X, "label": label})["w_grad"]
    np.testing.assert_allclose(got, (2 * (X * W - label) * X).sum(0) / X.size, rtol=1e-5)


def backward(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], shape: list[int]) -> Graph:
    """A graph of backward nodes from `x` to `y`, with constants that a rule has written."""
    for node in nodes:
        node.name = f"n_{node.output[0]}"
        node.metadata_props.add(key=ROLE, value="backward")
    x, y = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), onnx.ValueInfoProto(name="y")
    y.type.tensor_type.elem_type = TensorProto.FLOAT
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    graph = Graph(model)
    for name, array in constants.items():
        graph.add_initializer(name, array)
    infer_types(graph)
    return graph


CHAIN = [
    ("Shape", ["x"], {}),
    ("ConstantOfShape", ["Shape"], {"value": numpy_helper.from_array(np.float32([3]))}),
    ("Unsqueeze", ["ConstantOfShape", "axes"], {}),
    ("Expand", ["Unsqueeze", "sizes"], {}),
    ("Div", ["Expand", "seven"], {}),
    ("Sub", ["Div", "seven"], {}),
    ("Reshape", ["Sub", "sizes"], {}),
]


def chain() -> Graph:
    """A product with what a chain of operators makes of constants."""
    nodes = [helper.make_node(kind, inputs, [kind], **given) for kind, inputs, given in CHAIN]
    nodes.append(helper.make_node("Mul", ["x", "Reshape"], ["y"]))
    return backward(nodes, {"axes": np.int64([0]), "sizes": np.int64([5, 2, 3]), "seven": np.float32([7])}, [2, 3])


def result(graph: Graph) -> np.ndarray:
    return Executor(graph.commit(), fallback=False)({"x": np.float32([[1.5, 1, 2], [3, 1.25, 7]])})["y"]


def test_what_is_computed_of_constants_is_what_onnxruntime_computes() -> None:
    graph = chain()
    compute_constants(graph)
    assert [node.op_type for node in graph.nodes] == ["Mul"]
    np.testing.assert_array_equal(result(graph), result(chain()))


def test_computed_constants_are_stored_in_the_order_of_their_nodes() -> None:
    names = [f"axes_{i}" for i in range(8)]
    nodes = [helper.make_node("Unsqueeze", ["one", "axes"], [name]) for name in names]
    nodes += [helper.make_node("Tile", ["x", name], [f"tile_{name}"]) for name in names]
    nodes.append(helper.make_node("Sum", [f"tile_{name}" for name in names], ["y"]))
    graph = backward(nodes, {"one": np.array(1), "axes": np.int64([0])}, [2])
    compute_constants(graph)
    assert [name for name in graph.initializers if name in names] == names


def test_what_is_large_or_the_models_own_is_computed_at_run_time() -> None:
    nodes = [
        helper.make_node("Expand", ["one", "sizes"], ["large"]),
        helper.make_node("Mul", ["weight", "weight"], ["square"]),
        helper.make_node("Sum", ["x", "large", "square"], ["y"]),
    ]
    graph = backward(nodes, {"one": W[:1], "sizes": np.int64([500]), "weight": W[:1]}, [1])
    graph.store("weight", W[:1])
    compute_constants(graph)
    assert len(graph.nodes) == 3


def quotient(ones: np.ndarray, twice: bool = False) -> Graph:
    """y = ones / sum(x) * x, where the quotient may be read twice."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Div", ["ones", "sum"], ["part"]),
        helper.make_node("Mul", ["part", "x"], ["product"]),
        helper.make_node("Add", ["product", "part" if twice else "x"], ["y"]),
    ]
    return backward(nodes, {"ones": ones}, [2, 3])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1)])
def test_a_part_times_a_value_is_a_quotient(shape: tuple[int, ...]) -> None:
    graph = quotient(np.ones(shape, np.float32))
    divide_at_once(graph)
    assert [node.op_type for node in graph.nodes] == ["ReduceSum", "Div", "Add"]
    np.testing.assert_allclose(result(graph), result(quotient(np.ones(shape, np.float32))), rtol=1e-6)


@pytest.mark.parametrize(
    "graph",
    [
        quotient(np.ones((), np.float32), twice=True),
        quotient(np.float32([2])),
        quotient(np.ones((1, 1, 1), np.float32)),
        quotient(np.ones((4, 1, 1), np.float32)),
    ],
    ids=["read twice", "no ones", "of higher rank", "longer"],
)
def test_other_parts_stay(graph: Graph) -> None:
    before = list(map(repr, graph.nodes))
    divide_at_once(graph)
    assert list(map(repr, graph.nodes)) == before
