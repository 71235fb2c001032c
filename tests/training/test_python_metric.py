"""Metrics that are a user's Python functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.metrics import parse_metric
from tests.facts import facts, raises
from tests.training.test_metrics import taken

random = np.random.default_rng(0)


LARGEST = """
<ir_version: 8, opset_import: ["": 17]>
metric (float[N, K] prediction, {label}[N, K] label) => ({out} worst)
{{
  wide = Cast<to=1>(label)
  off = Sub(prediction, wide)
  size = Abs(off)
  worst = ReduceMean<keepdims={keep}>(size)
}}
"""


def save(path: Path, label: str = "float", out: str = "float", keep: int = 0) -> str:
    onnx.save(parser.parse_model(LARGEST.format(label=label, out=out, keep=keep)), path)
    return str(path)


@pytest.mark.parametrize("keep, out", [(0, "float"), (1, "float[1, 1]")])
def test_a_metric_from_a_file(tmp_path: Path, keep: int, out: str) -> None:
    from sklearn import metrics as sklearn

    path = save(tmp_path / "error.onnx", out=out, keep=keep)
    found, labels = random.normal(size=(60, 3)), random.normal(size=(60, 3))
    assert taken(path, found, labels) == pytest.approx(sklearn.mean_absolute_error(labels, found), rel=1e-5)
    turned = onnx.load(path)
    turned.graph.input.insert(0, turned.graph.input.pop(1))  # what is called label is the label, first or not
    turned.graph.node[2].op_type = "Identity"
    onnx.save(turned, tmp_path / "turned.onnx")
    assert taken(str(tmp_path / "turned.onnx"), found, labels) == pytest.approx(np.mean(found - labels), rel=1e-4)
    assert parse_metric(path).name == "error"
    assert not parse_metric(path).higher
    assert parse_metric(f"{path}:higher=true").higher


def test_what_is_wrong_with_a_metric_from_a_file(tmp_path: Path) -> None:
    with raises(OnnxgradError, "missing_file", "none.onnx"):
        parse_metric(str(tmp_path / "none.onnx"))
    with raises(UsageError, "wrong_type", "a.onnx", "label", "int64", "float64"):
        taken(save(tmp_path / "a.onnx", label="int64"), np.zeros((60, 3)), np.zeros((60, 3)))
    with pytest.raises(OnnxgradError) as failed:
        taken(save(tmp_path / "a.onnx"), np.zeros((60, 3, 1)), np.zeros((60, 3)), ())
    assert facts(failed.value)[:7] == ("failed", "a.onnx", "60", "3", "1", "60", "3")
    model = onnx.load(tmp_path / "a.onnx")
    model.graph.output.append(model.graph.input[0])
    onnx.save(model, tmp_path / "b.onnx")
    with raises(UsageError, "wrong_value", "b.onnx", "2", "2"):
        parse_metric(str(tmp_path / "b.onnx"))
