"""Files of onnxgrad that a simplifier, an optimizer or a quantizer has rewritten still work, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad_cli.passes.parameters.changed import HINT
from tests.cli_harness import Shell, save

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

pytestmark = pytest.mark.slow

MLP = """
<ir_version: 9, opset_import: ["": 18], producer_name: "pytorch">
mlp (float[n, 2] x) => (float[n, 3] y)
<float[4, 2] "a.weight" = {0.5, -1, 2, 0.3, -0.7, 1, 0.2, 0.9}, float[4] "a.bias" = {0.1, -0.2, 0.3, 0.5},
 float[3, 4] "b.weight" = {1, -1, 0.5, 0.2, 0.3, 0.7, -0.4, 0.6, 0.8, 0.1, -0.9, 1.2}, float[3] "b.bias" = {1, 2, 3}>
{
  h = Gemm <transB = 1> (x, "a.weight", "a.bias")
  t = Tanh(h)
  y = Gemm <transB = 1> (t, "b.weight", "b.bias")
}
"""
"""Linear layers as Gemm: no transposed weight is stored in derivatives."""

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)
WEIGHTS = ["a.weight", "a.bias", "b.weight", "b.bias"]


def simplified(source: str, target: str) -> None:
    onnxsim = pytest.importorskip("onnxsim", reason="the package onnxsim simplifies models")
    model, same = onnxsim.simplify(onnx.load(source))
    assert same
    onnx.save(model, target)


def preprocessed(source: str, target: str) -> None:
    pytest.importorskip("sympy", reason="onnxruntime's preprocessing infers shapes with sympy")
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(source, target)


def fused(source: str, target: str) -> None:
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    optimizer.optimize_model(source, model_type="bert", num_heads=1, hidden_size=4).save_model_to_file(target)


def optimized(source: str, target: str) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = target
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


class Calibration:
    """What `quantize_static` reads: one batch."""

    def __init__(self) -> None:
        self.left = [{"x": X}]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


def quantized(source: str, target: str) -> None:
    from onnxruntime.quantization import quantize_static

    preprocessed(source, "preprocessed.onnx")
    quantize_static("preprocessed.onnx", target, Calibration())


Tool = Callable[[str, str], None]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=X, label=rng.normal(size=(16, 3)).astype(np.float32))
    np.savez("classes.npz", x=X, label=np.arange(16) % 5)
    np.savez("slopes.npz", x=X, label=rng.normal(size=(16, 3, 2)).astype(np.float32))
    return Shell(tmp_path, capsys)


def run(path: str) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": X}), strict=True))


def slopes(path: str) -> np.ndarray:
    """The Jacobian of each sample, by central differences of the outputs of the file's own network."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    h = np.float32(1e-2)
    columns = []
    for axis in range(2):
        step = np.eye(2, dtype=np.float32)[axis] * h
        above, below = (session.run(["y"], {"x": X + sign * step})[0] for sign in (1, -1))
        columns.append((above - below) / (2 * h))
    return np.stack(columns, -1)


@pytest.mark.parametrize("tool", [simplified, preprocessed, fused, optimized])
def test_a_trained_model(shell: Shell, tool: Tool) -> None:
    train = ("train", "mlp.onnx", "--loss", "mse", "--data", "data.npz", "--epochs", 1, "-o", "t.onnx")
    assert shell(*train).code == 0
    tool("t.onnx", "s.onnx")
    np.testing.assert_allclose(run("s.onnx")["y"], run("t.onnx")["y"], atol=1e-5)
    result = shell("export", "s.onnx", "--model", "mlp.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    np.testing.assert_allclose(run("back.onnx")["y"], run("t.onnx")["y"], atol=1e-6)
    result = shell("train", "s.onnx", "--loss", "mse", "--data", "data.npz", "--epochs", 1, "-o", "again.onnx")
    assert result.code == 0, result.err
    result = shell("inspect", "s.onnx", "--loss", "mse", "--json")
    assert sorted(each["name"] for each in result.json["weights"]) == sorted(WEIGHTS)


@pytest.mark.parametrize("tool", [simplified, preprocessed, fused, optimized])
def test_a_training_model(shell: Shell, tool: Tool) -> None:
    assert shell("build", "mlp.onnx", "--loss", "mse", "-o", "t.onnx", "--no-verify").code == 0
    tool("t.onnx", "s.onnx")
    check, export = shell("check", "s.onnx"), shell("export", "s.onnx", "--model", "mlp.onnx", "-o", "back.onnx")
    if check.code:  # onnxsim takes weights out of the inputs unless it is told not to
        assert check.facts == ("mismatch", "a.weight") and "a.weight" in export.facts
    else:
        assert export.code == 0, export.err
        np.testing.assert_allclose(run("back.onnx")["y"], run("mlp.onnx")["y"], atol=1e-6)


@pytest.mark.parametrize("tool", [simplified, preprocessed, fused, optimized])
def test_a_model_of_derivatives(shell: Shell, tool: Tool) -> None:
    """It is trained as one whose derivatives are those of its network, or refused."""
    derive = ("derive", "mlp.onnx", "--kind", "jacobian", "--wrt", "x", "--per-sample", "--option", "keep-outputs")
    assert shell(*derive, "-o", "d.onnx").code == 0
    tool("d.onnx", "s.onnx")
    result = shell("train", "s.onnx", "--loss", "mse:y_jacobian_x", "--data", "slopes.npz", "--epochs", 3,
                   "--learning-rate", 0.05, "-o", "t.onnx")  # fmt: skip
    assert result.code in (0, 3), result.err
    if result.code == 3:
        assert result.problem is not None and result.problem.hint == HINT.replace("`", "'")
        return
    np.testing.assert_allclose(run("t.onnx")["y_jacobian_x"], slopes("t.onnx"), atol=1e-3)
    result = shell("export", "t.onnx", "--model", "mlp.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    np.testing.assert_allclose(run("back.onnx")["y"], run("t.onnx")["y"], atol=1e-5)


def test_a_new_head_is_quantized(shell: Shell) -> None:
    model = onnx.shape_inference.infer_shapes(onnx.load("mlp.onnx"))
    for tensor in model.graph.initializer:  # as PyTorch's newer exporter declares them
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    onnx.save(model, "mlp.onnx")
    result = shell("train", "mlp.onnx", "--loss", "cross-entropy", "--data", "classes.npz", "--classes", 5, "--preset",
                   "head", "--epochs", 1, "-o", "t.onnx")  # fmt: skip
    assert result.code == 0, result.err
    quantized("t.onnx", "q.onnx")
    assert np.abs(run("q.onnx")["y"] - run("t.onnx")["y"]).max() < 0.2
    result = shell("export", "q.onnx", "--model", "mlp.onnx", "-o", "back.onnx")
    assert result.code == 1 and result.facts[1:3] == ("q.onnx", "a.bias_quantized_scale")
