"""Functions of the reference executor against Python's standard library, and its limits."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.limits import at_once, run_limited
from onnxgrad_cli.execution.reference import erf


def test_the_reference_runs_one_point_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its evaluators keep what they run in themselves."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float[n, 4] x) => (float[n, 4] y) { y = HardSigmoid(x) }""")
    run = DoubleExecutor(model, beside=True)
    x = np.zeros((1, 4))
    run({"x": x})
    assert run.name == "onnx.reference"
    inside, most = 0, 0

    def slowly(*arguments: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        return run_limited(*arguments)

    monkeypatch.setattr("onnxgrad_cli.execution.double.run_limited", slowly)
    at_once(run, [{"x": x}] * 3)
    assert most == 1


def test_erf_is_that_of_the_standard_library() -> None:
    x = np.concatenate([np.random.default_rng(0).normal(0, 2, 20_000), [0.0, -0.0, 5.9999, 6, -7, 1e-300, 1e300]])
    np.testing.assert_allclose(erf(x), [math.erf(each) for each in x], rtol=1e-13, atol=3e-16)
    np.testing.assert_array_equal(erf(np.array([[np.inf, -np.inf, np.nan]])), [[1, -1, np.nan]])
