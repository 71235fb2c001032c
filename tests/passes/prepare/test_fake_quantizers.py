"""A model whose weights are stored as integers is trained through them, by the straight-through estimator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.select import QUANTIZED
from onnxgrad_cli.passes.prepare.fake_quantizers import put_dequantizers
from tests.facts import raises

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype(np.float32)
SCALE, ZERO = np.float32([0.1, 0.02, 0.3]), np.int8([3, -7, 0])
Q = RNG.integers(-100, 100, (4, 3)).astype(np.int8)
BIAS, BIAS_SCALE = np.int32([400, -300, 20]), np.float32(0.01)
STE = Options(quantization="ste", label="t", keep_outputs=True)


def model(zero: bool = True, dtype: int = TensorProto.INT8) -> ModelProto:
    """y = x W + b: W is stored by integers with a scale a column, b as int32."""
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y) {{
        w = DequantizeLinear <axis = 1> (w_quantized, s{", z" if zero else ""})
        p = MatMul(x, w)
        b = DequantizeLinear(b_quantized, bs)
        y = Add(p, b)
    }}"""
    found = onnx.parser.parse_model(text)
    stored = {"w_quantized": Q, "s": SCALE, "b_quantized": BIAS, "bs": BIAS_SCALE, **({"z": ZERO} if zero else {})}
    if dtype == TensorProto.INT4:
        stored = {name: x // 16 if x.dtype == np.int8 else x for name, x in stored.items()}
    for name, values in stored.items():
        tensor = numpy_helper.from_array(values, name)
        if values.dtype == np.int8 and dtype != TensorProto.INT8:
            tensor = helper.make_tensor(name, dtype, values.shape, values.ravel().tolist())
        found.graph.initializer.append(tensor)
    return found


@pytest.mark.parametrize("dtype", [TensorProto.INT8, TensorProto.INT4])
@pytest.mark.parametrize("zero", [True, False])
def test_the_forward_part_stays_and_the_gradients_are_those_of_what_is_quantized(
    zero: bool, dtype: int, tmp_path: Path
) -> None:
    given = model(zero, dtype)
    report = run_build(given, tmp_path / "t.onnx", STE)
    assert report.status == "built"
    assert [caution.text[:2] for caution in report.cautions if caution.subject == "quantization"] == ["1 "]
    trained = onnx.load(tmp_path / "t.onnx")
    stored = {t.name: t for t in trained.graph.initializer}
    assert {"w", "w_quantized"}.isdisjoint(name for name, t in stored.items() if t.data_type == dtype)
    target = RNG.normal(size=(5, 3)).astype(np.float32)
    found = Executor(trained, fallback=False)({"x": X, "t": target})
    np.testing.assert_allclose(found["y"], Executor(given, fallback=False)({"x": X})["y"], rtol=1e-5, atol=1e-5)
    names = [name.removesuffix("_grad") for name in found if name.endswith("_grad")]
    values = {name: numpy_helper.to_array(stored[name]) for name in names}
    w, b = (torch.tensor(values[n], requires_grad=True) for n in sorted(names, key=lambda n: -values[n].ndim))
    torch.nn.functional.mse_loss(torch.tensor(X) @ w + b, torch.tensor(target)).backward()
    for name in names:
        expected = w.grad if values[name].ndim == 2 else b.grad
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-4, atol=1e-5)


def test_a_weight_moves_in_float_and_is_read_in_steps() -> None:
    trained = build(model(), STE).model
    (name,) = [t.name for t in trained.graph.initializer if list(t.dims) == [4, 3] and t.data_type == 1]
    w = np.full((4, 3), 0.36, np.float32)
    found = Executor(trained, fallback=False)({"x": X, "t": np.zeros((5, 3), np.float32), name: w})
    read = np.round(w / SCALE) * SCALE
    np.testing.assert_allclose(found["y"], X @ read + BIAS * BIAS_SCALE, rtol=1e-5, atol=1e-5)


def test_a_bias_moves_in_float_and_is_read_as_the_file_will_hold_it() -> None:
    """Bit for bit, of whatever size; its gradient is that of what is read, as if that were not rounded."""
    trained = build(model(), STE).model
    (name,) = [t.name for t in trained.graph.initializer if list(t.dims) == [3] and t.name.startswith("b")]
    run = Executor(trained, fallback=False)
    feeds = {"x": np.zeros((5, 4), np.float32), "t": RNG.normal(size=(5, 3)).astype(np.float32)}
    for size in 10.0 ** np.arange(-6, 5, 0.25):
        bias = (RNG.normal(size=3) * size).astype(np.float32)
        read = np.rint(bias / BIAS_SCALE).astype(np.int32).astype(np.float32) * BIAS_SCALE
        found = run({**feeds, name: bias})
        assert np.array_equal(found["y"], np.tile(read, (5, 1)))
        expected = (2 / 15 * (read - feeds["t"].astype(np.float64))).sum(0)
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-4, atol=1e-5)


def test_without_the_estimator_the_integers_stay() -> None:
    with raises(UnsupportedError, "refused") as error:
        build(model(), Options())
    assert f"w_quantized: {QUANTIZED}" in error.value.details
    assert "`quantization='ste'`" in (error.value.hint or "")


@pytest.mark.parametrize(("shape", "axis"), [((4, 1), 0), ((1, 3), 1), ((), 0)])
def test_a_scaled_cast_becomes_a_dequantizer_along_its_axis(shape: tuple[int, ...], axis: int) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y) {
        f = Cast<to = 1>(q) w = Mul(f, s) y = MatMul(x, w) }"""
    found = onnx.parser.parse_model(text)
    scale = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(np.float32)
    found.graph.initializer.extend([numpy_helper.from_array(Q, "q"), numpy_helper.from_array(scale, "s")])
    graph = Graph(found)
    infer_types(graph)
    assert put_dequantizers(graph)
    (node,) = (node for node in graph.nodes if node.op_type == "DequantizeLinear")
    assert attributes_of(node)["axis"] == axis
    x = np.float32(RNG.standard_normal((2, 4)))
    np.testing.assert_allclose(Executor(graph.commit())({"x": x})["y"], x @ (Q * scale), rtol=1e-5)
