"""Properties of all training models.

They have standard operators, overridable weights, equal results at every optimization level, and weights that keep
their places.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from benchmarks import models
from benchmarks.build import OURS, elsewhere, measure
from benchmarks.models.llama import llama
from onnxgrad_cli.builder import build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options

SAMPLES = Path(__file__).parent.parent / "sample_models"
LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]


def _feeds(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "linear_regression":
        return {"x": rng.standard_normal((5, 3)), "y": rng.standard_normal((5, 1))}
    if name == "tiny_transformer":
        return {"input_ids": rng.integers(0, 4, (3, 7)), "y": rng.integers(0, 4, 3)}
    if name == "symbolic":
        return {"x": rng.standard_normal((3, 6, 12)), "mask": np.ones((3, 6)), "y": rng.integers(0, 5, 3)}
    return {"x": rng.standard_normal((4, 1, 8, 8)), "y": rng.integers(0, 10, 4)}


def _build(name: str) -> onnx.ModelProto:
    loss = "mse" if name == "linear_regression" else "cross-entropy"
    return build(onnx.load(SAMPLES / f"{name}.onnx"), Options(losses=(LossSpec(loss),), label="y")).model


def _session(model: onnx.ModelProto | Path, level: ort.GraphOptimizationLevel = LEVELS[-1]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 2
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    inputs = (*session.get_inputs(), *session.get_overridable_initializers())
    fed = {i.name: feeds[i.name].astype(kinds[i.type]) for i in inputs if i.name in feeds}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, fed), strict=True))


@pytest.mark.parametrize("name", ["linear_regression", "digits_mlp", "digits_cnn", "tiny_transformer", "symbolic"])
def test_standard_operators_and_equal_results_at_every_level(name: str) -> None:
    model = _build(name)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    results = [_run(_session(model, level), _feeds(name)) for level in LEVELS]
    for result in results[1:]:
        for key, value in result.items():
            np.testing.assert_allclose(value, results[0][key], rtol=2e-4, atol=2e-6, err_msg=key)


def test_interface() -> None:
    """Inputs: the model's, the label, the weights, which are initializers too. Outputs: loss, then gradients."""
    original = onnx.load(SAMPLES / "digits_cnn.onnx")
    weights = [t.name for t in original.graph.initializer if t.data_type == 1 and "running" not in t.name]
    model = _build("digits_cnn")
    assert [value.name for value in model.graph.input] == ["x", "y", *weights]
    assert set(weights) <= {tensor.name for tensor in model.graph.initializer}
    assert [value.name for value in model.graph.output] == ["loss", *(f"{name}_grad" for name in weights)]
    session = _session(model)
    feeds = _feeds("digits_cnn")
    stored = _run(session, feeds)["loss"]
    fed = {**feeds, **{t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name in weights}}
    assert _run(session, fed)["loss"] == stored
    fed[weights[0]] = fed[weights[0]] * 2
    assert _run(session, fed)["loss"] != stored


def test_backward_nodes_are_named_after_forward_nodes() -> None:
    model = _build("digits_mlp")
    names = {node.name for node in model.graph.node}
    assert len(names) == len(model.graph.node)
    backward = [n for n in model.graph.node if any(p.value == "backward" for p in n.metadata_props)]
    assert backward
    assert all(node.name.startswith("grad/") for node in backward)
    forward = {p.value for node in backward for p in node.metadata_props if p.key == "onnxgrad.forward"}
    assert forward <= names


def test_what_is_not_understood_survives() -> None:
    original = onnx.load(SAMPLES / "digits_mlp.onnx")
    original.metadata_props.add(key="author", value="somebody")
    original.graph.quantization_annotation.add(tensor_name="x")
    original.graph.node[0].metadata_props.add(key="scope", value="fc1")
    first = original.graph.node[0].output[0]
    model = build(original, Options(losses=(LossSpec("mse"),), label="y")).model
    assert any(p.key == "author" for p in model.metadata_props)
    assert model.graph.quantization_annotation[0].tensor_name == "x"
    node = next(node for node in model.graph.node if first in node.output)
    assert any(p.key == "scope" for p in node.metadata_props)


def test_external_weights_are_never_read(tmp_path: Path) -> None:
    path = models.external(tmp_path, size=4 << 20, width=512)
    (tmp_path / "weights.bin").write_bytes(np.random.default_rng(0).standard_normal(1 << 20).astype("f4") / 20)
    model = build(onnx.load(path, load_external_data=False), Options(label="y"), path=path).model
    assert all(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer if t.name[0] == "w")
    onnx.save(model, tmp_path / "train.onnx")
    x = np.random.default_rng(1).standard_normal((3, 512)).astype("f4")
    result = _run(_session(tmp_path / "train.onnx"), {"x": x, "y": x})
    assert all(np.abs(result[f"w{i}_grad"]).max() > 0 for i in range(4))


@pytest.mark.slow
@pytest.mark.long
def test_seven_billion_parameters_within_500_megabytes(tmp_path: Path) -> None:
    path = llama(tmp_path / "llama.onnx")
    tables = [word for name in ("cos", "sin", "mask") for word in ("--freeze", name)]
    for more in ((), ("--optimizer", "adamw")):
        command = [sys.executable, "-c", OURS, "build", str(path), *tables, *more, "--no-verify", "-q"]
        seconds, megabytes, error = elsewhere(measure, command, 120.0)
        assert not error
        assert megabytes < 500, f"{megabytes:.0f} MB in {seconds:.1f} s"
        model = onnx.load(tmp_path / "llama.train.onnx", load_external_data=False)
        roles = describe(model)
        assert len(roles.successors if more else roles.gradients) == (32 * 9 + 3) * (3 if more else 1) + len(more) // 2
        assert roles.slots.keys().isdisjoint(tensor.name for tensor in model.graph.initializer)  # zeros of 54 GB


@pytest.mark.slow
@pytest.mark.long
def test_a_model_over_two_gigabytes(tmp_path: Path) -> None:
    path = models.external(tmp_path, size=9 << 28, width=8192)
    model = build(onnx.load(path, load_external_data=False), Options(label="y"), path=path).model
    onnx.save(model, tmp_path / "train.onnx")
    session = _session(tmp_path / "train.onnx", LEVELS[0])
    x = np.ones((1, 8192), np.float32)
    loss, gradient = session.run(["loss", "w8_grad"], {"x": x, "y": x})
    assert loss == 1.0
    assert gradient.shape == (8192, 8192)
