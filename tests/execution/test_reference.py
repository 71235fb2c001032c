"""Functions of the reference executor against Python's standard library and onnxruntime, and its limits."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import at_once, run_limited
from onnxgrad_cli.execution.reference import erf
from tests.execution.test_double import model_of


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


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.thinned(3)
def test_averages_over_windows_are_those_of_onnxruntime(spatial: int, dilation: int) -> None:
    x, sizes = np.random.default_rng(0).normal(size=(2, 3, 9, 10, 11)[: spatial + 2]), [2, 3, 2][:spatial]
    for stride, pads, counted, ceil in itertools.product((1, 2, 3), ((0, 0), (0, 1), (1, 1)), (0, 1), (0, 1)):
        node = helper.make_node(
            "AveragePool", ["x"], ["y"], kernel_shape=sizes, strides=[stride] * spatial, dilations=[dilation] * spatial,
            pads=[pads[0]] * spatial + [pads[1]] * spatial, count_include_pad=counted, ceil_mode=ceil,
        )  # fmt: skip
        model = model_of(node, x)
        expected = Executor(model, fallback=False)({"x": x.astype(np.float32)})["y"]
        run = DoubleExecutor(model)
        np.testing.assert_allclose(run({"x": x})["y"], expected, rtol=1e-4, atol=1e-6)
        assert run.name == "onnx.reference"


def test_a_large_average_takes_no_python_loop_over_its_windows() -> None:
    """onnx's own implementation takes seconds here, and minutes for the proof of an Inception."""
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1] * 4)
    x = np.ones((2, 64, 56, 56))
    run = DoubleExecutor(model_of(node, x))
    start = time.process_time()
    assert run({"x": x})["y"].shape == x.shape
    assert time.process_time() - start < 1
