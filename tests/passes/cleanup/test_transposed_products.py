"""Transposed products against PyTorch, and which of them are turned: one whose transpose is read only, and not tall."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.cleanup.faster_forms import turn_products

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def with_weight(text: str, w: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model


@pytest.mark.parametrize(("rows", "columns", "made_by"), [(2, 3, "MatMul"), (6, 3, "MatMul"), (7, 3, "Transpose")])
@pytest.mark.parametrize("batch", ["N", "N, M"])
def test_the_gradient_of_a_transposed_weight(rows: int, columns: int, made_by: str, batch: str) -> None:
    text = f"g (float[{batch}, {columns}] x) => (y) {{ t = Transpose(w) y = MatMul(x, t) }}"
    w, x = normal(rows, columns), normal(*(4, 5)[: 1 + batch.count(",")], columns)
    model = build(with_weight(text, w), Options()).model
    label = normal(*x.shape[:-1], rows)
    leaf = torch.tensor(w, requires_grad=True)
    torch.nn.functional.mse_loss(torch.tensor(x) @ leaf.t(), torch.tensor(label)).backward()
    assert leaf.grad is not None
    found = Executor(model)({"x": x, "label": label, "w": w})["w_grad"]
    np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-5, atol=1e-6)
    assert [node.op_type for node in model.graph.node if "w_grad" in node.output] == [made_by]


SIZES = {"p": "2, 4", "r": "2, 4", "pt": "4, 2", "q": "4, 5", "qt": "5, 4"}
CHAIN = """
g (float[3, 2] a, float[3, 4] b, float[2, 5] c) => ({outputs}) {{
    at = Transpose(a) p = MatMul(at, b) pt = Transpose<perm = [1, 0]>(p) q = MatMul(pt, c) qt = Transpose(q) {more}
}}
"""


@pytest.mark.parametrize(
    ("outputs", "more", "transposes"),
    [
        (["pt"], "", 1),
        (["p", "pt"], "", 2),
        (["pt", "r"], "r = Relu(p)", 2),
        (["q"], "", 1),
        (["qt"], "", 3),  # pt is a factor itself, and no transpose any more
    ],
)
def test_whose_product_is_turned(outputs: list[str], more: str, transposes: int) -> None:
    model = onnx.parser.parse_model(
        HEADER + CHAIN.format(outputs=", ".join(f"float[{SIZES[name]}] {name}" for name in outputs), more=more)
    )
    for node in model.graph.node:
        node.name = node.output[0]
        node.metadata_props.add(key=ROLE, value="backward")
    graph = Graph(model)
    infer_types(graph)
    before = onnx.ModelProto()
    before.CopyFrom(graph.commit())
    turn_products(graph)
    graph.remove_unused()
    after = graph.commit()
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in after.graph.node].count("Transpose") == transposes
    feeds = {"a": normal(3, 2), "b": normal(3, 4), "c": normal(2, 5)}
    expected, found = Executor(before)(feeds), Executor(after)(feeds)
    for name in outputs:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def test_a_tied_embedding_is_scattered_onto_the_gradient_of_its_product() -> None:
    """Two tensors of the table's size are made, the sum and its gradient by the product, not five."""
    count, vocabulary, width = 8, 300, 6
    text = f"g (int64[{count}] ids) => (y) {{ h = Gather(w, ids) t = Transpose(w) y = MatMul(h, t) }}"
    w, ids = normal(vocabulary, width), np.array([1, 7, 7, 299, 7, 0, 1, -1])
    label = rng.integers(0, vocabulary, count)
    model = build(with_weight(text, w), Options(losses=(LossSpec("cross-entropy"),))).model
    found = Executor(model, threads=2)({"ids": ids, "label": label, "w": w})
    leaf = torch.tensor(w, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(leaf[torch.tensor(ids)] @ leaf.t(), torch.tensor(label))
    loss.backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(found["w_grad"], leaf.grad.numpy(), rtol=1e-4, atol=1e-6)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("ScatterElements") == 2  # the table's, and that of the logits at the labels
    assert "ConstantOfShape" not in [node.op_type for node in model.graph.node if node.output[0] in _bases(model)]


def _bases(model: onnx.ModelProto) -> list[str]:
    """What is scattered onto."""
    return [node.input[0] for node in model.graph.node if node.op_type == "ScatterElements"]
