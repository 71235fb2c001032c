"""BatchNormalization and Dropout put in inference mode, wherever they stand and however a file asks for training."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.ir.modes import give_own_statistics, put_in_inference

LAYER = "float[4] s = {1, 1, 1, 1}, float[4] b = {0, 0, 0, 0}, float[4] m = {1, 2, 3, 4}, float[4] v = {4, 4, 4, 4}"
NORMALIZED = f"""<ir_version: 8, opset_import: ["": 17]>
g (float[n, 4] x) => (float[n, 4] y) <{LAYER}>
{{ y, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, m, v) }}"""
BY_OUTPUTS = NORMALIZED.replace("17", "9").replace("<training_mode = 1>", "").replace("v2 =", "v2, m3, v3 =")
SHOWN = NORMALIZED.replace("float[n, 4] y)", "float[n, 4] y, float[4] m2)")
DROPPED = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 4] x) => (float[n, 4] y) <float r = {0.5}, bool on = {1}> { y = Dropout(x, r, on) }"""
IN_A_BODY = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 4] x) => (float[n, 4] y) <float r = {0.5}, bool on = {1}> {
  y = If(on) <then_branch = t () => (float[n, 4] a) { a = Dropout(x, r, on) }, else_branch = e () => (float[n, 4] c)
  { c = Identity(x) }> }"""
IN_A_FUNCTION = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
g (float[n, 4] x) => (float[n, 4] y) { y = own.drop(x) }
<domain: "own", opset_import: ["": 17]> drop (z) => (w)
{ r = Constant<value = float {0.5}>() on = Constant<value = bool {1}>() w = Dropout(z, r, on) }"""
X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
CENTRED = (X - [1, 2, 3, 4]) / np.sqrt(4 + 1e-5)


def answers(model: ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(NORMALIZED, CENTRED), (SHOWN, CENTRED), (BY_OUTPUTS, CENTRED), (DROPPED, X), (IN_A_BODY, X), (IN_A_FUNCTION, X)],
    ids=["attribute", "statistics shown", "outputs", "Dropout", "body", "function"],
)
def test_in_inference_a_sample_alone_is_what_it_is_among_others(text: str, wanted: np.ndarray) -> None:
    model = parser.parse_model(text)
    put_in_inference(model)
    onnx.checker.check_model(model)
    together, *more = answers(model, X)
    np.testing.assert_allclose(together, wanted, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([answers(model, X[i : i + 1])[0] for i in range(2)]), together)
    for statistic in more:
        np.testing.assert_array_equal(statistic, [1, 2, 3, 4])


def test_what_is_for_inference_stays_byte_for_byte() -> None:
    text = NORMALIZED.replace("training_mode = 1", "training_mode = 0").replace(", m2, v2", "")
    model = parser.parse_model(text)
    before = model.SerializeToString(deterministic=True)
    put_in_inference(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_switch_that_is_fed_stays() -> None:
    model = parser.parse_model(
        DROPPED.replace("(float[n, 4] x)", "(float[n, 4] x, bool on)").replace(", bool on = {1}", "")
    )
    before = model.SerializeToString(deterministic=True)
    put_in_inference(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_switch_that_nobody_reads_any_more_is_removed() -> None:
    """onnxruntime warns of an initializer without a reader."""
    model = parser.parse_model(DROPPED)
    put_in_inference(model)
    assert [tensor.name for tensor in model.graph.initializer] == ["r"]
    model = parser.parse_model(IN_A_BODY)
    put_in_inference(model)
    assert [tensor.name for tensor in model.graph.initializer] == ["r", "on"]


def test_statistics_of_their_own_for_layers_that_shared_them() -> None:
    text = NORMALIZED.replace("{ y, m2", "{ h, m3, v3 = BatchNormalization<training_mode = 1>(x, b, s, m, v) y, m2")
    model = parser.parse_model(text)
    give_own_statistics(model, {"h/running_mean", "y/running_mean", "y/running_var", "other"})
    assert [list(node.input[3:]) for node in model.graph.node] == [
        ["h/running_mean", "v"], ["y/running_mean", "y/running_var"],
    ]  # fmt: skip
    names = [tensor.name for tensor in model.graph.initializer]
    assert names == ["s", "b", "v", "h/running_mean", "y/running_mean", "y/running_var"]  # m has no reader any more
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[3]), [1, 2, 3, 4])
    onnx.checker.check_model(model)
