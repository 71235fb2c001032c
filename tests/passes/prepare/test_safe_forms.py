"""Forms that onnxruntime computes correctly: a Squeeze without axes, and products with a vector."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onnxgrad_cli.builder import build
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.passes.prepare.declarations import set_hints_aside
from onnxgrad_cli.passes.prepare.safe_forms import give_axes
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.proof import prove


def squeezed(inputs: str, declared: str) -> tuple[bool, list[list[int]], list[str]]:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g ({inputs}) => (float y)
        <{declared}> {{ t = Identity (x) s = Squeeze (t) y = ReduceSum <keepdims = 0> (s) }}""")
    graph, training = Graph(model), Training()
    infer_types(graph)
    changed = give_axes(graph, training)
    node = next((node for node in graph.nodes if node.op_type == "Squeeze"), None)
    axes = [list(graph.constant(name)) for name in node.input[1:]] if node is not None else []
    return changed, axes, [caution.subject for caution in training.cautions]


@pytest.mark.parametrize(
    ("inputs", "declared", "axes"),
    [
        ("float[batch, 1, 4] x", "", [[1]]),
        ("float[batch, 1, length] x", "float[batch, length] s", [[1]]),
        ("float[2, batch] z, float[batch, 1, 4] x", "float[batch, 4] s", [[1]]),
    ],
)
def test_the_batch_is_kept(inputs: str, declared: str, axes: list[list[int]]) -> None:
    assert squeezed(inputs, declared) == (True, axes, ["s"])


@pytest.mark.parametrize(
    ("inputs", "declared"),
    [
        ("float[a, b, c] x", "float[a, b] s"),  # c was 1 when the file was written
        ("float[batch, 1, length] x", ""),  # so may the length be
        ("float[4, n] x", ""),
        ("float[2, 1] x", ""),
    ],
)
def test_what_may_remove_a_named_axis_stays(inputs: str, declared: str) -> None:
    assert squeezed(inputs, declared) == (False, [], [])


@pytest.mark.parametrize(("output", "changed"), [("float[n] y", False), ("float[n, 4] y", True)])
def test_the_declared_rank_of_an_output_behind_counts(output: str, changed: bool) -> None:
    """A model of batches of 1 alone squeezes the batch away, and declares so."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g (float[batch, 1, 4] x) => ({output})
        {{ t = Identity (x) s = Squeeze (t) u = Sigmoid (s) y = Concat <axis = 0> (u, u) }}""")
    graph = Graph(model)
    set_hints_aside(graph)
    infer_types(graph)
    assert give_axes(graph, Training()) == changed


MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[4, 6] x) => (float[PRODUCT] y) <float[SIZE] w, float[4, 6] s>
{ m = Mul(x, s) t = Transpose(m) c = Constant <value: tensor = float[1] {-0.5}> () u = Mul(t, c) e = Exp(u)
  y = MatMul(OPERANDS) }
"""


@pytest.mark.parametrize(("operands", "size", "product"), [("e, w", 4, 6), ("w, e", 6, 4)])
def test_the_loss_is_the_same_at_every_level_of_optimization(operands: str, size: int, product: int) -> None:
    text = MODEL.replace("OPERANDS", operands).replace("SIZE", str(size)).replace("PRODUCT", str(product))
    original = onnx.parser.parse_model(text.replace(f"<float[{size}] w, float[4, 6] s>", ""))
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in {"w": size, "s": (4, 6)}.items()}
    original.graph.initializer.extend(onnx.numpy_helper.from_array(x, name) for name, x in weights.items())
    built = build(original)
    model = built.model
    for node in model.graph.node:  # on a vector, onnxruntime's fusion would be wrong wherever it takes place
        assert node.op_type != "MatMul" or all(len(shape_of(built.graph.types[n]) or ()) == 2 for n in node.input)
    x, w = torch.tensor(rng.normal(size=(4, 6)), dtype=torch.float32), torch.tensor(weights["w"], requires_grad=True)
    scale = torch.tensor(weights["s"], requires_grad=True)
    e = torch.exp(-0.5 * (x * scale).T)
    loss = ((e @ w if operands == "e, w" else w @ e) ** 2).mean()
    loss.backward()
    assert w.grad is not None and scale.grad is not None
    expected = {"loss": loss.detach().numpy(), "w_grad": w.grad.numpy(), "s_grad": scale.grad.numpy()}
    feeds = {"x": x.numpy(), "label": np.zeros(product, np.float32)}
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        for name, value in zip(expected, session.run(list(expected), feeds), strict=True):
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=f"{name} at {level}")
    assert prove(model, describe(model), original=original).status == "passed"
