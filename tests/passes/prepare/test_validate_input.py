"""What is refused of a model as a whole, before anything is known of its values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from tests.facts import raises


def convolution() -> ModelProto:
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[1, 3, 8, 8] x) => (float[1, 16, 6, 6] y)'
    model = onnx.parser.parse_model(f"{head} {{ a = Conv(x, W) y = Relu(a) }}")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((16, 3, 3, 3), np.float32), "W"))
    return model


def optimized(level: onnxruntime.GraphOptimizationLevel, folder: Path) -> Path:
    """The file that onnxruntime writes of it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(convolution().SerializeToString(), options)
    return folder / "optimized.onnx"


def test_what_was_optimized_for_one_machine_is_refused_as_such(tmp_path: Path) -> None:
    file = optimized(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, tmp_path)
    if all(node.domain != "com.microsoft.nchwc" for node in onnx.load(file).graph.node):
        pytest.skip("onnxruntime has no such layout on this processor")
    with raises(UnsupportedError, "refused", "2", "2", "y_nchwc") as error:
        build(file)
    assert "ORT_ENABLE_EXTENDED" in (error.value.hint or "")


def test_what_was_optimized_for_any_machine_is_built(tmp_path: Path) -> None:
    built = build(optimized(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED, tmp_path))
    assert built.training.trained == ["W"]


@pytest.mark.parametrize("domain", ["", "theirs."])
def test_control_flow_of_others_is_refused(domain: str) -> None:
    """By its name alone a branch would be put in its place."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "theirs": 1]>
    g (float[2] x) => (float[2] y) <bool c = {{1}}, float[2] w = {{1, 2}}> {{
        h = Mul(x, w)
        y = {domain}If(c) <then_branch = a () => (float[2] u) {{ u = Neg(h) }},
          else_branch = b () => (float[2] v) {{ v = Abs(h) }}>
    }}""")
    if not domain:
        assert build(model).training.trained == ["w"]
        return
    with raises(UnsupportedError, "refused", "y", "theirs::If"):
        build(model)
