"""Modules of nodes, as exporters name them."""

from __future__ import annotations

import onnx
import pytest

from onnxgrad_cli.ir.modules import module_path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/layers.0/q_proj/MatMul", "layers.0.q_proj"), ("/layers.0/mlp/mlp.0/MatMul", "layers.0.mlp.0"),
        ("/net/net.0/net.0.1/Gemm", "net.0.1"), ("/layer1/layer1.0/conv1/Conv", "layer1.0.conv1"), ("MatMul_3", ""),
    ],
)  # fmt: skip
def test_modules_that_the_older_exporter_names(name: str, path: str) -> None:
    """As PyTorch writes them: a Sequential stands before its children, whose names begin with its own."""
    assert module_path(onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name=name)) == path
