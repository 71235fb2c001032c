"""Products with a vector: right at the level of optimization that onnxruntime takes by default."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onnxgrad_cli.builder import build
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification.proof import prove

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
