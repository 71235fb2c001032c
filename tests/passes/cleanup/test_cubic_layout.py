"""A cubic Resize among transposes runs in a training model as it does in the model."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.execution.executor import Executor

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(5)
EMBEDDING = np.float32(RNG.standard_normal((1, 6, 6, 8)))


def embedded() -> ModelProto:
    """A position embedding that is resized to a smaller and larger axis, and added, as vision transformers do."""
    nodes = [
        helper.make_node("Transpose", ["e"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node(
            "Resize", ["t", "", "", "s"], ["r"], mode="cubic", coordinate_transformation_mode="half_pixel"
        ),
        helper.make_node("Transpose", ["r"], ["u"], perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", ["u", "k"], ["v"]),
        helper.make_node("Mul", ["x", "v"], ["y"]),
    ]
    stored = [
        numpy_helper.from_array(EMBEDDING, "e"),
        numpy_helper.from_array(np.int64([1, 8, 4, 7]), "s"),
        numpy_helper.from_array(np.int64([1, -1, 8]), "k"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 28, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 28, 8])
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def test_a_resized_position_embedding_is_trained() -> None:
    model = embedded()
    x, label = (np.float32(RNG.standard_normal((2, 28, 8))) for _ in range(2))
    got = Executor(build(model).model, fallback=False)({"x": x, "label": label})
    e = torch.tensor(EMBEDDING).double().requires_grad_()
    size = {"size": (4, 7), "mode": "bicubic", "align_corners": False}
    resized = torch.nn.functional.interpolate(e.permute(0, 3, 1, 2), **size)
    y = torch.tensor(x) * resized.permute(0, 2, 3, 1).reshape(1, -1, 8)
    torch.mean((y - torch.tensor(label)) ** 2).backward()
    np.testing.assert_allclose(got["e_grad"], e.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_one_view_is_enough() -> None:
    built = build(embedded())
    again = derive(built.model, of=["loss"], wrt=["e"])
    views = [node for node in again.graph.node if node.name.endswith("/view")]
    assert len(views) == 1
