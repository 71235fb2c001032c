"""Every model that a command writes passes onnx's full check, which compares declared with inferred shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference

from tests.cli_harness import Shell

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

FLOAT = TensorProto.FLOAT


def network(as_inputs: bool = False) -> ModelProto:
    """A classifier as PyTorch's newer exporter writes it: types of all values are declared, those of weights too.

    Args:
        as_inputs: declare the weights as inputs, as files before IR version 4 do.
    """
    rng = np.random.default_rng(0)
    shapes = {
        "conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "bn.weight": (4,), "bn.bias": (4,), "bn.mean": (4,),
        "bn.var": (4,), "fc.weight": (10, 4), "fc.bias": (10,),
    }  # fmt: skip
    arrays = {name: rng.uniform(0.5, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays |= {"axes": np.array([2, 3]), "ratio": np.array(0.1, np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"], pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c", "bn.weight", "bn.bias", "bn.mean", "bn.var"], ["b"]),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Dropout", ["p", "ratio"], ["d"]),
        helper.make_node("ReduceMean", ["d", "axes"], ["m"], keepdims=0),
        helper.make_node("Gemm", ["m", "fc.weight", "fc.bias"], ["logits"], transB=1),
        helper.make_node("Identity", ["logits"], ["same"]),
        helper.make_node("Softmax", ["same"], ["probabilities"]),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["n", 3, 8, 8])]
    weights = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in shapes.items()]
    outputs = [
        helper.make_tensor_value_info("logits", FLOAT, ["n", 10]),
        helper.make_tensor_value_info("probabilities", FLOAT, ["n", 10]),
        helper.make_tensor_value_info("best", TensorProto.INT64, ["n"]),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "net", inputs + weights * as_inputs, outputs, tensors)
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])
    model = shape_inference.infer_shapes(model, strict_mode=True)
    model.graph.value_info.extend(weights if not as_inputs else [])
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "net.onnx")
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.normal(size=(8, 3, 8, 8)).astype(np.float32), label=np.arange(8) % 5)
    return Shell(tmp_path, capsys)


TRAIN = ("train", "net.onnx", "--loss", "cross-entropy:logits", "--data", "data.npz", "--epochs", 1, "-o", "t.onnx")
BUILD = ("build", "net.onnx", "--loss", "cross-entropy:logits", "--no-verify", "-o", "b.onnx")
CHECKPOINT = "t.onnx.run/checkpoint.safetensors"
COMMANDS: dict[str, list[tuple[object, ...]]] = {
    "build": [BUILD],
    "a whole step": [(*BUILD, "--optimizer", "adam", "--mode", "train", "--ema", 0.9)],
    "artifacts": [(*BUILD[:-2], "--artifacts", "parts")],
    "inputs": [(*BUILD, "--weights", "inputs")],
    "identifiers": [(*BUILD, "--identifiers")],
    "a fixed batch": [(*BUILD, "--dim", "n=4")],
    "training information": [(*BUILD, "--optimizer", "sgd", "--training-info"), ("expand", "b.onnx", "-o", "e.onnx")],
    "a Gradient node": [(*BUILD, "--as-gradient-op"), ("expand", "b.onnx", "-o", "e.onnx")],
    "a trained model": [TRAIN, ("export", CHECKPOINT, "--model", "net.onnx", "-o", "e.onnx")],
    "new classes": [
        (*TRAIN, "--classes", 5),
        ("export", CHECKPOINT, "--model", "net.onnx", "-o", "e.onnx"),
        ("export", "t.onnx", "--model", "net.onnx", "-o", "f.onnx"),
    ],
    "a new head alone": [(*TRAIN, "--classes", 5, "--preset", "head")],
    "adapters": [
        (*TRAIN, "--lora", 2),
        ("export", CHECKPOINT, "--model", "net.onnx", "-o", "e.onnx"),
        ("export", CHECKPOINT, "--model", "net.onnx", "--adaptable", "-o", "f.onnx"),
    ],
    "pack": [(*BUILD, "--optimizer", "sgd"), ("pack", "b.onnx", "--data", "data.npz", "-o", "page")],
    **{
        kind: [("derive", "net.onnx", "--kind", kind, "--of", "logits", "--option", "keep-outputs", "--no-verify")]
        for kind in ("vjp", "jvp", "hvp", "jacobian", "hessian")
    },
}  # fmt: skip


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.thinned(4)
def test_what_is_written(shell: Shell, what: str) -> None:
    for command in COMMANDS[what]:
        before = {*shell.folder.rglob("*.onnx")}
        result = shell(*command)
        assert result.code == 0, result.err
        written = {*shell.folder.rglob("*.onnx")} - before
        assert written
        for path in written:
            onnx.checker.check_model(path, full_check=True)


def test_new_classes_of_a_file_with_weights_among_its_inputs(shell: Shell) -> None:
    onnx.save(network(as_inputs=True), "net.onnx")
    result = shell(*TRAIN, "--classes", 5)
    assert result.code == 0, result.err
    onnx.checker.check_model("t.onnx", full_check=True)


def test_new_classes_are_declared_for_all_outputs(shell: Shell) -> None:
    assert shell(*TRAIN, "--classes", 5).code == 0
    outputs = {value.name: value.type.tensor_type.shape.dim for value in onnx.load("t.onnx").graph.output}
    sizes = {name: [dim.dim_param or dim.dim_value for dim in dims] for name, dims in outputs.items()}
    assert sizes == {"logits": ["n", 5], "probabilities": ["n", 5], "best": ["n"]}
