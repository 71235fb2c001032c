"""Metrics that are a user's Python functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training import python_metric
from onnxgrad_cli.training.metrics import METRICS, parse_metric
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


def distance(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.abs(predictions - labels).sum()


@pytest.mark.parametrize(
    ("suffix", "higher", "output"),
    [("", False, ""), (":higher=true", True, ""), (":higher=false", False, ""), (":out", False, "out")],
)
def test_a_function_is_named_on_the_command_line(suffix: str, higher: bool, output: str) -> None:
    named: list[tuple[str, str]] = []

    def load(file: str, function: str) -> Callable[..., np.ndarray]:
        named.append((file, function))
        return distance

    with METRICS.scoped():
        text = python_metric.parse_metric(f"a/b.py:distance{suffix}", load)
        found = parse_metric(text)
        assert (found.higher, found.output, found.kind) == (higher, output, "distance")
        assert taken("distance", np.arange(60.0), np.zeros(60)) == sum(range(60))
    assert named == [("a/b.py", "distance")]
    assert python_metric.parse_metric("accuracy:out", load) == "accuracy:out"


@pytest.mark.parametrize("returned", [np.zeros(2), "text", None])
def test_a_function_must_return_a_number(returned: object) -> None:
    def wrong(predictions: np.ndarray, labels: np.ndarray) -> object:
        return returned

    with METRICS.scoped(), pytest.raises(UsageError) as refused:
        begun = parse_metric(python_metric.register(wrong, False)).begin()
        begun.update(np.zeros(3), np.zeros(3))
    assert facts(refused.value)[:2] == ("wrong_type", "wrong")
