"""Samples are explained one by one where a model mixes them, and in batches of a fixed size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.jobs.explain import run_explain
from tests.cli_harness import Shell
from tests.explanations import nets
from tests.facts import raises

X = nets.samples()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=X)
    return tmp_path / "data.npz"


def fixed(model: ModelProto, size: int) -> ModelProto:
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = size
    return model


def mixing() -> ModelProto:
    """The scores are those beyond the batch's mean."""
    text = nets.TEXT.replace("logits = Gemm", "raw = Gemm").replace(
        "(flat, w3, b3)", "(flat, w3, b3)\n  zero = Constant<value_ints = [0]>()\n  mean = ReduceMean(raw, zero)\n"
        "  half = Constant<value_float = 0.5>()\n  part = Mul(mean, half)\n  logits = Sub(raw, part)"
    )  # fmt: skip
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in nets.weights().items())
    return model


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_fixed_batch_changes_nothing(data: Path, size: int) -> None:
    found = run_explain(fixed(nets.model(), size), data, verify=False)
    np.testing.assert_allclose(found.values, run_explain(nets.model(), data, verify=False).values, atol=1e-6)


def test_samples_that_mix_are_run_one_by_one_or_refused(data: Path) -> None:
    told: list[str] = []
    found = run_explain(mixing(), data, class_=1, verify=False, tell=lambda text, level: told.append(text))
    alone = np.abs(nets.gradients(X, np.ones(5, int))) / 2
    np.testing.assert_allclose(found.values, alone, rtol=1e-5, atol=1e-6)
    assert any("one by one" in text for text in told)
    with raises(UnsupportedError, "refused", "3"):
        run_explain(fixed(mixing(), 3), data, verify=False)


def test_samples_that_the_model_fails_on_are_told(shell: Shell, tmp_path: Path) -> None:
    """As a row that a table does not have, computed from what is explained: no bound of an input tells of it."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n,2] x) => (float[n,2] y)
        <float[3, 2] table = {1, 2, 3, 4, 5, 6}> {
            f = ReduceSum<keepdims = 0>(x, one) i = Cast<to = 7>(f) row = Gather(table, i) y = Mul(row, x)
        }"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.int64([1]), "one"))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.float32([[0, 1], [40, 50]]))
    for command in ("explain", "attack"):
        result = shell(command, "m.onnx", "--data", "d.npz", "--no-verify")
        assert result.code == 1 and "the model fails on the samples" in result.err and "internal" not in result.err
