"""Models without nodes: the output is an input, or a stored tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.cli_harness import Shell


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def save_without_nodes(path: str, *outputs: str) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in outputs]
    graph = helper.make_graph([], "g", values[:1], values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_the_identity_has_a_derivative(shell: Shell) -> None:
    save_without_nodes("identity.onnx", "x")
    derived = shell("derive", "identity.onnx", "--kind", "jacobian", "-o", "derived.onnx")
    assert derived.code == 0, derived.err
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    (jacobian,) = onnxruntime.InferenceSession("derived.onnx").run(None, {"x": x})
    np.testing.assert_array_equal(jacobian.reshape(6, 6), np.eye(6))
    built = shell("build", "identity.onnx", "--loss", "mse", "--grad-of-input", "x", "-o", "train.onnx")
    assert built.code == 0 and "and proved" in built.out, built.err
    label = np.zeros((2, 3), np.float32)
    (x_grad,) = onnxruntime.InferenceSession("train.onnx").run(["x_grad"], {"x": x, "label": label})
    np.testing.assert_allclose(x_grad, 2 * x / 6, rtol=1e-6)


@pytest.mark.parametrize("command", [("inspect",), ("build", "-o", "t.onnx"), ("train", "--data", "data.npz")])
def test_there_is_nothing_to_train(command: tuple[str, ...], shell: Shell) -> None:
    save_without_nodes("identity.onnx", "x")
    np.savez("data.npz", x=np.zeros((4, 3), np.float32), label=np.zeros((4, 3), np.float32))
    result = shell(command[0], "identity.onnx", *command[1:], "--loss", "mse")
    assert result.code == 3 and result.facts == ("refused",)


def test_a_file_without_nodes_and_outputs_is_no_model(shell: Shell) -> None:
    save_without_nodes("empty.onnx")
    result = shell("derive", "empty.onnx", "-o", "derived.onnx")
    assert result.code == 1 and result.facts == ("unreadable_file", "empty.onnx")
