"""Runs of an executor leave no memory behind, and weights of few bits are computed in float64."""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser
import pytest

from onnxgrad_cli.common.memory import taken_memory
from onnxgrad_cli.execution.executor import Executor, to_double
from tests.passes.test_low_bit import FORMS, Net


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there it is known what memory a process has")
def test_runs_of_an_executor_leave_no_memory_behind() -> None:
    """Each try of a search for sizes that fit may take gigabytes, and fail at a later node."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        net (int64[1] size) => (float y) <float[1] one = {1}, int64[1] wrong = {3}>
        { wide = Expand(one, size) more = Exp(wide) bad = Reshape(more, wrong) y = ReduceSum<keepdims = 0>(bad) }""")
    run, before = Executor(model), taken_memory()
    for size in (10**6, 4 * 10**7, 8 * 10**7):
        with pytest.raises(Exception, match="Reshape"):
            run({"size": np.array([size])})
    assert taken_memory() - before < 10**8


@pytest.mark.parametrize("form", list(FORMS))
def test_kernels_of_few_bits_in_float64(form: str) -> None:
    net = Net(**FORMS[form])  # type: ignore[arg-type]
    (y,) = Executor(to_double(net.model), fallback=False)({"x": net.x.astype(np.float64)}).values()
    h = np.tanh(net.x @ net.matrices[0].T + net.biases[0]) @ net.matrices[1].T + net.biases[1]
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, h, rtol=1e-10, atol=1e-10)
