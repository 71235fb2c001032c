"""Evaluation and prediction of a model on arrays: what is normalized, which outputs are taken, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, parser

from onnxgrad_cli import LossSpec, Options, SampleOptions, Setting, run_evaluate, run_predict
from onnxgrad_cli.errors import ARGUMENT, UsageError
from tests.facts import raises

random = np.random.default_rng(0)
X = random.normal(size=(10, 2)).astype(np.float32)
Y = random.normal(size=(10, 2)).astype(np.float32)
WEIGHTS = random.uniform(1, 2, 10).astype(np.float32)


def model(outputs: str = "float[n, 2] y", nodes: str = "") -> ModelProto:
    return parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 2] x) => ({outputs}) <float[2, 2] w = {{1, 2, 3, 4}}> {{ y = MatMul(x, w) {nodes} }}""")


def test_labels_and_sample_weights_are_not_normalized() -> None:
    options = Options(losses=(LossSpec("mse"),), sample_weight="weight")
    arrays = {"x": X, "label": Y, "weight": WEIGHTS}
    found = run_evaluate(model(), arrays, options, setting=Setting(samples=SampleOptions(normalize=("1/2",))))
    assert found.samples == 10
    expected = np.mean(WEIGHTS[:, None] * ((X - 1) / 2 @ [[1, 2], [3, 4]] - Y) ** 2)
    assert found.results["loss"] == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_has_one_data_set() -> None:
    losses = (LossSpec("mse", data="first"), LossSpec("mse", label="other", data="second"))
    with raises(UsageError, "conflict", "losses") as refused:
        run_evaluate(model(), {"x": X, "label": Y, "other": Y}, Options(losses=losses))
    assert refused.value.hint


SEQUENCE = model("float[n, 2] y, seq(float[n, 2]) s", "s = SequenceConstruct(y)")


def test_outputs_that_are_no_tensors_are_left_out_or_refused() -> None:
    told: list[str] = []
    found = run_predict(SEQUENCE, {"x": X}, tell=lambda text, level: told.append(text))
    assert list(found.outputs) == ["y"] and any("'s'" in line for line in told)
    for outputs, expected in ((("s",), ("wrong_type", "s", "2")), (("y", "z"), ("unknown_name", "outputs", "z"))):
        with raises(UsageError, *expected) as refused:
            run_predict(SEQUENCE, {"x": X}, outputs=outputs)
        assert refused.value.hint


def test_the_first_axis_of_an_output_runs_over_the_samples() -> None:
    with raises(UsageError, "wrong_shape", "z", "1", "2", "10") as refused:
        run_predict(model("float[m, 2] z", "z = ReduceMean<axes = [0]>(y)"), {"x": X})
    assert refused.value.hint and [name for name, _ in ARGUMENT.findall(refused.value.hint)] == ["outputs"]
