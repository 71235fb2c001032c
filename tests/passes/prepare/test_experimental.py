"""Operators that the standard gave up at opset 10: onnxruntime's own kernels, and PyTorch's gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.nn import functional

from tests.cli_harness import Shell

X = np.random.default_rng(0).standard_normal((2, 3, 5, 6)).astype(np.float32)
BIAS = [0.5, -1.0, 2.0]


@pytest.mark.parametrize(
    ("op_type", "attributes", "formula"),
    [
        ("Affine", {}, lambda x: x),
        ("Affine", {"alpha": 2.0, "beta": 3.0}, lambda x: 2 * x + 3),
        ("Scale", {}, lambda x: x),
        ("Scale", {"scale": -3.0}, lambda x: -3 * x),
        ("ScaledTanh", {"alpha": 2.0, "beta": 0.5}, lambda x: 2 * torch.tanh(0.5 * x)),
        ("ParametricSoftplus", {"alpha": 2.0, "beta": 0.5}, lambda x: 2 * functional.softplus(0.5 * x)),
        ("ImageScaler", {"scale": 2.0, "bias": BIAS}, lambda x: 2 * x + torch.tensor(BIAS)[:, None, None]),
        ("Crop", {"border": [1, 2, 2, 0]}, lambda x: x[:, :, 2:, 1:-2]),
        ("Crop", {"border": [0, 0, 0, 1]}, lambda x: x[:, :, :-1]),
        ("Crop", {"border": [1, 2, 0, 0], "scale": [2, 4]}, lambda x: x[:, :, 2:4, 1:5]),
    ],
)
def test_an_operator_is_written_out(
    op_type: str, attributes: dict[str, Any], formula: Callable[[Tensor], Tensor], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    x = torch.tensor(X, requires_grad=True)
    y = formula(x)
    node = helper.make_node(op_type, ["x"], ["y"], **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y.shape)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    file, derived = tmp_path / "model.onnx", tmp_path / "derived.onnx"
    onnx.save(model, file)
    shell = Shell(tmp_path, capsys)
    result = shell("derive", file, "--option", "keep-outputs", "--no-verify", "-o", derived)
    assert result.code == 0, result.err
    g = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    value, gradient = onnxruntime.InferenceSession(derived).run(["y", "x_grad"], {"x": X, "y_grad": g})
    y.backward(torch.tensor(g))
    np.testing.assert_allclose(value, onnxruntime.InferenceSession(file).run(None, {"x": X})[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, y.detach(), rtol=1e-5, atol=1e-6)
    assert x.grad is not None
    np.testing.assert_allclose(gradient, x.grad, rtol=1e-5, atol=1e-6)
