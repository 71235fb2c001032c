"""Models in float64 whose large inputs are made a piece at a time."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli.execution import double
from onnxgrad_cli.execution.double import Deferred, DoubleExecutor
from onnxgrad_cli.execution.reference import erf


def chain(count: int, rng: np.random.Generator) -> onnx.ModelProto:
    """A chain of products, of which one weight is read twice."""
    names = [f"w{i}" for i in range(count)]
    steps = "".join(f"a{i} = MatMul(h{i}, w{i}) h{i + 1} = Erf(a{i}) " for i in range(count))
    inputs = ", ".join(f"float[8, 8] {name}" for name in names)
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[2, 8] h0, {inputs}) => (float[2, 8] y) {{ {steps} y = MatMul(h{count}, w0) }}""")
    values = [rng.standard_normal((8, 8)).astype(np.float32) for _ in names]
    model.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in zip(names, values, strict=True))
    return model


@pytest.mark.parametrize("piece", [1, 1200, 10**9])
def test_pieces_compute_what_the_whole_does(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    rng = np.random.default_rng(0)
    model, x = chain(4, rng), rng.standard_normal((2, 8))
    expected = DoubleExecutor(model)({"h0": x})["y"]
    monkeypatch.setattr(double, "PIECE", piece)
    monkeypatch.setattr(double, "SHARED", 1)
    run = DoubleExecutor(model)
    for _ in range(2):
        np.testing.assert_allclose(run({"h0": x})["y"], expected, rtol=1e-14)
    other = rng.standard_normal((8, 8))
    fed = run({"h0": x, "w1": Deferred.copy(other.astype(np.float32))})["y"]
    np.testing.assert_allclose(fed, run({"h0": x, "w1": other.astype(np.float32).astype(np.float64)})["y"], rtol=1e-14)
    np.testing.assert_allclose(run({"h0": x})["y"], expected, rtol=1e-14)


def test_all_pieces_run_where_a_kernel_turns_out_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece is cut at Asinh, which no other test uses, and the later pieces stay."""
    rng = np.random.default_rng(0)
    model, h = chain(4, rng), rng.standard_normal((2, 8))
    x, weights = h, [numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer]
    for node in model.graph.node:
        if node.op_type == "Erf":
            node.op_type = "Asinh"
    for w in weights:
        h = np.arcsinh(h @ w)
    monkeypatch.setattr(double, "PIECE", 1)
    monkeypatch.setattr(double, "SHARED", 1)
    np.testing.assert_allclose(DoubleExecutor(model)({"h0": x})["y"], h @ weights[0], rtol=1e-12)


def test_erf_is_that_of_the_standard_library() -> None:
    x = np.concatenate([np.random.default_rng(0).normal(0, 2, 20_000), [0.0, -0.0, 5.9999, 6, -7, 1e-300, 1e300]])
    np.testing.assert_allclose(erf(x), [math.erf(each) for each in x], rtol=1e-13, atol=3e-16)
    np.testing.assert_array_equal(erf(np.array([[np.inf, -np.inf, np.nan]])), [[1, -1, np.nan]])
