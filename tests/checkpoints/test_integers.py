"""What was trained as floats is written as the integers that it was: the same file with other numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper

from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.builder import build
from onnxgrad_cli.checkpoints.integers import as_integers
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.jobs.train import Course, run_train
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.trainer import Trainer
from tests.facts import raises
from tests.quantized import X, quantized, stored

LSQ = Options(quantization="lsq", label="target", optimizer="sgd", keep_outputs=True)
TARGET = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
BIASES = ("conv_bias", "fc_bias")


def trained(given: ModelProto, options: Options = LSQ, steps: int = 3) -> tuple[ModelProto, Arrays, Arrays]:
    """The inference model after some steps, the weights it was made of, and the outputs of the training model."""
    built = build(given, options)
    trainer = Trainer(built)
    for _ in range(steps):
        trainer.step({"x": X, "target": TARGET}, 0.05)
    weights = trainer.weights()
    after = merge(given, (), weights, quantized=describe(built.model).quantized)
    new = stored(after)
    for name in BIASES:  # the integers of the file stand for something else than what moves in float
        scale = new.get(f"{name}_quantized_scale")
        if name in weights and scale is not None:
            assert 0 < np.abs(new[f"{name}_quantized"] * scale - weights[name]).max() <= scale.max() * 0.5001
    fed = {name: array for name, array in weights.items() if name in describe(built.model).inputs}
    outputs = Executor(built.model, fallback=False)(
        {"x": X, "target": TARGET, "learning_rate": np.zeros((), np.float32), **fed}
    )
    return after, weights, outputs


@pytest.mark.parametrize("learn", ["ste", "lsq"])
@pytest.mark.parametrize(
    ("activations", "weights", "per_channel", "opset"),
    [
        ("QUInt8", "QUInt8", False, 21),
        ("QInt8", "QInt8", True, 21),
        ("QUInt4", "QInt4", True, 21),
        ("QInt4", "QInt8", False, 18),
    ],
)
@pytest.mark.thinned(3)
def test_the_file_computes_what_the_training_model_does(
    activations: str, weights: str, per_channel: bool, opset: int, learn: str, tmp_path: Path
) -> None:
    given = quantized(tmp_path, activations, weights, opset, per_channel=per_channel)
    after, _, outputs = trained(given, replace(LSQ, quantization=learn))  # type: ignore[arg-type]
    assert after.graph.node == given.graph.node and after.opset_import == given.opset_import
    before, new = stored(given), stored(after)
    assert {name: (x.dtype, x.shape) for name, x in before.items()} == {n: (x.dtype, x.shape) for n, x in new.items()}
    changed = {name for name in new if not np.array_equal(before[name], new[name])}
    assert {"conv_weight_quantized", "fc_weight_quantized"} <= changed
    assert ("x_scale" in changed) == ("fc_bias_quantized_scale" in changed) == (learn == "lsq")
    assert not any("zero_point" in name for name in changed)
    found = Executor(after, fallback=False)({"x": X})["y"]
    np.testing.assert_allclose(found, outputs["y"], rtol=1e-5, atol=1e-5)
    for bias, of_data in zip(BIASES, ("x_scale", "r_scale"), strict=True):  # the kernels of integers go by that
        product = new[of_data] * new[bias.replace("bias", "weight_scale")]
        np.testing.assert_allclose(
            new[f"{bias}_quantized_scale"], np.broadcast_to(product, product.shape or 1), rtol=1e-6
        )


def kernels(model: ModelProto, folder: Path) -> tuple[list[str], np.ndarray]:
    """The operators that onnxruntime makes of a model by default, and what they compute."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = sorted(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)
    return found, session.run(None, {"x": X})[0]


@pytest.mark.parametrize("operators", [False, True], ids=["pairs", "operators"])
def test_the_same_kernels_of_integers_run(operators: bool, tmp_path: Path) -> None:
    """Of 8 bits without a sign: the kernels for others saturate on processors without VNNI."""
    given = quantized(tmp_path, operators=operators)
    after, _, outputs = trained(given)
    ran, y = kernels(after, tmp_path)
    assert {"QLinearConv", "QGemm"} <= set(ran) and ran == kernels(given, tmp_path)[0]
    new = stored(after)
    step = new["y_scale"]
    assert np.abs(y - outputs["y"]).max() <= (1 if not operators else 2) * step * 1.001


def test_weights_that_are_not_trained_follow_their_scales(tmp_path: Path) -> None:
    given = quantized(tmp_path)
    options = replace(LSQ, freeze=("conv_weight", "*bias"))
    after, _, outputs = trained(given, options)
    before, new = stored(given), stored(after)
    scale = new["conv_bias_quantized_scale"]
    old = before["conv_bias_quantized"] * before["conv_bias_quantized_scale"]
    np.testing.assert_allclose(new["conv_bias_quantized"] * scale, old, atol=float(scale[0]) * 0.501)
    found = Executor(after, fallback=False)({"x": X})["y"]
    assert np.abs(found - outputs["y"]).max() <= new["y_scale"] * 1.001  # frozen biases are rounded by a half step


BLOCKS = """<ir_version: 10, opset_import: ["": 21]> net (float[n, 4] x) => (float[n, 6] y)
    <float[2, 6] s = {0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.3, 0.2, 0.1, 0.3, 0.2, 0.1},
     int8[2, 6] z = {1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1}> {
    v = DequantizeLinear <axis = 0, block_size = 2> (w_quantized, s, z)
    u = DequantizeLinear <axis = 0, block_size = 2> (w_quantized, s, z)
    a = MatMul(x, v)
    b = MatMul(x, u)
    y = Add(a, b) }"""


def test_blocks_and_integers_that_two_nodes_read_alike() -> None:
    """They are one weight, quantized once."""
    model = onnx.parser.parse_model(BLOCKS)
    integers = np.arange(24, dtype=np.int8).reshape(4, 6)
    model.graph.initializer.append(numpy_helper.from_array(integers, "w_quantized"))
    built = build(model, Options(quantization="lsq", label="t"))
    assert sorted(built.training.trained) == ["s", "w"]
    said, values = describe(built.model).quantized, stored(built.model)
    same = as_integers(model, said, {"w": values["w"], "s": values["s"]})
    np.testing.assert_array_equal(same["w_quantized"], integers)
    twice = as_integers(model, said, {"w": values["w"], "s": values["s"] * 2})
    zeros = stored(model)["z"].repeat(2, 0).astype(np.float32)
    np.testing.assert_array_equal(twice["w_quantized"], np.rint((integers - zeros) / 2) + zeros)


def test_rounding_is_to_even_and_saturates(tmp_path: Path) -> None:
    given = quantized(tmp_path, "QUInt8", "QInt8")
    said = describe(build(given, LSQ).model).quantized
    scale = stored(given)["fc_weight_scale"]
    values = np.zeros((5, 64), np.float32)
    values[0, :6] = np.array([0.5, 1.5, -2.5, 1000, -1000, 3.2], np.float32) * scale
    found = as_integers(given, said, {"fc_weight": values})["fc_weight_quantized"]
    assert found.dtype == np.int8 and found[0, :6].tolist() == [0, 2, -2, 127, -128, 3]


def test_a_run_and_its_checkpoint_write_the_same_file(tmp_path: Path) -> None:
    quantized(tmp_path)
    np.savez(tmp_path / "data.npz", x=X, target=TARGET)
    model, out = tmp_path / "quantized.onnx", tmp_path / "out.onnx"
    run_train(
        model, tmp_path / "data.npz", out, replace(LSQ, keep_outputs=False, ema=0.5), Course(epochs=2, batch_size=3)
    )
    run_export(tmp_path / "out.onnx.run" / "checkpoint.safetensors", model, tmp_path / "exported.onnx")
    one, other = stored(onnx.load(out)), stored(onnx.load(tmp_path / "exported.onnx"))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    run_export(tmp_path / "out.onnx.run" / "checkpoint.safetensors", model, tmp_path / "ema.onnx", use_ema=True)
    averaged = stored(onnx.load(tmp_path / "ema.onnx"))
    assert averaged["fc_weight_quantized"].dtype == np.uint8
    assert not np.array_equal(one["fc_weight_quantized"], averaged["fc_weight_quantized"])


# -- what can't be -----------------------------------------------------------------------------------------------------


def test_a_scale_that_is_not_above_zero_is_refused(tmp_path: Path) -> None:
    given = quantized(tmp_path)
    said = describe(build(given, LSQ).model).quantized
    for value in (0, -0.1, np.nan):
        with raises(OnnxgradError, "wrong_value", "x_scale", *([f"{value:g}"] if np.isfinite(value) else [])):
            as_integers(given, said, {"x_scale": np.array(value, np.float32)})


def test_a_bias_that_no_longer_fits_is_refused(tmp_path: Path) -> None:
    given = quantized(tmp_path)
    said = describe(build(given, LSQ).model).quantized
    with raises(OnnxgradError, "wrong_value", "conv_bias", "conv_bias_quantized"):
        as_integers(given, said, {"x_scale": np.array(1e-9, np.float32)})


def test_another_model_is_refused(tmp_path: Path) -> None:
    given = quantized(tmp_path)
    said = describe(build(given, LSQ).model).quantized
    with raises(OnnxgradError, "mismatch", "fc_weight_quantized", "5", "64", "5", "63"):
        as_integers(given, said, {"fc_weight": np.zeros((5, 63), np.float32)})
    with raises(OnnxgradError, "mismatch", "fc_weight_quantized"):
        as_integers(onnx.load(tmp_path / "float.onnx"), said, {"fc_weight": np.zeros((5, 64), np.float32)})


def test_what_can_not_be_written_back_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantized(tmp_path)
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "dynamic.onnx", op_types_to_quantize=["Gemm", "MatMul"])
    np.savez(tmp_path / "data.npz", x=X, target=TARGET)
    options = replace(LSQ, quantization="ste", keep_outputs=False)
    with raises(
        UsageError,
        "conflict",
        "fc_weight_Transposed",
        "fc_weight_Transposed_quantized",
        "DequantizeLinear",
        "MatMulInteger",
        "DynamicQuantizeLSTM",
    ):
        run_train(tmp_path / "dynamic.onnx", tmp_path / "data.npz", options=options)
    with raises(UsageError, "conflict", "x_scale"):
        run_train(tmp_path / "quantized.onnx", tmp_path / "data.npz", options=replace(options, train=("x_scale",)))
    assert not list(tmp_path.glob("*.run"))
