"""`onnxgrad export`: weights return from every file that onnxgrad wrote to the model that they came from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.cli_harness import Shell

X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)
SHAPES = {"first.weight": (3, 5), "first.bias": (5,), "last.weight": (5, 2), "last.bias": (2,)}


def network(seed: int = 0, hidden: int = 5) -> ModelProto:
    rng = np.random.default_rng(seed)
    shapes = {name: tuple(hidden if size == 5 else size for size in shape) for name, shape in SHAPES.items()}
    tensors = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "first.weight"], ["h"]),
        helper.make_node("Add", ["h", "first.bias"], ["k"]),
        helper.make_node("Tanh", ["k"], ["t"]),
        helper.make_node("MatMul", ["t", "last.weight"], ["m"]),
        helper.make_node("Add", ["m", "last.bias"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph(nodes, "net", [x], [y], tensors)
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "net.onnx")
    rng = np.random.default_rng(1)
    np.savez("data.npz", x=X, label=rng.normal(size=(16, 2)).astype(np.float32))
    np.savez("slopes.npz", x=X, slope=rng.normal(size=(16, 2, 3)).astype(np.float32))
    return Shell(tmp_path, capsys)


def tensors(path: str) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def run(path: str) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": X})[0]


def train_on_slopes(shell: Shell, *options: object) -> None:
    """Train the Jacobian of a network, as a model of its own."""
    result = shell("derive", "net.onnx", "--kind", "jacobian", "--wrt", "x", "--per-sample", "--option",
                   "keep-outputs", "-o", "d.onnx")  # fmt: skip
    assert result.code == 0, result.err
    result = shell("train", "d.onnx", "--loss", "mse:y_jacobian_x:slope", "--data", "slopes.npz", "--epochs", 2,
                   "--learning-rate", 0.05, "-o", "trained.onnx", *options)  # fmt: skip
    assert result.code == 0, result.err


CHECKPOINT = "trained.onnx.run/checkpoint.safetensors"


@pytest.mark.parametrize("source", ["trained.onnx", CHECKPOINT, "trained.onnx.run"])
def test_from_a_model_of_derivatives(shell: Shell, source: str) -> None:
    train_on_slopes(shell)
    result = shell("export", source, "--model", "net.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    np.testing.assert_allclose(run("back.onnx"), run("trained.onnx"), atol=1e-6)
    assert np.abs(run("back.onnx") - run("net.onnx")).max() > 0.05
    assert list(tensors("back.onnx")) == list(SHAPES)


@pytest.mark.parametrize("source", ["trained.onnx", CHECKPOINT])
def test_what_keeps_its_values_is_reported(shell: Shell, source: str) -> None:
    """The model of derivatives of an inner value has no weights behind it."""
    result = shell(
        "derive", "net.onnx", "--kind", "jacobian", "--of", "k", "--wrt", "x", "--per-sample", "-o", "d.onnx"
    )
    assert result.code == 0, result.err
    np.savez("slopes.npz", x=X, slope=np.ones((16, 5, 3), np.float32))
    result = shell("train", "d.onnx", "--loss", "mse:k_jacobian_x:slope", "--data", "slopes.npz", "--epochs", 1, "-o",
                   "trained.onnx")  # fmt: skip
    assert result.code == 0, result.err
    result = shell("export", source, "--model", "net.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    before, trained, after = (tensors(path) for path in ("net.onnx", "trained.onnx", "back.onnx"))
    kept = [name for name in SHAPES if name not in trained]
    assert kept[-2:] == ["last.weight", "last.bias"]
    assert f" {', '.join(map(repr, kept))}:" in result.err
    for name in SHAPES:
        np.testing.assert_array_equal(after[name], before[name] if name in kept else trained[name])


def test_frozen_weights_must_be_the_same(shell: Shell) -> None:
    train_on_slopes(shell, "--freeze", "first.weight")
    onnx.save(network(seed=7), "other.onnx")
    result = shell("export", CHECKPOINT, "--model", "other.onnx", "-o", "back.onnx")
    assert result.code == 1 and not Path("back.onnx").exists()
    assert result.facts == ("mismatch", "checkpoint.safetensors", "first.weight", "last.bias")
    assert shell("export", CHECKPOINT, "--model", "net.onnx", "-o", "back.onnx").code == 0


@pytest.mark.parametrize("source", ["trained.onnx", CHECKPOINT])
def test_weights_of_other_sizes_are_refused(shell: Shell, source: str) -> None:
    train_on_slopes(shell)
    onnx.save(network(hidden=6), "wide.onnx")
    result = shell("export", source, "--model", "wide.onnx", "-o", "back.onnx")
    assert result.code == 1 and not Path("back.onnx").exists()
    sizes = ("float32", "3", "5", "float32", "3", "6")
    assert result.facts == ("mismatch", Path(source).name, "first.weight", *sizes, "2")


@pytest.mark.parametrize("source", ["trained.onnx", CHECKPOINT])
def test_weights_without_a_place_are_refused(shell: Shell, source: str) -> None:
    train_on_slopes(shell)
    model = network()
    for node in model.graph.node:
        node.input[:] = [f"net.{name}" if name in SHAPES else name for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = f"net.{tensor.name}"
    onnx.save(model, "renamed.onnx")
    result = shell("export", source, "--model", "renamed.onnx", "-o", "back.onnx")
    assert result.code == 1 and not Path("back.onnx").exists()
    without_bias = source == CHECKPOINT  # the Jacobian does not depend on the last bias, so it was not trained
    missing = [name for name in sorted(SHAPES) if not (without_bias and name == "last.bias")]
    assert result.facts == ("mismatch", Path(source).name, *missing)


def test_adapters_of_a_model_of_derivatives(shell: Shell) -> None:
    train_on_slopes(shell, "--lora", 2)
    for number, source in enumerate(["trained.onnx", CHECKPOINT]):
        result = shell("export", source, "--model", "net.onnx", "-o", f"back{number}.onnx")
        assert result.code == 0, result.err
        np.testing.assert_allclose(run(f"back{number}.onnx"), run("trained.onnx"), atol=1e-6)
        assert list(tensors(f"back{number}.onnx")) == list(SHAPES)


def test_from_a_training_model(shell: Shell) -> None:
    """The file holds what training begins with; a loop of one's own stores later values in it."""
    assert shell("build", "net.onnx", "--loss", "mse", "--freeze", "first.*", "-o", "t.onnx").code == 0
    model = onnx.load("t.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "last.bias":
            tensor.CopyFrom(numpy_helper.from_array(np.array([3, 4], np.float32), tensor.name))
    onnx.save(model, "t.onnx")
    result = shell("export", "t.onnx", "--model", "net.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    before = tensors("net.onnx")
    np.testing.assert_allclose(run("back.onnx"), run("net.onnx") - before["last.bias"] + [3, 4], atol=1e-6)
    onnx.save(network(seed=7), "other.onnx")
    result = shell("export", "t.onnx", "--model", "other.onnx", "-o", "other_back.onnx")
    assert result.code == 1 and result.facts == ("mismatch", "t.onnx", "first.weight", "first.bias")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_from_a_training_model_with_adapters(shell: Shell, kind: str) -> None:
    options = ["--lora", "2:4", *(["--lora-dora"] if kind == "dora" else [])]
    assert shell("build", "net.onnx", "--loss", "mse", "-o", "t.onnx", *options).code == 0
    rng, model = np.random.default_rng(3), onnx.load("t.onnx")
    for tensor in model.graph.initializer:
        if "_lora_B" in tensor.name:
            tensor.CopyFrom(numpy_helper.from_array(rng.normal(size=tensor.dims).astype(np.float32), tensor.name))
    onnx.save(model, "t.onnx")
    result = shell("export", "t.onnx", "--model", "net.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    kept = shell("build", "net.onnx", "--loss", "mse", "-o", "k.onnx", "--keep-outputs", "--force", *options)
    assert kept.code == 0
    session = onnxruntime.InferenceSession("k.onnx", providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_overridable_initializers()}
    feeds = {name: array for name, array in tensors("t.onnx").items() if name in names}
    fed = {"x": X, "label": np.zeros((16, 2), np.float32), **feeds}
    np.testing.assert_allclose(run("back.onnx"), session.run(["y"], fed)[0], atol=1e-5)


def test_models_whose_weights_are_inputs(shell: Shell) -> None:
    assert shell("build", "net.onnx", "--loss", "mse", "--artifacts", "parts", "--no-verify").code == 0
    for part in ("training_model.onnx", "eval_model.onnx"):
        result = shell("export", f"parts/{part}", "--model", "net.onnx", "-o", "back.onnx")
        assert result.code == 1 and result.facts == ("no_data", part, "first.weight")
    assert shell("export", "parts/checkpoint", "--model", "net.onnx", "-o", "back.onnx").code == 0
    options = ["--weights", "inputs", "-o", "t.onnx", "--no-verify"]
    assert shell("build", "net.onnx", "--loss", "mse", *options).code == 0
    result = shell("export", "t.onnx", "--model", "net.onnx", "-o", "beside.onnx")
    assert result.code == 0, result.err
    np.testing.assert_array_equal(run("beside.onnx"), run("net.onnx"))


def quantized() -> ModelProto:
    """The network with its first matrix stored as int8."""
    model = network()
    floats = numpy_helper.to_array(model.graph.initializer[0])
    scale = np.float32(np.abs(floats).max() / 127)
    integers = np.round(floats / scale).astype(np.int8)
    kept = [tensor for tensor in model.graph.initializer if tensor.name != "first.weight"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    for name, array in {"q": integers, "scale": scale, "zero": np.int8(0)}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    nodes = [helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["first.weight"]), *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def test_integers_return_from_a_trained_model(shell: Shell) -> None:
    onnx.save(quantized(), "q.onnx")
    result = shell("train", "q.onnx", "--loss", "mse", "--quantization", "ste", "--data", "data.npz", "--epochs", 3,
                   "--learning-rate", 0.1, "-o", "trained.onnx")  # fmt: skip
    assert result.code == 0, result.err
    assert (tensors("trained.onnx")["q"] != tensors("q.onnx")["q"]).any()
    result = shell("export", "trained.onnx", "--model", "q.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    np.testing.assert_array_equal(run("back.onnx"), run("trained.onnx"))
    assert shell("build", "q.onnx", "--loss", "mse", "--quantization", "ste", "-o", "t.onnx", "--no-verify").code == 0
    result = shell("export", "t.onnx", "--model", "q.onnx", "-o", "start.onnx")
    assert result.code == 0, result.err
    np.testing.assert_array_equal(run("start.onnx"), run("q.onnx"))


def test_adapters_beside_integers_do_not_return_from_a_model(shell: Shell) -> None:
    onnx.save(quantized(), "q.onnx")
    result = shell("train", "q.onnx", "--loss", "mse", "--lora", 2, "--data", "data.npz", "--epochs", 1, "-o",
                   "trained.onnx")  # fmt: skip
    assert result.code == 0, result.err
    result = shell("export", "trained.onnx", "--model", "q.onnx", "-o", "back.onnx")
    assert result.code == 1 and not Path("back.onnx").exists()
    assert result.facts == ("mismatch", "trained.onnx", "q_lora_A", "q_lora_B")
    assert shell("export", CHECKPOINT, "--model", "q.onnx", "-o", "back.onnx").code == 0
    result = shell("inspect", "back.onnx", "--loss", "mse", "--json")
    assert not any("onnxgrad_const" in each["name"] for each in result.json["weights"])


def test_weights_alone_say_what_they_leave(shell: Shell) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"last.bias": np.array([1, 2], np.float32)}, "some.safetensors")
    result = shell("export", "some.safetensors", "--model", "net.onnx", "-o", "back.onnx")
    assert result.code == 0, result.err
    assert " 'first.weight', 'first.bias', 'last.weight':" in result.err


def test_averages_of_a_training_model(shell: Shell) -> None:
    assert shell("build", "net.onnx", "--loss", "mse", "--optimizer", "sgd", "--ema", 0.9, "-o", "t.onnx").code == 0
    result = shell("export", "t.onnx", "--model", "net.onnx", "--use-ema", "-o", "back.onnx")
    assert result.code == 2 and result.facts[1:] == ("use_ema", "t.onnx")
    train_on_slopes(shell)
    result = shell("export", "trained.onnx", "--model", "net.onnx", "--use-ema", "-o", "back.onnx")
    assert result.code == 2 and result.facts == ("conflict", "use_ema")


def test_a_trained_model_hands_on_how_its_data_were_prepared(shell: Shell) -> None:
    result = shell("train", "net.onnx", "--loss", "mse", "--data", "data.npz", "--epochs", 1, "--normalize", "auto",
                   "-o", "trained.onnx")  # fmt: skip
    assert result.code == 0, result.err
    assert shell("export", "trained.onnx", "--model", "net.onnx", "-o", "back.onnx").code == 0
    assert shell("export", CHECKPOINT, "--model", "net.onnx", "-o", "again.onnx").code == 0
    said = [
        {entry.key: entry.value for entry in onnx.load(path).metadata_props}
        for path in ("trained.onnx", "back.onnx", "again.onnx")
    ]
    assert said[0] == said[1] == said[2] and len(said[0]) > 1
