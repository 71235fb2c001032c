"""Operands that contradict their operator's definition are told by the node, as onnxruntime refuses to run on them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli import build
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.operand_sizes import first_misfit
from onnxgrad_cli.ir.type_inference import Contradiction, infer_types
from tests.facts import raises

T, B, N, H = 3, 2, 5, 4
STATE = [1, B, H]
NODES = {
    "Gemm": ([[3, 5], [4, 5]], {"transB": 1}),
    "GRU": ([[T, B, N], [1, 3 * H, N], [1, 3 * H, H], [1, 6 * H], [B], STATE], {"hidden_size": H}),
    "LSTM": (
        [[T, B, N], [1, 4 * H, N], [1, 4 * H, H], [1, 8 * H], [B], STATE, STATE, [1, 3 * H]],
        {"hidden_size": H},
    ),
    "RNN": ([[T, B, N], [1, H, N], [1, H, H], [1, 2 * H], [B], STATE], {"hidden_size": H}),
}  # fmt: skip
CASES = [(op_type, at) for op_type, (shapes, _) in NODES.items() for at in range(len(shapes))]


def model_of(op_type: str, shapes: list[list[int]], **attributes: int) -> ModelProto:
    names = [f"x{i}" for i in range(len(shapes))]
    dtypes = [TensorProto.INT32 if len(shape) == 1 and shape != [1] else TensorProto.FLOAT for shape in shapes]
    inputs = map(helper.make_tensor_value_info, names, dtypes, shapes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node(op_type, names, ["y"], name="node", **attributes)
    graph = helper.make_graph([node], "g", list(inputs), [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def runs(model: ModelProto) -> bool:
    """Whether onnxruntime runs it."""
    types = {TensorProto.FLOAT: np.float32, TensorProto.INT32: np.int32}
    kinds = {value.name: value.type.tensor_type for value in model.graph.input}
    feeds = {n: np.ones([d.dim_value for d in k.shape.dim], types[k.elem_type]) for n, k in kinds.items()}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)
    except Exception:  # onnxruntime's exceptions share no base class
        return False
    return True


def judged(model: ModelProto) -> str:
    graph = Graph(model)
    for value in model.graph.input:
        graph.types[value.name] = value.type
    return first_misfit(graph)


FITTING = [(op_type, *parts) for op_type, parts in NODES.items()]


@pytest.mark.parametrize(("op_type", "shapes", "attributes"), [*FITTING, ("Gemm", [[5, 3], [5, 4]], {"transA": 1})])
def test_operands_that_fit(op_type: str, shapes: list[list[int]], attributes: dict[str, int]) -> None:
    model = model_of(op_type, shapes, **attributes)
    assert runs(model) and not judged(model)
    graph = Graph(model)
    infer_types(graph)
    assert not first_misfit(graph)


@pytest.mark.parametrize(("op_type", "at"), CASES)
def test_an_operand_that_is_too_long(op_type: str, at: int) -> None:
    shapes, attributes = NODES[op_type]
    wrong = [[*shape[:-1], shape[-1] + (i == at)] for i, shape in enumerate(shapes)]
    model = model_of(op_type, wrong, **attributes)
    assert not runs(model) and f"'x{at or 1}' has the shape" in judged(model)  # x0 has no contradiction before x1


def test_the_node_is_named() -> None:
    shapes, attributes = NODES["LSTM"]
    model = model_of("LSTM", [*shapes[:3], [1, 7], *shapes[4:]], **attributes)
    with raises(Contradiction, "failed", "node", "x3", "1", "7", "1", "4"):
        build(model)


def channels(node: str) -> onnx.ModelProto:
    """A model of one node that reads h[2, 8, 4, 4]."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 21]>
    g (float[2, 8, 4, 4] x) => (float[p, q, r, t] y) <float[8] s = {{1, 2, 1, 2, 1, 2, 1, 2}}>
    {{ h = Mul(x, k) {node} }}""")
    for name, shape in {"k": (4,), "w": (8, 8, 1, 1), "v": (8, 4, 1, 1), "c": (4, 8, 1, 1)}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([9, 9]), "e"))
    return model


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ("y = GroupNormalization <num_groups = -2> (h, s, s)", "GroupNormalization num_groups -2"),
        ("y = GroupNormalization <num_groups = 3> (h, s, s)", "GroupNormalization num_groups 3 1 h 8"),
        ("y = GroupNormalization <num_groups = 16> (h, s, s)", "GroupNormalization num_groups 16 1 h 8"),
        ("y = SpaceToDepth <blocksize = 3> (h)", "SpaceToDepth 3 2 h 4"),
        ("y = DepthToSpace <blocksize = 4> (h)", "DepthToSpace 4 1 h 8"),
        ("y = Conv <group = 3> (h, w)", "3 1 h 8"),
        ("y, z = Split <axis = 1, num_outputs = 3> (h)", "num_outputs 3 2"),
        ("y = Conv (h, v)", "h 8 v 4"),
        ("y = Conv <kernel_shape = [3, 3]> (h, w)", "kernel_shape 3 3 1 1"),
        ("y = ConvTranspose <group = 2> (h, c)", "ConvTranspose h 8 c 4"),
        ("y = Reshape (h, e)", "9 9 2 8 4 4"),
        ("y = Transpose <perm = [1, 0]> (h)", "1 0 h 4"),
    ],
)
def test_an_attribute_that_does_not_fit_the_sizes(node: str, told: str) -> None:
    """onnxruntime opens these models, and runs none of them; their gradients were of sizes that do not exist."""
    model = channels(node)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        session.run(None, {"x": np.ones((2, 8, 4, 4), np.float32)})
    operator = node.partition(" = ")[2].split()[0]
    with raises(Contradiction, "failed", f"{operator}_y", *told.split()):
        build(model)


@pytest.mark.parametrize(
    "node",
    [
        "y = GroupNormalization <num_groups = 8> (h, s, s)",
        "y = SpaceToDepth <blocksize = 4> (h)",
        "y = DepthToSpace <blocksize = 2> (h)",
        "y = Conv <group = 2> (h, v)",
        "y = ConvTranspose <group = 4> (h, v)",
        "y, z, u = Split <axis = 1, num_outputs = 3> (h)",
    ],
)
def test_an_attribute_that_fits_the_sizes(node: str) -> None:
    model = channels(node)
    trained = build(model).model
    onnxruntime.InferenceSession(trained.SerializeToString())
